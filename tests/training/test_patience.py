"""When a run has waited long enough for a better validation."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from nemo_aligner.checkpoint.runs import RunState, Saved
from nemo_aligner.config.load import config_to_dict, load_config
from nemo_aligner.config.training import MonitorMode, TrainConfig
from nemo_aligner.training.patience import Patience
from nemo_aligner.training.resume import changes_since, go_on

NAME = "validation/accuracy"


def waited(patience: Patience, *values: float) -> list[int]:
    found = []
    for value in values:
        patience.see({NAME: value})
        found.append(patience.since)
    return found


@pytest.mark.parametrize(
    ("mode", "min_delta", "since"),
    [
        (MonitorMode.max, 0.0, [0, 0, 1, 2, 0]),
        (MonitorMode.max, 0.05, [0, 1, 2, 3, 0]),
        (MonitorMode.min, 0.0, [0, 1, 2, 0, 1]),
    ],
)
def test_only_a_better_value_counts(mode: MonitorMode, min_delta: float, since: list[int]) -> None:
    patience = Patience(NAME, mode, allowed=9, min_delta=min_delta)
    assert waited(patience, 0.6, 0.62, 0.62, 0.5, 0.7) == since


def test_nan_and_a_validation_without_the_metric() -> None:
    patience = Patience(NAME, allowed=2)
    patience.see({"other/accuracy": 1.0})
    assert (patience.best, patience.since) == (None, 0)
    assert waited(patience, math.nan, math.nan) == [1, 2]
    assert patience.is_over
    assert patience.describe() == f"2 validations in a row without a better {NAME} than none"


def test_without_a_limit_nothing_ends() -> None:
    patience = Patience(NAME)
    assert waited(patience, *[0.5] * 50)[-1] == 49
    assert not patience.is_over


def test_a_run_goes_on_with_what_it_has_waited() -> None:
    patience = Patience(NAME, allowed=3)
    waited(patience, 0.5, 0.4, 0.4)
    later = Patience(NAME, allowed=3)
    later.go_on_from(patience.put_into(RunState(3, 24)))
    assert waited(later, 0.45) == [3]
    assert later.is_over


@pytest.mark.parametrize(
    ("change", "best"),
    [
        ([], 0.5),
        (["exp_manager.checkpoint_callback_params.monitor=loss"], None),
        (["exp_manager.checkpoint_callback_params.mode=min"], None),
        (["model.data.data_prefix.validation=[b.jsonl]"], None),
        (["trainer.rm.limit_val_records=5"], None),
        (["model.optim.lr=1e-3"], 0.5),
    ],
)
def test_what_is_judged_in_another_way_is_waited_for_anew(
    change: list[str], best: float | None
) -> None:
    settings = ["model.data.data_prefix.validation=[a.jsonl]"]
    before, now = (
        config_to_dict(load_config(TrainConfig, [*settings, *more])) for more in ([], change)
    )
    judged = {"validation/accuracy": 0.4}
    left = RunState(3, 24, judged, config=before, best_value=0.5, validations_since_best=2)
    state = go_on(RunState(0, 0, config=now), left)
    assert (state.step, state.consumed_samples) == (3, 24)
    assert (state.best_value, state.validations_since_best) == (best, 2 if best else 0)
    # On other records the last step was not validated.
    others = any("limit" in each or "validation" in each for each in change)
    assert state.metrics == ({} if others else judged)
    said = changes_since(Saved(Path("step_3"), left), RunState(0, 0, config=now))
    assert ("the best is looked for anew" in "".join(said)) == others
