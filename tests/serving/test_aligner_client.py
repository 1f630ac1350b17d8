"""NeMo-Aligner 0.7.0's own RemoteGPTRMClient gets the scorer's rewards in any batch."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from nemo_aligner.scoring.scorer import RewardScorer, load_scorer
from tests import tiny
from tests.once import Once
from tests.serving.servers import running

pytestmark = pytest.mark.slow(seconds=20)

REQUIREMENT = "nemo-aligner==0.7.0"
SERVE = "examples/serve_reward_model.py"
CLOSE = {"rtol": 0, "atol": 2.5e-6}
LONGEST = 48


def fetch(folder: Path) -> None:
    """The client's source, unpacked; it is there as a source distribution only."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    options = ["--no-binary", ":all:", "--no-build-isolation", "--dest", str(folder)]
    done = subprocess.run([*command, *options, REQUIREMENT], capture_output=True, text=True)
    archives = list(folder.glob("*.tar.gz"))
    if not archives:
        pytest.skip(f"the package {REQUIREMENT} cannot be had: {done.stderr.strip()[-200:]}")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder, filter="data")


@pytest.fixture(scope="module")
def source(once: Once) -> Path:
    (folder,) = once("nemo_aligner_client", fetch).glob("*/nemo_aligner")
    return folder.parent


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_reward_nemo(tmp_path_factory.mktemp("model") / "rm.nemo")


@pytest.fixture(scope="module")
def scorer(reward_model: Path, layout: Any) -> RewardScorer:
    return load_scorer(reward_model, layout)


@dataclass(frozen=True)
class Batch:
    """Token lists as a batch of NeMo-Aligner: filled up with ``fill``, and with more by it."""

    token_lists: list[list[int]]
    fill: int = 0
    pad_to_length: int | None = None

    def job(self) -> dict[str, Any]:
        width = max(map(len, self.token_lists)) + 2  # generation leaves room behind the longest
        rows = [[*row, *[self.fill] * (width - len(row))] for row in self.token_lists]
        lengths = [len(row) for row in self.token_lists]
        return {"tokens": rows, "lengths": lengths, "pad_to_length": self.pad_to_length}


def ask(source: Path, port: int | None, batches: list[Batch], folder: Path) -> list[dict[str, Any]]:
    """What the client gets for each batch; all are sent before the first is waited for."""
    job = {"port": port, "batches": [batch.job() for batch in batches]}
    return run_client("aligner_client.py", source, job, folder)


def run_client(script: str, source: Path, job: dict[str, Any], folder: Path) -> Any:
    """What comes of a job for the client in ``script``, which has the last line."""
    done = subprocess.run(
        [sys.executable, str(tiny.ROOT / "tests/serving" / script), str(source)],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=120,
        env=tiny.environment(),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_rewards_are_those_of_the_scorer(
    source: Path, reward_model: Path, scorer: RewardScorer, tmp_path: Path
) -> None:
    pytest.importorskip("pytriton")
    rng = random.Random(3)
    texts = [[rng.randrange(3, 300) for _ in range(rng.randint(1, LONGEST))] for _ in range(12)]
    seq_length = scorer.contract.seq_length
    good = [
        Batch(texts),
        Batch(texts[::-1], fill=2),
        Batch(texts, fill=-1),
        Batch(texts, pad_to_length=64),
        Batch(texts[:5], fill=1, pad_to_length=64),
        Batch(texts[5:], pad_to_length=2 * seq_length),
        *(Batch([text], pad_to_length=64) for text in texts),
    ]
    bad = Batch([texts[0], [5] * (seq_length + 1)])
    settings = [f"rm_model_file={reward_model}", "server.port=0"]
    with running(tmp_path, SERVE, *settings) as server:
        *found, refused = ask(source, urlsplit(server.url).port, [*good, bad], tmp_path)
    for batch, answer in zip(good, found, strict=True):
        assert answer["dtype"] == "torch.float32"
        wanted = scorer.score_tokens(batch.token_lists)
        np.testing.assert_allclose(answer["rewards"], wanted, **CLOSE)
    assert f"row 1: got {seq_length + 1} tokens, wanted 1 to {seq_length}" in refused["error"]
