"""Heads with several outputs an attribute: evaluated as validated, refused where one is wanted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from nemo_aligner.checkpoint.nemo.reward_model import load_critic, read_text_rules
from nemo_aligner.errors import CheckpointError
from nemo_aligner.parallel.layout import ParallelLayout
from tests.checkpoint.hf.exporting import export
from tests.distributed import layouts
from tests.distributed.layouts import ATTRIBUTES, archive
from tests.training import jobs

NUMBERS = {"bins": (0.0, 1.0, 2.0, 3.0, 4.0), "quantiles": (0.1, 0.5, 0.9)}


@pytest.mark.parametrize("kind", NUMBERS)
def test_evaluation_repeats_the_validation_and_says_how_sure_it_is(
    one_process: Path, kind: str
) -> None:
    folder = one_process / kind
    assert "spread/helpful" in (one_process / f"{kind}.evaluated").read_text()
    validation = layouts.validated(folder)
    metrics = json.loads((folder / "report.json").read_text())["metrics"]
    for name in (
        "pearson/helpful",
        "spearman_mean",
        "spread/clear",
        "spread_error_correlation/clear",
    ):
        assert metrics[name] == pytest.approx(validation[f"validation-ratings/{name}"]), name
    rows = [json.loads(line) for line in (folder / "rewards.jsonl").read_text().splitlines()]
    assert set(rows[0]["rewards"]) == set(rows[0]["spread"]) == set(ATTRIBUTES)
    mean = np.mean([row["rewards"]["helpful"] for row in rows])
    assert mean == pytest.approx(validation["validation-ratings/reward_mean/helpful"], rel=1e-5)
    _, contract = read_text_rules(archive(folder))
    assert contract is not None
    readout = contract.output_readout
    assert readout is not None
    assert readout.numbers == (NUMBERS[kind],) * 2
    assert any(contract.label_means) == (kind == "quantiles")


def test_several_outputs_are_refused_where_one_is_read(
    one_process: Path, inputs: Path, tmp_path: Path, layout: ParallelLayout
) -> None:
    ratings = layouts.Case(layouts.REGRESSION, ("ratings",))
    dry_runs = []
    for kind in NUMBERS:
        model = archive(one_process / kind)
        message = f"its head has . outputs for each attribute .{kind}., wanted one: a "
        with pytest.raises(CheckpointError, match=message + "reward model of Hugging Face"):
            export(model, tmp_path / "out", layout)
        with pytest.raises(CheckpointError, match=message + "critic"):
            load_critic(model, layout)
        start = f"pretrained_checkpoint.restore_from_path={model}"
        settings = layouts.settings(inputs, ratings, "one", tmp_path / "run")
        dry_runs.append(jobs.Job("train", ["--dry-run", *settings, start], fails=True))
    for goes_on in jobs.run(dry_runs):
        assert goes_on.returncode == 1
        assert "model.objective: got one with one output for each attribute" in goes_on.stderr
