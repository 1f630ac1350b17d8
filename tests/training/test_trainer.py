"""The loop, with a learner and checkpoints that only write down what is asked of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from nemo_aligner.checkpoint.run_state import RunState
from nemo_aligner.config.schema import RmLoopConfig, TrainConfig
from nemo_aligner.errors import TrainingError
from nemo_aligner.parallel.launch import launch
from nemo_aligner.training.clock import StopRequest
from nemo_aligner.training.trainer import SupervisedTrainer


class Diary:
    """Learner, checkpoints and logger in one."""

    model = optimizer = None

    def __init__(self, best: tuple[int, ...] = (), stop_at: int | None = None) -> None:
        self.events: list[str] = []
        self.logged: dict[int, dict[str, float]] = {}
        self.saved: list[RunState] = []
        self.best, self.stop_at, self.step = best, stop_at, 0
        self.now = 0.0

    def train_step(self, step: int) -> dict[str, float]:
        self.step = step + 1
        self.now = float(self.step == self.stop_at)
        self.events.append(f"train {step}")
        return {"loss": 0.5, "tokens": 100.0}

    def validate(self) -> dict[str, float]:
        self.events.append(f"validate {self.step}")
        return {"validation/accuracy": 0.5}

    def is_among_best(self, metrics: Mapping[str, float]) -> bool:
        return bool(metrics) and self.step in self.best

    def save(self, state: RunState, model: Any, optimizer: Any) -> str:
        self.events.append(f"save {state.step}")
        self.saved.append(state)
        return "somewhere"

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.logged.setdefault(step, {}).update(metrics)


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with launch():
        yield


def fit(diary: Diary, total: int, start: int = 0, **loop: Any) -> str | None:
    config = TrainConfig()
    config.trainer.rm = RmLoopConfig(**loop)
    config.model.global_batch_size = 8
    stop = StopRequest("00:00:00:01", now=lambda: diary.now)
    state = RunState(start, start * 8, fingerprint={"model.seed": 1})
    trainer = SupervisedTrainer(
        diary,
        config,
        total,
        state,
        diary,  # type: ignore[arg-type]
        diary,
        stop,
        "cpu",
    )
    outcome = trainer.fit()
    assert outcome.step == diary.step
    return outcome.stopped_by


def test_validates_and_saves_at_intervals_and_at_the_end() -> None:
    diary = Diary()
    assert fit(diary, 5, val_check_interval=2, save_interval=4, val_before_training=True) is None
    assert diary.events == [
        "validate 0",
        *("train 0", "train 1", "validate 2"),
        *("train 2", "train 3", "validate 4", "save 4"),
        *("train 4", "validate 5", "save 5"),
    ]
    assert diary.saved[-1].consumed_samples == 40
    assert diary.saved[-1].metrics == {"validation/accuracy": 0.5}
    assert diary.saved[-1].fingerprint == {"model.seed": 1}
    assert diary.logged[5]["train/consumed_samples"] == 40
    assert diary.logged[5]["train/tokens_per_second"] > 0
    assert {"timing/train_step", "timing/validation/total_validation_time", "timing/save"} <= set(
        diary.logged[5]
    )


def test_without_intervals_only_at_the_end() -> None:
    diary = Diary()
    fit(diary, 3, val_check_interval=None, save_interval=None)
    assert diary.events[-3:] == ["train 2", "validate 3", "save 3"]
    assert len(diary.events) == 5


def test_saves_a_best_one_between_the_intervals() -> None:
    diary = Diary(best=(1, 3))
    fit(diary, 4, val_check_interval=1, save_interval=None)
    assert [state.step for state in diary.saved] == [1, 3, 4]


def test_goes_on_from_a_step() -> None:
    diary = Diary()
    fit(diary, 4, start=3, val_check_interval=None, save_interval=None, val_before_training=True)
    assert diary.events == ["train 3", "validate 4", "save 4"]


def test_stops_saves_and_says_why() -> None:
    diary = Diary(stop_at=2)
    reason = fit(diary, 5, val_check_interval=2, save_interval=None)
    assert reason == "the time limit (trainer.max_time=00:00:00:01)"
    assert diary.events == ["train 0", "train 1", "save 2"]
    assert diary.saved[0].metrics == {}


def test_a_stop_at_the_last_step_is_the_end() -> None:
    assert fit(Diary(stop_at=2), 2) is None


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
    assert "loss_scale 6.554e+04  skipped_steps 1" in shown
    assert diary.logged[2]["train/skipped"] == 1.0
