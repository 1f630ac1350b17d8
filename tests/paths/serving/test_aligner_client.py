"""NeMo-Aligner 0.7.0's own RemoteGPTRMClient gets the same rewards as the scorer, in any batch."""

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

from nemo_aligner.serving.engine.scorer import RewardScorer
from tests.harness import tiny
from tests.harness.environments import package
from tests.harness.once import Once
from tests.harness.scorers import score_tokens
from tests.serving.servers import Server

REQUIREMENT = "nemo-aligner==0.7.0"
CLOSE = {"rtol": 0, "atol": 2.5e-6}
LONGEST = 48


def fetch(folder: Path) -> None:
    """Download the client's source and unpack it; it exists only as a source distribution."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    options = ["--no-binary", ":all:", "--no-build-isolation", "--dest", str(folder)]
    done = subprocess.run([*command, *options, REQUIREMENT], capture_output=True, text=True)
    archives = list(folder.glob("*.tar.gz"))
    if not archives:
        pytest.skip(f"the package {REQUIREMENT} cannot be had: {done.stderr.strip()[-200:]}")
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder, filter="data")


@dataclass(frozen=True)
class Batch:
    """Token lists as NeMo-Aligner batches them: padded with ``fill``, beyond the longest one."""

    token_lists: list[list[int]]
    fill: int = 0
    pad_to_length: int | None = None

    def job(self) -> dict[str, Any]:
        width = max(map(len, self.token_lists)) + 2  # generation leaves room behind the longest
        rows = [[*row, *[self.fill] * (width - len(row))] for row in self.token_lists]
        lengths = [len(row) for row in self.token_lists]
        return {"tokens": rows, "lengths": lengths, "pad_to_length": self.pad_to_length}


def run_client(once: Once, folder: Path, server: Server, **asked: Any) -> Any:
    """Run a job by their client in another process, and return the last line that it prints."""
    (source,) = once("nemo_aligner_client", fetch).glob("*/nemo_aligner")
    job = {"port": urlsplit(server.url).port, **asked}
    done = subprocess.run(
        [sys.executable, str(tiny.ROOT / "tests/serving/aligner_client.py"), str(source.parent)],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=120,
        # Their client is built on pytriton, whose client also works with our version of numpy.
        env=tiny.environment(PYTHONPATH=str(package("nvidia-pytriton==0.7.0"))),
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_aligner_client_gets_the_rewards_of_the_scorer(
    model_server: Server, scorer: RewardScorer, once: Once, tmp_path: Path
) -> None:
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
    # All requests are sent before the first answer is awaited.
    batches = [batch.job() for batch in (*good, bad)]
    *found, refused = run_client(once, tmp_path, model_server, batches=batches)
    for batch, answer in zip(good, found, strict=True):
        assert answer["dtype"] == "torch.float32"
        wanted = score_tokens(scorer, batch.token_lists)
        np.testing.assert_allclose(answer["rewards"], wanted, **CLOSE)
    assert f"row 1: got {seq_length + 1} tokens, wanted 1 to {seq_length}" in refused["error"]
