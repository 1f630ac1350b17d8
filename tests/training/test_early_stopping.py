"""When a run has waited long enough for a better validation, and what one that goes on keeps."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_aligner.checkpoint.run import RunState, Saved
from nemo_aligner.checkpoint.safe_load import read_json
from nemo_aligner.config.common import Precision
from nemo_aligner.config.load import config_to_dict, load_config
from nemo_aligner.config.training import MonitorMode, TrainConfig, TrainerConfig
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.losses import settings_of_run
from nemo_aligner.losses.pairwise import BradleyTerry
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.training.early_stopping import EarlyStopping
from nemo_aligner.training.resume import (
    changes_since,
    check_objective_exists,
    check_resumable,
    new_state,
    resumed_state,
)
from nemo_aligner.utils.errors import CheckpointError
from tests.data.files import build, write
from tests.harness import tiny
from tests.harness.contracts import Contracts

NAME = "validation/accuracy"
SHAPE = ModelShape.from_config(tiny.SMALLEST)


def count_validations(patience: EarlyStopping, *values: float) -> list[int]:
    counts = []
    for value in values:
        patience.count_validation({NAME: value}, step=1)
        counts.append(patience.validations_since_best)
    return counts


def test_patience_counts_validations_that_are_no_better() -> None:
    for mode, min_delta, since in (
        (MonitorMode.max, 0.0, [0, 0, 1, 2, 0]),
        (MonitorMode.max, 0.05, [0, 1, 2, 3, 0]),
        (MonitorMode.min, 0.0, [0, 1, 2, 0, 1]),
    ):
        patience = EarlyStopping(NAME, mode, patience=9, min_delta=min_delta)
        assert count_validations(patience, 0.6, 0.62, 0.62, 0.5, 0.7) == since, (mode, min_delta)
    # A NaN is no better; a validation without the metric does not count.
    patience = EarlyStopping(NAME, patience=2)
    patience.count_validation({"other/accuracy": 1.0}, step=1)
    assert (patience.best, patience.validations_since_best) == (None, 0)
    assert count_validations(patience, math.nan, math.nan) == [1, 2]
    assert patience.is_over
    assert patience.describe() == f"2 validations in a row without a better {NAME} than none"
    # Without a limit nothing ends.
    patience = EarlyStopping(NAME)
    assert count_validations(patience, *[0.5] * 50)[-1] == 49
    assert not patience.is_over


def test_a_run_goes_on_with_what_it_has_waited() -> None:
    patience = EarlyStopping(NAME, patience=3)
    count_validations(patience, 0.5, 0.4, 0.4)
    later = EarlyStopping(NAME, patience=3)
    later.restore(patience.store_in(RunState(3, 24)))
    assert count_validations(later, 0.45) == [3]
    assert later.is_over


def test_patience_waits_anew_for_what_is_judged_in_another_way() -> None:
    callback = "exp_manager.checkpoint_callback_params"
    settings = ["model.data.data_prefix.validation=[a.jsonl]"]
    judged = {NAME: 0.4}
    for change, best in (
        ("", 0.5),
        (f"{callback}.monitor=loss", 0.4),
        (f"{callback}.mode=min", 0.4),
        ("model.data.data_prefix.validation=[b.jsonl]", None),
        ("trainer.rm.limit_val_records=5", None),
        ("model.optim.lr=1e-3", 0.5),
    ):
        previous, now = (
            config_to_dict(load_config(TrainConfig, [*settings, *filter(None, more)]))
            for more in ([], [change])
        )
        left = RunState(3, 24, judged, config=previous, best_value=0.5, validations_since_best=2)
        state = resumed_state(RunState(0, 0, config=now), left, NAME)
        assert (state.step, state.consumed_samples) == (3, 24)
        count = (state.best_value, state.validations_since_best)
        assert count == (best, 2 if best == 0.5 else 0), change
        # On other records the last step was not validated.
        has_other_records = "limit" in change or "validation" in change
        assert state.metrics == ({} if has_other_records else judged), change
        changes = changes_since(Saved(Path("step_3"), left), RunState(0, 0, config=now), NAME)
        assert (
            "the last validations used other records" in "".join(changes)
        ) == has_other_records, change


def test_resume_with_other_sets_keeps_what_was_judged_on_the_monitored_one() -> None:
    both = {"validation": "a", "more": "b"}
    swapped = dict(reversed(both.items()))
    named, named_x = (
        {"exp_manager": {"checkpoint_callback_params": {"monitor": name}}}
        for name in (NAME, "x/accuracy")
    )
    renamed = (named_x, named)
    for before, after, configs, monitor, kept, best in (
        ({"validation": "a"}, both, ({}, {}), NAME, {"validation"}, 0.5),
        ({"validation": "a"}, swapped, (named, named), NAME, {"validation"}, 0.5),
        ({"validation": "a"}, swapped, ({}, {}), "more/accuracy", set(), None),
        (both, swapped, ({}, {}), "more/accuracy", {"validation", "more"}, 0.4),
        (both, {"validation": "a", "more": "c"}, ({}, {}), NAME, {"validation"}, 0.5),
        (both, {"validation": "a"}, ({}, {}), NAME, {"validation"}, 0.5),
        (both, {"validation": "c", "more": "b"}, ({}, {}), NAME, set(), None),
        # Another file may rename a set, also to the name that another set had.
        ({"x": "a"}, both, ({}, {}), NAME, {"validation"}, 0.5),
        ({"validation": "b", "x": "a"}, both, renamed, NAME, {"validation", "more"}, 0.5),
        ({"x": "a", "validation": "d"}, {"validation": "a"}, renamed, NAME, {"validation"}, 0.5),
    ):
        metrics = {f"{name}/accuracy": 0.4 for name in before}
        left = RunState(3, 24, metrics, {}, configs[0], {}, 0.5, 2, before)
        fresh = RunState(0, 0, config=configs[1], validated_on=after)
        state = resumed_state(fresh, left, monitor)
        assert state.metrics == {f"{name}/accuracy": 0.4 for name in kept}, after
        count = (state.best_value, state.validations_since_best)
        assert count == (best, 2 if best == 0.5 else 0), after
        (*_, last) = ("", *changes_since(Saved(Path("step_3"), left), fresh, monitor))
        assert ("the last validations used other records" in last) == (not kept), after
    # A part of the run without validation data forgets nothing.
    left = RunState(3, 24, validated_on={}, ranked_by=["a/accuracy:max"])
    fresh = RunState(0, 0, validated_on=both)
    assert changes_since(Saved(Path("step_3"), left), fresh, NAME) == []
    assert resumed_state(fresh, left, NAME).ranked_by == left.ranked_by
    # Back on the records of a still earlier part, the step need not be validated on them again, and
    # early stopping starts over from it.
    metrics, earlier = {NAME: 0.4}, {"a/accuracy": 0.3}
    left = replace(left, metrics=metrics, earlier_metrics=earlier, validated_on={"validation": "d"})
    state = resumed_state(fresh, replace(left, best_value=0.5), NAME)
    assert (state.metrics, state.best_value, state.earlier_metrics) == ({NAME: 0.3}, 0.3, {})
    assert changes_since(Saved(Path("step_3"), left), fresh, NAME) == [
        "  changed since: the records of validation",
        "  the last validations used other records, so they do not count for the best checkpoint "
        "or early stopping",
    ]


def test_resume_on_a_changed_validation_file_judges_anew(base: Path, tmp_path: Path) -> None:
    """What was better on records that are gone is neither the best nor waited for."""
    train = tiny.write_pairs(tmp_path / "train.jsonl", 24)
    heldout = tiny.write_pairs(tmp_path / "heldout.jsonl", 9, seed=1)
    run = tmp_path / "run"
    settings = [
        *tiny.training(base, run, train, heldout),
        "trainer.rm.val_check_interval=2",
        "exp_manager.checkpoint_callback_params.save_top_k=3",
        "exp_manager.checkpoint_callback_params.average_best=3",
    ]
    tiny.run_verb("train", *settings, "trainer.rm.max_steps=4")
    # All of them the other way round: what was learned is wrong there.
    lines = [json.loads(line) for line in heldout.read_text().splitlines()]
    for line in lines:
        line["chosen"], line["rejected"] = line["rejected"], line["chosen"]
    heldout.write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = tiny.run_verb("train", *settings, "trainer.rm.max_steps=6").stdout
    assert "changed since: the records of validation-heldout" in output
    assert "the last validations used other records" in output
    shown = output[output.index("checkpoints, the best first") :].splitlines()[2:6]
    assert [line.split()[1] for line in shown if "on other validation records" in line] == ["2"]
    chosen = [line.split()[1] for line in shown if "(chosen)" in line]
    assert sorted(chosen) == ["4", "6"]  # step 4 was validated again, as it is where this began
    states = [read_json(path, "state") for path in run.glob("checkpoints/step_*/run_state.json")]
    name = "validation-heldout/accuracy"
    accuracies = {state["step"]: state["metrics"][name] for state in states}
    assert accuracies[2] > 0.5 > max(accuracies[4], accuracies[6])


def test_resume_knows_several_files_of_a_version_without_digests_by_their_tokens(
    tmp_path: Path, contracts: Contracts
) -> None:
    """A run goes on with the same data, whatever version has written its checkpoint."""
    files = [tiny.write_pairs(tmp_path / f"{seed}.jsonl", 9, seed) for seed in range(2)]
    data = build(contracts, files)
    config = TrainConfig(trainer=TrainerConfig(precision=Precision.fp32))
    fresh = new_state(config, SHAPE, data)
    assert fresh.fingerprint["training data"] == data.train.digest != data.train.measure_digest()

    def again(digest: str) -> Any:
        state = replace(fresh, fingerprint={**fresh.fingerprint, "training data": digest})
        return check_resumable(Saved(tmp_path, state), fresh, data)

    assert again(data.train.digest)
    assert again(data.train.measure_digest())
    with pytest.raises(CheckpointError, match="training data: the checkpoint has"):
        again(build(contracts, files[::-1]).train.measure_digest())


def test_resume_rejects_another_value_of_the_setting_that_trains_routers(
    tmp_path: Path, contracts: Contracts
) -> None:
    """The optimizer has other parameters then. An earlier version wrote it with all settings."""
    data = build(contracts, [tiny.write_pairs(tmp_path / "a.jsonl", 9)])

    def start(trained: bool) -> RunState:
        config = TrainConfig(trainer=TrainerConfig(precision=Precision.fp32))
        config.model.train_router = trained
        return new_state(config, SHAPE, data)

    def forget(state: RunState, config: dict[str, Any]) -> RunState:
        fingerprint = {**state.fingerprint}
        del fingerprint["model.train_router"]
        return replace(state, fingerprint=fingerprint, config=config)

    for trained in (True, False):
        now, other = start(trained), start(not trained)
        for left in (now, forget(now, now.config)):
            assert check_resumable(Saved(tmp_path, left), now, data)
        for left in (other, forget(other, other.config)):
            with pytest.raises(CheckpointError, match=r"model\.train_router: the checkpoint has"):
                check_resumable(Saved(tmp_path, left), now, data)
    assert check_resumable(Saved(tmp_path, forget(now, {})), now, data)  # before the setting


def test_resume_rejects_a_run_of_an_objective_that_was_removed(
    tmp_path: Path, contracts: Contracts
) -> None:
    data = build(contracts, [tiny.write_pairs(tmp_path / "a.jsonl", 9)])
    config = TrainConfig(trainer=TrainerConfig(precision=Precision.fp32))
    fresh = new_state(config, SHAPE, data)
    for name in ("odin", "regularized_by_language"):
        left = replace(fresh, fingerprint={**fresh.fingerprint, "model.objective": name})
        expected = f"{re.escape(str(tmp_path))}: .*{name} was removed in .*; use .*explicit_log_dir"
        with pytest.raises(CheckpointError, match=expected):
            check_objective_exists(Saved(tmp_path, left))


def test_resume_knows_the_rule_for_steps_of_a_version_whose_contract_did_not_say_it(
    tmp_path: Path, contracts: Contracts
) -> None:
    data = build(contracts, [tiny.write_pairs(tmp_path / "a.jsonl", 9)])
    config = TrainConfig(trainer=TrainerConfig(precision=Precision.fp32))
    stepped = replace(data.contract, scored_position="turns")
    least = replace(data, contract=replace(stepped, aggregate="min"))
    least = replace(least, objective=BradleyTerry(aggregate="min"))
    last = replace(data, contract=stepped)
    fresh = new_state(config, SHAPE, least)

    def goes_on_from(left: RunState) -> bool:
        return check_resumable(Saved(tmp_path, left), fresh, least) is not None

    fingerprint = {**fresh.fingerprint, "scoring contract": stepped.hash}
    assert goes_on_from(fresh)
    assert goes_on_from(replace(fresh, contract=stepped.to_dict(), fingerprint=fingerprint))
    with pytest.raises(CheckpointError, match=r"model\.objective_kwargs: the checkpoint has"):
        goes_on_from(new_state(config, SHAPE, last))
    read_elsewhere = replace(least.contract, scored_position="last_token", aggregate=None)
    with pytest.raises(CheckpointError) as caught:
        goes_on_from(replace(fresh, contract=read_elsewhere.to_dict()))
    assert "model.head.reads: the checkpoint has 'last_token', this run 'turns'" in str(
        caught.value
    )
    assert read_elsewhere.hash not in str(caught.value)


def test_run_from_before_probabilities_goes_on_with_log_odds(
    tmp_path: Path, contracts: Contracts
) -> None:
    """Its state names no scale, and its contract has no readout; a new run's has one."""
    record = {"prompt": "why", "completions": ["the cat", "sings"], "labels": [1, 0]}
    files = [write(tmp_path / "steps.jsonl", record)]
    rules = {"scored_position": "step_ends", "step_separator": "\n\n"}
    plain = replace(contracts(["right"]), **rules)
    name = "binary_cross_entropy"

    def built(settings: dict[str, Any]) -> tuple[TrainConfig, Any]:
        options = {"attributes": ["right"], "contract": plain, "objective": name}
        config = TrainConfig(trainer=TrainerConfig(precision=Precision.fp32))
        config.model = replace(contracts.config(["right"]), objective=name)
        return config, build(contracts, files, settings=settings, **options)

    config, data = built({"scale": "log_odds"})
    state = new_state(config, SHAPE, data)
    assert data.contract.hash == plain.hash
    earlier = replace(state, fingerprint={**state.fingerprint, "model.objective_kwargs": {}})
    assert earlier.fingerprint != state.fingerprint
    latest = Saved(tmp_path, earlier)
    contract = ScoringContract.from_dict(earlier.contract)
    config, data = built(settings_of_run(config.model, contract))
    fresh = new_state(config, SHAPE, data)
    assert check_resumable(latest, fresh, data)
    # Without it the contract would be another one, which no run goes on by.
    config, data = built({})
    fresh = new_state(config, SHAPE, data)
    with pytest.raises(CheckpointError, match="readout"):
        check_resumable(latest, fresh, data)
    assert settings_of_run(config.model, data.contract) == {}
