"""The examples of reinforcement learning raise the held-out reward of a tiny policy."""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import numpy as np
import pytest

from nemo_aligner.serving.client import ScoredRows
from nemo_aligner.utils.errors import DataError
from tests.harness import tiny
from tests.serving.fake_server import CONTRACT
from tests.serving.servers import FAKE, QUICK, Server, running

FOLDER = tiny.ROOT / "examples/rl"
# The reward of a fake server is the sum of a text's letters, and the replacement character for
# bytes that are no UTF-8 is the largest by far.
GAIN = 50_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(tmp_path_factory.mktemp("server"), FAKE, *QUICK) as started:
        yield started


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A policy and prompts, as options of the examples."""
    folder = tmp_path_factory.mktemp("policy")
    tiny.write_hf_checkpoint(folder / "policy")
    rng = random.Random(1)
    for name, count in (("train", 40), ("heldout", 60)):
        prompts = [tiny.sentence(rng, 1, 4) for _ in range(count)]
        lines = [json.dumps({"prompt": prompt, "chosen": "", "rejected": ""}) for prompt in prompts]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return [
        f"--policy={folder / 'policy'}",
        f"--train={folder / 'train.jsonl'}",
        f"--heldout={folder / 'heldout.jsonl'}",
        *("--tokens=8", "--frozen-layers=0", "--prompts=8", "--replies=4"),
        "--attribute=sum",
    ]


def run(python: str | Path, script: str, *options: str) -> tuple[float, float, float]:
    """Held-out reward before and after training, and the KL divergence."""
    done = subprocess.run(
        [str(python), str(FOLDER / script), *options],
        capture_output=True,
        text=True,
        timeout=300,
        env=tiny.environment(),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    table = dict(
        re.findall(r"^(before|after) {4,}(\S+ ± \S+ +\S+ +\S+)$", done.stdout, re.MULTILINE)
    )
    first, last = (table[name].split() for name in ("before", "after"))
    return float(first[0]), float(last[0]), float(last[-1])


def test_leave_one_out_raises_the_reward(prepared: list[str], server: Server) -> None:
    options = [f"--url={server.url}", "--steps=40", "--lr=3e-3", "--kl=1"]
    first, last, drift = run(sys.executable, "rloo.py", *prepared, *options)
    assert last > first + GAIN
    assert drift > 0.1


def test_verl_gets_no_reward_of_a_rejected_reply_if_a_gateways_judge_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    verl_reward = importlib.import_module("verl_reward")
    rewards, failed = np.full((1, 2), np.nan), frozenset({0})
    scored = ScoredRows(rewards, {0: "judge: no"}, np.zeros(1, bool), unscored=failed)
    client = SimpleNamespace(
        contract_async=AsyncMock(return_value=CONTRACT),
        score_rows_async=AsyncMock(return_value=scored),
    )
    monkeypatch.setattr(verl_reward, "_client", client)
    prompt = {"prompt": [{"role": "user", "content": "a"}]}
    with pytest.raises(DataError, match="has no reward, and is not at fault: judge: no"):
        asyncio.run(verl_reward.compute_score("", "b", None, prompt, refused_reward=-5.0))


def test_heldout_prompts_are_replied_to_where_they_were_before_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TRL's trainer moves the model to a GPU, but neither the prompts nor the reference."""
    monkeypatch.syspath_prepend(str(FOLDER))
    policy = importlib.import_module("policy")
    places: list[str] = []
    monkeypatch.setattr(policy, "measure", lambda models, *_: places.append(models.model.device))
    monkeypatch.setattr(policy, "read_prompts", lambda *_: [])
    monkeypatch.setattr(policy, "print_table", lambda *_: None)
    models = SimpleNamespace(model=Model("cpu"), reference=Model("cpu"))
    options = SimpleNamespace(heldout=None, heldout_prompts=1, seed=1)
    with policy.compare_heldout(models, None, options):
        models.model.to("cuda")
    assert places == ["cpu", "cpu"]


class Model:
    """A model that only knows its device."""

    def __init__(self, device: str) -> None:
        self.device = device

    def to(self, device: str) -> Model:
        self.device = device
        return self

    def eval(self) -> Model:
        return self


def test_grpo_raises_the_reward(prepared: list[str], server: Server, trl_python: Path) -> None:
    options = [f"--url={server.url}", "--steps=40", "--lr=3e-3"]
    first, last, drift = run(trl_python, "grpo_trl.py", *prepared, *options)
    assert last > first + GAIN
    assert drift > 0.1


def test_ppo_raises_the_reward_with_its_critic_on_a_server(
    prepared: list[str], tmp_path: Path
) -> None:
    settings = [
        f"pretrained_checkpoint.restore_from_path={tiny.write_reward_nemo(tmp_path / 'rm.nemo')}",
        f"exp_manager.explicit_log_dir={tmp_path / 'critic'}",
        "trainer.ppo.combine_rm_and_critic_server=true",
        *("model.optim.lr=1e-3", "server.port=0"),
    ]
    with running(tmp_path, "examples/serve_ppo_critic.py", *settings) as server:
        options = [f"--url={server.url}", "--attribute=helpfulness", "--steps=30", "--lr=3e-3"]
        first, last, drift = run(sys.executable, "ppo.py", *prepared, *options, "--kl=0.01")
    assert last > first + 0.1
    assert drift > 0.1
