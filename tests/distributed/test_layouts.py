"""Five steps at every layout: the losses, norms, metrics and rewards of one process.

This stands for what any folder would say of layouts: each kind of objective and head, LoRA, frozen
layers, fp16, recomputing, products by oneDNN, gradients that are clipped, runs that go on from
their own checkpoint. ``layouts.py`` has which is trained where; a launch trains all of a layout.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from nemo_aligner.checkpoint.nemo.reward_model import read_text_rules
from nemo_aligner.parallel.layout import ParallelLayout
from tests.distributed import layouts
from tests.distributed.layouts import CASES, STEPS, archive, curve, validated

EXACT = 1e-5


def check_same(
    got: Path, wanted: Path, case: layouts.Case, inputs: Path, layout: ParallelLayout
) -> None:
    """Two runs had the same losses and gradient norms, and made the same reward model."""
    for name in ("train/loss", "train/grad_norm"):
        expected = curve(wanted, name)
        assert len(expected) == STEPS
        np.testing.assert_allclose(curve(got, name), expected, rtol=case.rtol, err_msg=name)
    if case.rtol > EXACT:
        return
    metrics = validated(wanted)
    assert len(metrics) > 10
    assert validated(got) == pytest.approx(metrics, rel=1e-4, abs=1e-5, nan_ok=True)
    rewards = [layouts.score(archive(folder), inputs, layout) for folder in (got, wanted)]
    assert np.ptp(rewards[1]) > 0.01
    np.testing.assert_allclose(*rewards, atol=1e-5)


def check_cases(
    got: Path, wanted: Path, names: Sequence[str], inputs: Path, layout: ParallelLayout
) -> None:
    """All that differ are told, by their names."""
    wrong = {}
    for name in names:
        folders = got / name, wanted / (CASES[name].like or name)
        try:
            check_same(*folders, CASES[name], inputs, layout)
        except AssertionError as error:
            wrong[name] = str(error)
    assert not wrong, "\n".join(f"{name}: {error}" for name, error in wrong.items())


def check_evaluation(run: Path, wanted: dict[str, float]) -> None:
    found = json.loads((run / "report.json").read_text())["metrics"]
    for name in ("accuracy", "reward_margin", "reward_chosen_mean", "reward_margin_p95"):
        assert found[name] == pytest.approx(wanted[f"validation-pairs/{name}"], abs=1e-5), name


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["tp2_sp", "pp2", "dp2"])
def test_layout_trains_like_one_process(
    name: str, inputs: Path, plain: Path, tmp_path: Path, layout: ParallelLayout
) -> None:
    layouts.train(inputs, {name: layouts.PLAIN}, 2, tmp_path)
    check_cases(tmp_path / name, plain, layouts.PLAIN, inputs, layout)


def test_layout_trains_all_kinds_of_models_like_one_process(
    inputs: Path, one_process: Path, tmp_path: Path, layout: ParallelLayout
) -> None:
    """By one launch, each where it has code of its own; in fp16 pp2's first stage is frozen."""
    at = {
        "tp2": ("ranking", "onednn", "plackett_luce", "bins", "formats", "zero_groups"),
        "tp2_sp": ("onednn",),
        "pp2": ("pairs_and_ratings", "fp16"),
        "dp2": ("onednn", "learned_ties", "quantiles"),
    }
    mixed = one_process / "pairs_and_ratings"
    evaluated = tmp_path / "evaluated"
    (evaluated / "checkpoints").mkdir(parents=True)
    archive(evaluated).symlink_to(archive(mixed))
    parallel = layouts.LAYOUTS["tp2_sp"]
    evaluation = layouts.evaluate(evaluated, inputs / "pairs.jsonl", *parallel)
    layouts.train(inputs, at, 2, tmp_path, evaluation)
    for name, cases in at.items():
        check_cases(tmp_path / name, one_process, cases, inputs, layout)
    check_evaluation(evaluated, validated(mixed))
    for folder in (tmp_path / "pp2/fp16", one_process / "fp16"):
        assert curve(folder, "train/loss_scale") == [2.0**16] * STEPS
        assert curve(folder, "train/skipped_steps") == [0.0] * STEPS
    assert "resumed from" in (tmp_path / "pp2/fp16.said").read_text()


def test_layout_of_four_ranks_trains_like_one_process(
    inputs: Path, one_process: Path, tmp_path: Path, layout: ParallelLayout
) -> None:
    """Of two stages by two replicas, that of the frozen layers has nothing to train."""
    at = {"tp2_pp2": ("ranking",), "pp2_dp2": ("frozen",)}
    layouts.train(inputs, at, 4, tmp_path)
    for name, cases in at.items():
        check_cases(tmp_path / name, one_process, cases, inputs, layout)
    assert "resumed from" in (tmp_path / "pp2_dp2/frozen.said").read_text()


def test_recomputing_trains_alike(inputs: Path, one_process: Path, layout: ParallelLayout) -> None:
    names = ("recompute", "recompute_one_layer", "recompute_onednn")
    check_cases(one_process, one_process, names, inputs, layout)


def test_training_on_each_kind_of_data_learns_and_says_what_it_read(one_process: Path) -> None:
    """By one process: what the layouts are compared with."""
    for name in ("plackett_luce", "learned_ties"):
        losses = curve(one_process / name, "train/loss")
        assert losses[-1] < losses[0], name
    metrics = validated(one_process / "pairs_and_ratings")
    assert {"validation-pairs/accuracy", "validation-ratings/pearson_mean"} <= set(metrics)
    assert "validation-pairs/pearson_mean" not in metrics
    assert {"validation-pairs/ece", "validation-pairs/reward_margin_p95"} <= set(metrics)
    _, contract = read_text_rules(archive(one_process / "pairs_and_ratings"))
    assert contract is not None
    assert contract.attributes == layouts.ATTRIBUTES
    assert contract.attribute_weights == (0.8, -0.5)
    said = (one_process / "formats.said").read_text()
    assert [known.name for known in layouts.OF_PAIRS if f"({known.name})" not in said] == []
    assert "1 read, 1 kept" in (one_process / "formats.evaluated").read_text()
    check_evaluation(one_process / "fp16", validated(one_process / "fp16"))
