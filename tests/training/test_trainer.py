"""The loop, with a learner and checkpoints that only write down what is asked of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from nemo_aligner.checkpoint import run
from nemo_aligner.checkpoint.run import RunCheckpoints, RunState, Saved
from nemo_aligner.config.common import Precision, RecordKind
from nemo_aligner.config.training import RmLoopConfig, TrainConfig, TrainerConfig
from nemo_aligner.cpu.matmuls import FreedMemory
from nemo_aligner.distributed.launch import launch
from nemo_aligner.training.early_stopping import DivergenceWatch, EarlyStopping
from nemo_aligner.training.resume import resumed_state
from nemo_aligner.training.signals import SignalHandler
from nemo_aligner.training.trainer import SupervisedTrainer
from nemo_aligner.utils.console import Watch
from nemo_aligner.utils.errors import CheckpointError, ConfigError, TrainingError

Moment = tuple[str, int]  # "step", "validation" or "end of validation", and its step


class Diary:
    """Learner, checkpoints and logger in one; the run is asked to stop at the moment ``when``."""

    model = optimizer = None
    has_lost_lock = False
    monitor = "validation/accuracy"
    data = SimpleNamespace(train=SimpleNamespace(kind=RecordKind.comparison), validation=["a set"])
    values: Mapping[int, float] = {}  # of validations, by step; 0.5 is that of any other

    def __init__(
        self, best: tuple[int, ...] = (), when: Moment | None = None, write_for: int = 0
    ) -> None:
        self.events: list[str] = []
        self.logged: dict[int, dict[str, float]] = {}
        self.saved: list[RunState] = []
        self.best, self.when, self.step = best, when, 0
        self.now = 0.0
        self.pending: Saved | None = None
        self.write_for, self.steps_to_write = write_for, 0

    def reach(self, moment: str) -> None:
        self.now = float(self.when == (moment, self.step))

    def train_step(self, step: int) -> dict[str, float]:
        self.step = step + 1
        self.steps_to_write -= 1
        self.reach("step")
        self.events.append(f"train {step}")
        return {"loss": 0.5, "tokens": 100.0, "flops": 1e9}

    def validate(self, watch: Watch) -> dict[str, float]:
        self.events.append(f"validate {self.step}")
        self.reach("validation")
        for done in range(3):
            watch(done, 2)
        self.reach("end of validation")
        return {self.monitor: self.values.get(self.step, 0.5)}

    def latest(self) -> Saved | None:
        return Saved(Path("somewhere"), self.saved[-1]) if self.saved else None

    def leader(self) -> Saved | None:
        validated = [state for state in self.saved if self.monitor in state.metrics]
        return Saved(Path("somewhere"), validated[0]) if validated else None

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
        self.saved = [state if state.step == old.step else old for old in self.saved]

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


def trainer_of(
    diary: Diary,
    total: int,
    state: RunState,
    checkpoints: Any,
    patience: EarlyStopping | None,
    **loop: Any,
) -> SupervisedTrainer:
    config = TrainConfig(trainer=TrainerConfig(precision=Precision.fp32))
    config.trainer.rm = RmLoopConfig(**loop)
    config.model.global_batch_size = 8
    stop = SignalHandler("00:00:00:01", clock=lambda: diary.now)
    diary.step = state.step
    arguments = (diary, config, total, state, checkpoints, diary, stop, patience)
    return SupervisedTrainer(*arguments)


def fit(
    diary: Diary,
    total: int,
    start: int | RunState = 0,
    patience: EarlyStopping | None = None,
    **loop: Any,
) -> str | None:
    """Run, or go on; what has stopped it."""
    if not isinstance(start, RunState):
        start = RunState(start, start * 8, fingerprint={"model.seed": 1})
    outcome = trainer_of(diary, total, start, diary, patience, **loop).fit()
    assert outcome.step == diary.step
    return outcome.stopped_by and str(outcome.stopped_by)


# Of a run without intervals.
NEVER = {"val_check_interval": None, "save_interval": None}


def test_trainer_validates_and_saves_at_intervals_at_the_best_and_at_the_end() -> None:
    """It trains on while a save is written, and waits for it before the next."""
    cases: dict[str, tuple[Diary, int, dict[str, Any], str]] = {
        "intervals": (
            Diary(),
            5,
            {"val_check_interval": 2, "save_interval": 4, "val_before_training": True},
            "validate 0, train 0, train 1, validate 2, train 2, train 3, validate 4, save 4, "
            "train 4, publish 4, validate 5, save 5, publish 5",
        ),
        "no intervals": (Diary(), 2, NEVER, "train 0, train 1, validate 2, save 2, publish 2"),
        "from a step": (
            Diary(),
            4,
            {"start": 3, "val_before_training": True, **NEVER},
            "train 3, validate 4, save 4, publish 4",
        ),
        "a best one": (
            Diary(best=(1,)),
            2,
            {"val_check_interval": 1, "save_interval": None},
            "train 0, validate 1, save 1, train 1, publish 1, validate 2, save 2, publish 2",
        ),
        "slow saves": (
            Diary(write_for=2),
            5,
            {"val_check_interval": None, "save_interval": 2},
            "train 0, train 1, save 2, train 2, train 3, publish 2, save 4, train 4, "
            "validate 5, publish 4, save 5, publish 5",
        ),
    }
    wrong = {}
    for name, (diary, total, options, expected) in cases.items():
        stopped_by = fit(diary, total, **options)
        if stopped_by or ", ".join(diary.events) != expected:
            wrong[name] = (stopped_by, diary.events)
    assert not wrong, wrong


def test_trainer_logs_saves_and_says_what_it_did(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    diary = Diary(write_for=2)
    looks: list[int] = []
    monkeypatch.setattr(FreedMemory, "end_step", lambda self: looks.append(diary.step))
    fit(diary, 8, val_check_interval=None, save_interval=3)
    assert looks == list(range(1, 9))  # for memory that lies in gaps, after every step
    last = diary.saved[-1]
    assert (last.consumed_samples, last.fingerprint) == (64, {"model.seed": 1})
    assert last.metrics == {"validation/accuracy": 0.5}
    assert diary.logged[8]["train/consumed_samples"] == 64
    assert diary.logged[8]["train/tokens_per_second"] > 0
    written = {"timing/publish", "timing/save_in_background"}
    validated = {"timing/train_step", "timing/validation/total_validation_time", "timing/save"}
    assert written | validated <= set(diary.logged[8])
    assert "timing/save" in diary.logged[3]
    assert written <= set(diary.logged[5])
    assert [line for line in capsys.readouterr().out.splitlines() if "saved" in line] == [
        f"step {step}: saved somewhere" for step in (3, 6, 8)
    ]


def test_trainer_ends_early_where_validations_get_no_better(
    capsys: pytest.CaptureFixture[str],
) -> None:
    diary, patience = Diary(), EarlyStopping("validation/accuracy", patience=2)
    assert fit(diary, 9, patience=patience, val_check_interval=1, save_interval=None) is None
    assert diary.events[-4:] == ["train 2", "validate 3", "save 3", "publish 3"]
    message = "training ends at step 3: 2 validations in a row without a better validation/accuracy"
    assert message in capsys.readouterr().out
    assert (diary.saved[-1].best_value, diary.saved[-1].validations_since_best) == (0.5, 2)
    # A NaN before training is no reason not to train.
    untrained = Diary()
    untrained.values = {0: math.nan, 1: math.nan}
    patience = EarlyStopping("validation/accuracy", patience=1)
    options = {"val_before_training": True, "val_check_interval": 1}
    assert fit(untrained, 9, patience=patience, **options) is None
    assert untrained.events[:3] == ["validate 0", "train 0", "validate 1"]
    assert untrained.step == 1
    again = Diary()
    patience = EarlyStopping("validation/accuracy", patience=2)
    patience.restore(diary.saved[-1])
    assert fit(again, 9, diary.saved[-1], patience, val_check_interval=1) is None
    assert again.events == []


def test_trainer_that_is_stopped_saves_says_why_and_makes_up_what_was_due_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """At every other moment: test_resumed_run_has_the_best_checkpoint_... below."""
    diary = Diary(when=("step", 2))
    reason = fit(diary, 5, val_check_interval=2, save_interval=None)
    assert reason == "the time limit (trainer.max_time=00:00:00:01)"
    assert diary.events == ["train 0", "train 1", "save 2", "publish 2"]
    assert diary.saved[0].metrics == {}
    assert fit(Diary(when=("step", 2)), 2) is not None  # its last step, not yet validated
    plain = Diary(when=("step", 2))  # also its last step, but there is nothing to validate on
    plain.data = SimpleNamespace(validation=[])
    assert fit(plain, 2) is None
    assert plain.events == ["train 0", "train 1", "save 2", "publish 2"]
    for total in (3, 2, 1):  # also of a run that is to be shorter now
        again = Diary()
        again.saved = list(diary.saved)
        assert fit(again, total, diary.saved[0], val_check_interval=2, save_interval=None) is None
        assert again.events[:3] == ["validate 2", "amend 2", "train 2"][: max(2, total)]
        assert again.saved[0].metrics == {"validation/accuracy": 0.5}
    left = Diary(when=("validation", 2))
    assert fit(left, 5, val_check_interval=2, save_interval=None) is not None
    assert left.events == ["train 0", "train 1", "validate 2", "save 2", "publish 2"]
    assert left.saved[0].metrics == {}
    assert "timing/validation/total_validation_time" not in left.logged[2]
    assert "step 2: the validation was interrupted" in capsys.readouterr().out
    # Before the first step there is nothing to save.
    left = Diary(when=("validation", 0))
    assert fit(left, 5, val_before_training=True) is not None
    assert left.events == ["validate 0"]


def test_trainer_measures_a_new_set_where_it_resumes_without_counting_again() -> None:
    metrics = {"validation/accuracy": 0.5}
    start = RunState(2, 16, metrics, best_value=0.7, validations_since_best=1)
    for sets, events in (
        (["validation", "more"], ["validate 2", "amend 2", "train 2"]),
        (["validation"], ["train 2"]),
    ):
        diary, patience = Diary(), EarlyStopping("validation/accuracy", patience=2)
        patience.restore(start)
        state = replace(start, validated_on=dict.fromkeys(sets, "digest"))
        assert fit(diary, 3, state, patience, val_check_interval=2) is None
        assert diary.events[: len(events)] == events


def test_trainer_does_not_save_a_broken_step() -> None:
    class Broken(Diary):
        def train_step(self, step: int) -> dict[str, float]:
            if step == 2:
                raise TrainingError("step 3: not finite")
            return super().train_step(step)

    diary = Broken()
    with pytest.raises(TrainingError, match=r"step 3: not finite; .* checkpoint of step 2"):
        fit(diary, 5, val_check_interval=1, save_interval=1)
    assert [state.step for state in diary.saved] == [1, 2]
    assert diary.events[-1] == "publish 2"
    with pytest.raises(TrainingError, match="step 3: not finite; this run has no checkpoint"):
        fit(Broken(), 5, val_check_interval=5, save_interval=5)


def test_checkpoint_that_is_being_written_outlives_any_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one process; several ranks would have to fail together. An error of that is not raised."""

    class Failing(Diary):
        is_full = False

        def log(self, metrics: Mapping[str, float], step: int) -> None:
            if step == 3:
                raise StopIteration("pruned")

        def publish(self) -> Saved | None:
            if self.is_full and self.step == 3:
                raise CheckpointError("somewhere: not saved: the disk is full")
            return super().publish()

    for is_full, ranks, last in (
        (False, 1, "publish 2"),
        (True, 1, "train 2"),
        (False, 2, "train 2"),
    ):
        monkeypatch.setattr(dist, "get_world_size", lambda ranks=ranks: ranks)
        diary = Failing(write_for=9)
        diary.is_full = is_full
        with pytest.raises(StopIteration, match=r"^pruned$"):
            fit(diary, 5, val_check_interval=None, save_interval=2)
        assert diary.events[-1] == last
        output = capsys.readouterr().out
        assert ("step 2: saved somewhere" in output) == (last == "publish 2")
        assert ("written is lost: somewhere: not saved: the disk is full" in output) == is_full


