"""The benchmark of distillation on a tiny model."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nemo_aligner.evaluation.predictions import Prediction, Predictions
from tests.harness import tiny

# Settings of a training of two steps.
SHORT_RUN = (
    "trainer.rm.max_steps=2",
    "model.global_batch_size=4",
    "model.optim.sched.warmup_steps=1",
)


@pytest.fixture
def distillation(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(tiny.ROOT / "benchmarks"))
    return import_module("distillation")


def test_distillation_trains_labels_and_compares(
    distillation: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    called: list[str] = []

    def call(experiment: Any, name: str, command: Sequence[str], device: int = 0) -> None:
        called.append(name)
        tiny.run_verb(*command)

    monkeypatch.setattr(distillation.Experiment, "_call", call)
    base, more = tiny.write_base_nemo(tmp_path / "base.nemo"), tmp_path / "more.jsonl"
    files = {"base": base, "more": tiny.write_pairs(more, 12, seed=1)}
    files |= dict.fromkeys(("train", "heldout"), tiny.write_pairs(tmp_path / "pairs.jsonl", 12))
    options = [f"--{name}={path}" for name, path in files.items()]
    run = ["distillation.py", *options, f"--output={tmp_path}/out", "--seeds", "1", "2"]
    run += ["--ways", "pseudo_more", "one_head", "--", *SHORT_RUN]
    monkeypatch.setattr(sys, "argv", run)
    distillation.main()
    first = capsys.readouterr().out
    assert called.index("label_more") < called.index("pseudo_more_1")
    rows = {line.split(" | ")[0]: line.split(" | ") for line in first.splitlines()}
    for title in ("human labels, hard", "all seeds start from one", "mean of the weights"):
        assert sum(row.startswith(f"| {title}") for row in rows) == 1
    soft, pseudo = (
        [json.loads(line) for line in (tmp_path / f"out/more_{kind}.jsonl").open()]
        for kind in ("soft", "pseudo")
    )
    for before, after in zip(soft, pseudo, strict=True):
        in_order = before["teacher_rewards"][0] >= before["teacher_rewards"][1]
        assert (after["chosen"] == before["chosen"]) is in_order
    assert 0 < sum(a["chosen"] != b["chosen"] for a, b in zip(soft, pseudo, strict=True)) < 12
    called.clear()
    distillation.main()
    assert (called, capsys.readouterr().out) == ([], first)


@pytest.mark.parametrize(
    ("visible", "wanted"), [(None, ["0", "1", "2"]), ("4,GPU-7", ["4", "GPU-7", "4"])]
)
def test_distillation_uses_the_gpus_that_it_was_given(
    distillation: Any,
    visible: str | None,
    wanted: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "CUDA_VISIBLE_DEVICES"
    monkeypatch.delenv(name, raising=False)
    if visible is not None:
        monkeypatch.setenv(name, visible)
    used = []

    def run(program: Sequence[str], *, env: dict[str, str], **unused: Any) -> SimpleNamespace:
        used.append(env[name])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(distillation.subprocess, "run", run)
    experiment = distillation.Experiment(SimpleNamespace(output=tmp_path, jobs=3))
    for device in range(3):
        experiment._call("work", ["train"], device)
    assert used == wanted


def test_distillation_measures_paired_differences(distillation: Any) -> None:
    """Both ways are right on half of the pairs, but the mean of their rewards on all."""
    replies = [("a longer reply", "a reply"), ("a reply", "a longer reply")]
    rewards = np.array([[[3, 0], [0, 1]], [[0, 1], [3, 0]]], dtype=float)
    members = [
        Predictions(
            [Prediction.of_pair("1", "", *pair) for pair in zip(replies, model, strict=True)]
        )
        for model in rewards
    ]
    assert [distillation.mean_of_rewards(members).right.tolist()] == [[1, 1]]
    table = distillation.render({"teacher": members, "soft": members[:1]}).splitlines()
    assert table[2].split(" | ")[1:4] == ["50.0%, 50.0%", "50.0%", "50.0%"]
    assert table[3].split(" | ")[1:3] == ["100.0%", "100.0%"]
    assert table[3].endswith("| +50.0% (+50.0% to +50.0%) |")
    assert table[4].endswith("| +0.0% (-50.0% to +50.0%) |")
