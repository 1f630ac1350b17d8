"""Five steps at every layout give the losses, norms, metrics and rewards of one process.

The cases cover every kind of objective and head, LoRA, frozen layers, fp16, recomputation, matmuls
by oneDNN, gradient clipping, and resuming from the layout's own checkpoint. ``layouts.py`` lists
what is trained at which layout; one launch trains all cases of a layout.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.checkpoint.nemo.reward_model import read_text_rules
from nemo_aligner.contract.from_settings import check_plain_reading
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.utils.errors import CheckpointError
from tests.checkpoint.hf.exporting import export
from tests.data.files import rows_of
from tests.distributed import layouts
from tests.distributed.layouts import ATTRIBUTES, CASES, STEPS, archive, curve, validated
from tests.training import jobs

EXACT = 1e-5


def check_same(
    got: Path, wanted: Path, case: layouts.Case, inputs: Path, layout: ParallelLayout
) -> None:
    """Check that two runs have equal losses and gradient norms, and give the same reward model."""
    for name in ("train/loss", "train/grad_norm"):
        expected = curve(wanted, name)
        assert len(expected) == STEPS
        np.testing.assert_allclose(curve(got, name), expected, rtol=case.rtol, err_msg=name)
    if case.rtol > EXACT:
        return
    metrics = validated(wanted)
    assert len(metrics) > 10
    assert validated(got) == pytest.approx(metrics, rel=1e-4, abs=1e-5, nan_ok=True)
    expected = rewards_of(archive(wanted).resolve(), inputs, layout)
    assert np.ptp(expected) > 0.01
    np.testing.assert_allclose(layouts.score(archive(got), inputs, layout), expected, atol=1e-5)


@functools.cache
def rewards_of(reference: Path, inputs: Path, layout: ParallelLayout) -> np.ndarray:
    """Score with the model of one process, which several layouts are compared with."""
    return layouts.score(reference, inputs, layout)


def check_cases(
    got: Path, wanted: Path, names: Sequence[str], inputs: Path, layout: ParallelLayout
) -> None:
    """Check all cases, and report all that differ by their names."""
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
def test_layout_of_two_ranks_trains_like_one_process(
    inputs: Path, plain: Path, tmp_path: Path, layout: ParallelLayout
) -> None:
    at = dict.fromkeys(("tp2_sp", "pp2", "dp2", "cp2"), layouts.PLAIN)
    layouts.train(inputs, at, 2, tmp_path)
    for name, cases in at.items():
        check_cases(tmp_path / name, plain, cases, inputs, layout)


def test_layout_trains_all_kinds_of_models_like_one_process(
    inputs: Path, one_process: Path, tmp_path: Path, layout: ParallelLayout
) -> None:
    """One launch trains the cases that a layout has code for; in fp16, pp2's stage 0 is frozen.

    An objective gets rewards, however the model is split; so most objectives are trained at dp2,
    which splits records.
    """
    at = {
        "tp2": ("bins", "zero_groups"),
        "tp2_sp": ("onednn", "hybrid_lora", "nf4"),
        "pp2": ("hybrid", "offload", "pairs_and_ratings", "fp16"),
        "dp2": (
            "learned_ties",
            "quantiles",
            "against_length",
            "heads",
            "soft_labels",
            "trajectories",
        ),
        "cp2_ring": ("recompute", "offload"),
        "cp2": ("learned_ties", "frozen", "pairs_and_ratings"),
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
    """Every two kinds of parallelism together; some of them with LoRA or with process rewards.

    "trajectories" and "expert_steps" have both. In "frozen" one of the two stages has nothing to
    train.
    """
    at = {
        "tp4": ("nf4",),
        "tp2_sp_pp2": ("trajectories",),
        "pp2_dp2": ("frozen",),
        "tp2_cp2": ("trajectories",),
        "tp2_cp2_ring": ("ranking",),
        "cp4_ring": ("lora",),
        "pp2_cp2": ("trajectories",),
        "cp2_dp2": ("plackett_luce",),
        "ep2_tp2": ("experts",),
        "ep2_cp2": ("expert_steps",),
        "ep2_pp2": ("experts",),
    }
    layouts.train(inputs, at, 4, tmp_path)
    for name, cases in at.items():
        check_cases(tmp_path / name, one_process, cases, inputs, layout)
    assert "resumed from" in (tmp_path / "pp2_dp2/frozen.said").read_text()


@pytest.mark.parametrize(("name", "first"), [("frozen", "cp2"), ("nf4", "tp2_sp")])
def test_run_at_a_layout_goes_on_in_one_process(
    inputs: Path, one_process: Path, tmp_path: Path, layout: ParallelLayout, name: str, first: str
) -> None:
    """The model with plain weights is also exported, and transformers scores samples with it."""
    case, folder = CASES[name], tmp_path / name

    def job(at: str, steps: int) -> jobs.Job:
        given = layouts.settings(inputs, case, at, folder)
        return jobs.Job("train", [*given, f"trainer.rm.max_steps={steps}"])

    jobs.run([job(first, layouts.PART)], processes=2)
    (goes_on,) = jobs.run([job("one", STEPS)])
    assert "resumed from" in goes_on.stdout
    check_same(folder, one_process / name, case, inputs, layout)
    if name == "frozen":
        export(archive(folder), tmp_path / "hf", layout)


def test_recomputing_trains_alike(inputs: Path, one_process: Path, layout: ParallelLayout) -> None:
    names = ("recompute", "recompute_one_layer", "recompute_onednn")
    check_cases(one_process, one_process, names, inputs, layout)


def test_training_on_each_kind_of_data_learns_and_says_what_it_read(one_process: Path) -> None:
    """In one process, with which the layouts are compared."""
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


@pytest.mark.parametrize(("name", "rule"), [("trajectories", "product"), ("least_step", "min")])
def test_reward_of_a_trajectory_is_one_in_validation_report_and_evaluation(
    one_process: Path, name: str, rule: str
) -> None:
    folder = one_process / name
    _, contract = read_text_rules(archive(folder))
    assert contract is not None
    assert contract.aggregate == rule
    validation = validated(folder)
    evaluation = json.loads((folder / "report.json").read_text())["metrics"]
    for metric in ("accuracy", "reward_margin", "reward_chosen_mean", "reward_margin_p05", "ece"):
        assert evaluation[metric] == validation[f"validation-trajectories/{metric}"], metric
    heldout = folder / "heldout" / "validation-trajectories.jsonl"
    rows, reported = (
        [row["rewards"] for row in rows_of(path)] for path in (folder / "rewards.jsonl", heldout)
    )
    assert rows == reported
    flat = [reward for row in rows for reward in row.values()]
    assert contract.reward_mean == (pytest.approx(np.mean(flat)),)
    assert contract.reward_std == (pytest.approx(np.std(flat)),)


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
        exported = export(model, tmp_path / kind, layout)  # tests/checkpoint/hf checks its rewards
        assert (exported.contract.readout is None) == (kind == "quantiles")
        outputs = f"its head has . outputs for each attribute .{kind}."
        message = f"{outputs}, wanted one that is the reward: a critic"
        _, contract = read_text_rules(model)
        with pytest.raises(CheckpointError, match=message):
            check_plain_reading(contract, str(model), "a critic")
        start = f"pretrained_checkpoint.restore_from_path={model}"
        settings = layouts.settings(inputs, ratings, "one", tmp_path / "run")
        dry_runs.append(jobs.Job("train", ["--dry-run", *settings, start], fails=True))
    for goes_on in jobs.run(dry_runs):
        assert goes_on.returncode == 1
        assert "model.objective: it needs one output for each attribute" in goes_on.stderr


DAVIDSON = layouts.Case(
    (
        "model.objective=davidson",
        "model.objective_kwargs.learned=true",
        "model.head.bias=true",
        "model.optim.sched.name=constant",
        "trainer.precision=bf16",
    ),
    ("rankings",),
)


def test_tie_parameter_that_is_learned_goes_on_where_a_run_was_left(
    inputs: Path, tmp_path: Path
) -> None:
    runs = {name: layouts.settings(inputs, DAVIDSON, "one", tmp_path / name) for name in "ab"}
    parts = [("a", 4), ("b", 2), ("b", 4)]
    jobs.run([jobs.Job("train", [*runs[n], f"trainer.rm.max_steps={end}"]) for n, end in parts])
    # Before every step of the run so far.
    whole, again = (layouts.curve(tmp_path / name, "train/tie_parameter") for name in "ab")
    assert again[-2:] == whole[-2:]
    # After the warm-up, the learning rate of the scalar is a hundred times that of the weights,
    # and a step of Adam is nearly as large.
    assert whole[0] == 1.0
    assert 0.05 < abs(math.log(whole[3] / whole[2])) < 0.11
    with open_nemo(layouts.archive(tmp_path / "a")) as folder:
        heads = [name for name in folder.tensors if name.startswith("rm_head.")]
    assert sorted(heads) == ["rm_head.bias", "rm_head.weight"]