def test_metric_that_ranks_checkpoints_is_missed_at_the_first_validation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run is saved, so that it may go on by another metric; NaN is only warned of, once."""
    diary = Diary()
    diary.values = {1: math.nan, 2: math.nan}
    fit(diary, 3, val_check_interval=1)
    assert capsys.readouterr().out.count("warning: validation/accuracy, by which checkpoints") == 1

    class Nameless(Diary):
        def validate(self, watch: Watch) -> dict[str, float]:
            return {f"{name}/loss": value for name, value in super().validate(watch).items()}

    diary = Nameless()
    expected = (
        r"monitor: the validation has no metric validation/accuracy, wanted one of "
        r"validation/accuracy/loss; the same command resumes from the checkpoint of step 2"
    )
    with pytest.raises(ConfigError, match=expected):
        fit(diary, 5, val_check_interval=2, save_interval=None)
    assert diary.events[-2:] == ["save 2", "publish 2"]
    diary = Nameless()
    diary.monitor = None  # type: ignore[assignment]
    assert fit(diary, 2, val_check_interval=1) is None


def test_trainer_whose_folder_another_job_has_taken_ends_at_once() -> None:
    class Robbed(Diary):
        @property
        def has_lost_lock(self) -> bool:  # type: ignore[override]
            return self.step == 2

        def check_lock(self) -> None:
            raise CheckpointError("another job has it")

    diary = Robbed()
    with pytest.raises(CheckpointError, match="another job has it"):
        fit(diary, 5, val_check_interval=2, save_interval=2)
    assert diary.events == ["train 0", "train 1"]


def test_trainer_tells_of_a_skipped_step_and_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
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


class Saving:
    """A save of a model that has no tensors."""

    is_written = True

    def __init__(self, state: dict[str, Any], folder: Path, arrived: Any) -> None:
        self.folder = folder

    def finish(self) -> None:
        self.folder.mkdir()


def judge(folder: Path, when: Moment | None) -> tuple[bool, int, RunState | None]:
    """Run, or go on, with checkpoints on the disk.

    Returns whether it came to its end, at which step, and the best checkpoint.
    """
    diary = Diary(when=when)
    diary.values = {2: 0.5, 4: 0.7, 6: 0.6, 8: 0.7, 10: 0.9}
    diary.model = diary.optimizer = SimpleNamespace(  # type: ignore[assignment]
        sharded_state_dict=lambda *unused, **options: {}, finish_update=lambda: None
    )
    checkpoints = RunCheckpoints(folder, diary.monitor)
    latest = checkpoints.latest()
    fresh = RunState(0, 0)
    start = fresh if latest is None else resumed_state(fresh, latest.state, diary.monitor)
    patience = EarlyStopping(diary.monitor, patience=2)
    patience.restore(start)
    intervals = {"val_check_interval": 2, "save_interval": 3}
    outcome = trainer_of(diary, 11, start, checkpoints, patience, **intervals).fit()
    best = checkpoints.best()
    return outcome.stopped_by is None, outcome.step, best and best.state


def test_resumed_run_has_the_best_checkpoint_and_the_end_of_one_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it was stopped, and as often as a validation that is made up is left."""
    monkeypatch.setattr(run, "PendingSave", Saving)
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
        judged = judge(folder, None)
        if judged != alone:
            wrong[when] = judged
    assert not wrong, wrong


def test_trainer_names_the_leak_test_once_and_for_pairs_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for kind, tips in ((RecordKind.comparison, 1), (RecordKind.rating, 0)):
        diary = Diary()
        diary.data = SimpleNamespace(train=SimpleNamespace(kind=kind), validation=["a set"])
        fit(diary, 3, val_check_interval=1)
        assert capsys.readouterr().out.count("swapped=true") == tips, kind


def test_divergence_is_reported_once_and_noise_is_not() -> None:
    def warnings(losses: list[float]) -> list[int]:
        watch = DivergenceWatch()
        return [step for step, loss in enumerate(losses, 1) if watch.add(loss)]

    assert warnings([0.69, *[57.0] * 40]) == [11]
    assert warnings([0.69] * 20 + [3.0] * 20) == [30]
    assert warnings([0.69, 400.0, *[0.3] * 30, 90.0, *[0.2] * 30]) == []
    assert warnings([0.69, *[57.0] * 9]) == []
    assert warnings([0.0, *[0.5] * 40]) == []
