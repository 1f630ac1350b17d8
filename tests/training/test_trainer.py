"""The loop, with a learner and checkpoints that only write down what is asked of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from nemo_aligner.checkpoint import runs
from nemo_aligner.checkpoint.runs import RunCheckpoints, RunState, Saved
from nemo_aligner.config.training import RmLoopConfig, TrainConfig
from nemo_aligner.console import Watch
from nemo_aligner.errors import TrainingError
from nemo_aligner.parallel.cpu.malloc import FreedMemory
from nemo_aligner.parallel.launch import launch
from nemo_aligner.training.patience import Patience
from nemo_aligner.training.resume import go_on
from nemo_aligner.training.stop import StopRequest
from nemo_aligner.training.trainer import SupervisedTrainer


class Diary:
    """Learner, checkpoints and logger in one."""

    model = optimizer = None

    def __init__(
        self, best: tuple[int, ...] = (), stop_at: int | None = None, write_for: int = 0
    ) -> None:
        self.events: list[str] = []
        self.logged: dict[int, dict[str, float]] = {}
        self.saved: list[RunState] = []
        self.best, self.stop_at, self.step = best, stop_at, 0
        self.now = 0.0
        self.pending: Saved | None = None
        self.write_for, self.steps_to_write = write_for, 0

    def train_step(self, step: int) -> dict[str, float]:
        self.step = step + 1
        self.steps_to_write -= 1
        self.now = float(self.step == self.stop_at)
        self.events.append(f"train {step}")
        return {"loss": 0.5, "tokens": 100.0, "flops": 1e9}

    def validate(self, watch: Watch) -> dict[str, float]:
        self.events.append(f"validate {self.step}")
        for done in range(3):
            watch(done, 2)
        return {"validation/accuracy": 0.5}

    monitor = "validation/accuracy"

    def leader(self) -> Saved | None:
        known = [state for state in self.saved if self.monitor in state.metrics]
        return Saved(Path("somewhere"), known[0]) if known else None

    def is_among_best(self, metrics: Mapping[str, float]) -> bool:
        return bool(metrics) and self.step in self.best

    def save(self, state: RunState, model: Any, optimizer: Any) -> None:
        assert self.pending is None
        self.events.append(f"save {state.step}")
        self.saved.append(state)
        self.pending = Saved(Path("somewhere"), state)
        self.steps_to_write = self.write_for

    def amend(self, state: RunState) -> None:
        self.events.append(f"amend {state.step}")
        self.saved = [state if state.step == each.step else each for each in self.saved]

    @property
    def is_written(self) -> bool:
        return self.pending is None or self.steps_to_write <= 0

    def publish(self) -> Saved | None:
        published, self.pending = self.pending, None
        if published is not None:
            self.events.append(f"publish {published.state.step}")
        return published

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.logged.setdefault(step, {}).update(metrics)


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with launch():
        yield


def fit(
    diary: Diary,
    total: int,
    start: int | RunState = 0,
    patience: Patience | None = None,
    **loop: Any,
) -> str | None:
    config = TrainConfig()
    config.trainer.rm = RmLoopConfig(**loop)
    config.model.global_batch_size = 8
    stop = StopRequest("00:00:00:01", now=lambda: diary.now)
    state = start
    if not isinstance(state, RunState):
        state = RunState(state, state * 8, fingerprint={"model.seed": 1})
    diary.step = state.step
    trainer = SupervisedTrainer(
        diary,
        config,
        total,
        state,
        diary,  # type: ignore[arg-type]
        diary,
        stop,
        "cpu",
        patience,
    )
    outcome = trainer.fit()
    assert outcome.step == diary.step
    return outcome.stopped_by and str(outcome.stopped_by)


def test_validates_and_saves_at_intervals_and_at_the_end() -> None:
    diary = Diary()
    assert fit(diary, 5, val_check_interval=2, save_interval=4, val_before_training=True) is None
    assert diary.events == [
        "validate 0",
        *("train 0", "train 1", "validate 2"),
        *("train 2", "train 3", "validate 4", "save 4"),
        *("train 4", "publish 4", "validate 5", "save 5", "publish 5"),
    ]
    assert diary.saved[-1].consumed_samples == 40
    assert diary.saved[-1].metrics == {"validation/accuracy": 0.5}
    assert diary.saved[-1].fingerprint == {"model.seed": 1}
    assert diary.logged[5]["train/consumed_samples"] == 40
    assert diary.logged[5]["train/tokens_per_second"] > 0
    assert set(diary.logged[5]) >= {
        "timing/train_step",
        "timing/validation/total_validation_time",
        "timing/save",
        "timing/save_in_background",
        "timing/publish",
    }


def test_without_intervals_only_at_the_end() -> None:
    diary = Diary()
    fit(diary, 3, val_check_interval=None, save_interval=None)
    assert diary.events[-3:] == ["validate 3", "save 3", "publish 3"]
    assert len(diary.events) == 6


def test_saves_a_best_one_between_the_intervals() -> None:
    diary = Diary(best=(1, 3))
    fit(diary, 4, val_check_interval=1, save_interval=None)
    assert [state.step for state in diary.saved] == [1, 3, 4]


def test_ends_early_where_validations_get_no_better(capsys: pytest.CaptureFixture[str]) -> None:
    diary, patience = Diary(), Patience("validation/accuracy", allowed=2)
    assert fit(diary, 9, patience=patience, val_check_interval=1, save_interval=None) is None
    assert diary.events[-4:] == ["train 2", "validate 3", "save 3", "publish 3"]
    told = "training ends at step 3: 2 validations in a row without a better validation/accuracy"
    assert told in capsys.readouterr().out
    assert (diary.saved[-1].best_value, diary.saved[-1].validations_since_best) == (0.5, 2)
    again = Diary()
    patience = Patience("validation/accuracy", allowed=2)
    patience.go_on_from(diary.saved[-1])
    assert fit(again, 9, diary.saved[-1], patience, val_check_interval=1) is None
    assert again.events == []


def test_goes_on_from_a_step() -> None:
    diary = Diary()
    fit(diary, 4, start=3, val_check_interval=None, save_interval=None, val_before_training=True)
    assert diary.events == ["train 3", "validate 4", "save 4", "publish 4"]


def test_stops_saves_and_says_why() -> None:
    diary = Diary(stop_at=2)
    reason = fit(diary, 5, val_check_interval=2, save_interval=None)
    assert reason == "the time limit (trainer.max_time=00:00:00:01)"
    assert diary.events == ["train 0", "train 1", "save 2", "publish 2"]
    assert diary.saved[0].metrics == {}
    # What was due when it stopped is made up before anything else, and once.
    again = Diary()
    again.saved = diary.saved
    assert fit(again, 3, diary.saved[0], val_check_interval=2, save_interval=None) is None
    assert again.events[:3] == ["validate 2", "amend 2", "train 2"]
    assert again.saved[0].metrics == {"validation/accuracy": 0.5}
    once_more = Diary()
    assert fit(once_more, 3, again.saved[0], val_check_interval=2, save_interval=None) is None
    assert once_more.events[0] == "train 2"


class Lengthy(Diary):
    """Is asked to stop in the middle of a validation."""

    def validate(self, watch: Watch) -> dict[str, float]:
        watch(0, 2)
        self.now = 1.0
        return super().validate(watch)


def test_a_validation_is_left_and_what_was_trained_is_saved(
    capsys: pytest.CaptureFixture[str],
) -> None:
    diary = Lengthy()
    assert fit(diary, 5, val_check_interval=2, save_interval=None) is not None
    assert diary.events == ["train 0", "train 1", "validate 2", "save 2", "publish 2"]
    assert diary.saved[0].metrics == {}
    assert "timing/validation/total_validation_time" not in diary.logged[2]
    assert "step 2: the validation was left" in capsys.readouterr().out


def test_nothing_is_saved_of_a_run_that_is_stopped_before_its_first_step() -> None:
    diary = Lengthy()
    assert fit(diary, 5, val_before_training=True) is not None
    assert diary.events == ["validate 0"]


def test_stop_at_the_last_step_leaves_its_validation_to_the_run_that_goes_on() -> None:
    diary = Diary(stop_at=2)
    assert fit(diary, 2) is not None
    assert diary.events == ["train 0", "train 1", "save 2", "publish 2"]
    for last in (2, 1):  # also of a run that is to be shorter now
        again = Diary()
        again.saved = list(diary.saved)
        assert fit(again, last, diary.saved[0]) is None
        assert again.events == ["validate 2", "amend 2"]
    # Stopped after its last validation it is at its end.
    assert fit(Tired(stop_at=2), 2) is None
    # And as often as the made up one is left, it is still due.
    assert fit(Lengthy(), 2, diary.saved[0]) is not None


class Tired(Diary):
    """Is asked to stop as the validation of a step ends."""

    def train_step(self, step: int) -> dict[str, float]:
        trained = super().train_step(step)
        self.now = 0.0
        return trained

    def validate(self, watch: Watch) -> dict[str, float]:
        metrics = super().validate(watch)
        self.now = float(self.step == self.stop_at)
        return metrics


def test_a_broken_step_is_not_saved() -> None:
    class Broken(Diary):
        def train_step(self, step: int) -> dict[str, float]:
            if step == 2:
                raise TrainingError("step 3: not finite")
            return super().train_step(step)

    diary = Broken()
    with pytest.raises(TrainingError, match="step 3"):
        fit(diary, 5, val_check_interval=1, save_interval=1)
    assert [state.step for state in diary.saved] == [1, 2]
    assert diary.events[-1] == "publish 2"


def test_trains_on_while_a_save_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    diary = Diary(write_for=2)
    fit(diary, 8, val_check_interval=None, save_interval=3)
    assert diary.events[2:] == [
        *("train 2", "save 3", "train 3", "train 4", "publish 3"),
        *("train 5", "save 6", "train 6", "train 7", "publish 6"),
        *("validate 8", "save 8", "publish 8"),
    ]
    assert "timing/save" in diary.logged[3]
    assert {"timing/publish", "timing/save_in_background"} <= set(diary.logged[5])
    assert [line for line in capsys.readouterr().out.splitlines() if "saved" in line] == [
        f"step {step}: saved somewhere" for step in (3, 6, 8)
    ]


def test_a_save_waits_for_the_one_before() -> None:
    diary = Diary(write_for=5)
    fit(diary, 4, val_check_interval=None, save_interval=2)
    assert diary.events[-4:] == ["validate 4", "publish 2", "save 4", "publish 4"]


def test_a_skipped_step_is_told_and_the_run_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    class Skipping(Diary):
        def train_step(self, step: int) -> dict[str, float]:
            scale = {"loss_scale": 65536.0, "skipped": float(step == 1), "skipped_steps": 1.0}
            return {**super().train_step(step), **scale}

    diary = Skipping()
    assert fit(diary, 3) is None
    shown = capsys.readouterr().out
    assert shown.count("skipped, ") == 1
    assert "step 2: skipped, fp16 overflowed at loss scale 65536" in shown
    assert "loss_scale 65536  skipped_steps 1" in shown
    assert diary.logged[2]["train/skipped"] == 1.0


def test_what_gaps_take_is_looked_at_after_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    diary = Diary()
    monkeypatch.setattr(FreedMemory, "end_step", lambda self: diary.events.append("look"))
    fit(diary, 2, save_interval=None, val_check_interval=None)
    assert diary.events[:4] == ["train 0", "look", "train 1", "look"]


class Judged(Diary):
    """Validations by step, checkpoints on the disk; it is asked to stop where ``when`` says."""

    def __init__(self, when: tuple[str, int] | None = None) -> None:
        super().__init__()
        self.when = when

    def train_step(self, step: int) -> dict[str, float]:
        trained = super().train_step(step)
        self.now = float(self.when == ("step", self.step))
        return trained

    def validate(self, watch: Watch) -> dict[str, float]:
        self.now = float(self.when == ("validation", self.step))
        super().validate(watch)
        self.now = float(self.when == ("end of validation", self.step))
        values = {2: 0.5, 4: 0.7, 6: 0.6, 8: 0.7, 10: 0.9}
        return {"validation/accuracy": values[self.step]}

    def sharded_state_dict(self, *unused: Any, **options: Any) -> dict[str, Any]:
        return {}

    def finish_update(self) -> None:
        pass


class Saving:
    """A save of a model that has no tensors."""

    is_written = True

    def __init__(self, state: dict[str, Any], folder: Path, arrived: Any) -> None:
        self.folder = folder

    def finish(self) -> None:
        self.folder.mkdir()


def judge(folder: Path, when: tuple[str, int] | None) -> tuple[bool, int, RunState | None]:
    """Run, or go on: whether it came to its end, at which step, and the best checkpoint."""
    diary = Judged(when)
    diary.model = diary.optimizer = diary  # type: ignore[assignment]
    checkpoints = RunCheckpoints(folder, "validation/accuracy")
    config = TrainConfig()
    config.trainer.rm = RmLoopConfig(val_check_interval=2, save_interval=3)
    latest = checkpoints.latest()
    fresh = RunState(0, 0)
    start = fresh if latest is None else go_on(fresh, latest.state)
    diary.step = start.step
    patience = Patience("validation/accuracy", allowed=2)
    patience.go_on_from(start)
    stop = StopRequest("00:00:00:01", now=lambda: diary.now)
    trainer = SupervisedTrainer(diary, config, 11, start, checkpoints, diary, stop, "cpu", patience)
    outcome = trainer.fit()
    best = checkpoints.best()
    return outcome.stopped_by is None, outcome.step, best and best.state


def test_resumed_run_has_the_best_checkpoint_and_the_end_of_one_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "start_saving", Saving)
    alone = judge(tmp_path / "alone", None)
    assert (alone[:2], alone[2] and alone[2].step) == ((True, 8), 4)
    moments = [("step", step) for step in range(1, 9)]
    moments += [
        (what, step) for what in ("validation", "end of validation") for step in (2, 4, 6, 8)
    ]
    wrong = {}
    for number, when in enumerate(moments):
        folder = tmp_path / str(number)
        assert judge(folder, when)[0] == (when == ("end of validation", 8))
        if when[0] == "validation":
            assert not judge(folder, when)[0]  # what is made up is left, too
        found = judge(folder, None)
        if found != alone:
            wrong[when] = found
    assert not wrong, wrong
