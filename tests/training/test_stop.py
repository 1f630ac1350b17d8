"""Signals and the time limit; whole runs are stopped in test_interruptions.py."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from nemo_aligner.training import stop as stop_module
from nemo_aligner.training.stop import StopReason, StopRequest

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(StopRequest, "_tell", lambda self, text: lines.append(text))
    return lines


def test_time_limit_stops_a_run() -> None:
    now = 5.0
    stop = StopRequest("00:00:01:00", now=lambda: now)
    now = 64.9
    assert stop.reason is None
    now = 65.0
    assert stop.reason == StopReason("the time limit (trainer.max_time=00:00:01:00)", exit_code=0)
    assert StopRequest(None).reason is None


@pytest.mark.parametrize(
    ("number", "name", "code"),
    [
        (signal.SIGINT, "Ctrl-C", 0),
        (signal.SIGTERM, "SIGTERM", 0),
        (signal.SIGUSR1, "SIGUSR1", 138),
    ],
)
def test_signal_stops_a_run_that_trains(
    said: list[str], number: signal.Signals, name: str, code: int
) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    with StopRequest() as stop, stop.while_training():
        assert stop.reason is None
        os.kill(os.getpid(), number)
        assert stop.reason == StopReason(name, code)
        wait_for(lambda: said)
    assert [signal.getsignal(each) for each in SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert said == [
        f"{name}: stopping; the step under way is finished and saved first "
        "(Ctrl-C again leaves at once)"
    ]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138)]
)
def test_signal_before_the_first_step_ends_a_run_at_once(
    said: list[str], number: signal.Signals, code: int
) -> None:
    cleaned = []

    def load() -> None:
        try:
            os.kill(os.getpid(), number)
        finally:
            # The same Ctrl-C, passed on by a launcher, does not disturb the clearing up.
            os.kill(os.getpid(), number)
            cleaned.append("the folder")

    with pytest.raises(SystemExit) as caught, StopRequest():
        load()
    assert caught.value.code == code
    assert cleaned == ["the folder"]
    assert [line.partition(": ")[2] for line in said] == [
        "stopped before the first step; there is nothing to save"
    ]


def test_signal_is_told_and_not_what_other_ranks_say_of_it(said: list[str]) -> None:
    def load() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except SystemExit:
            raise RuntimeError("connection closed by peer") from None

    with pytest.raises(SystemExit) as caught, StopRequest():
        load()
    assert caught.value.code == 130


def test_signal_after_the_last_step_leaves_the_model_to_be_written(said: list[str]) -> None:
    with StopRequest() as stop:
        with stop.while_training():
            pass
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(lambda: said)
    assert said == [
        "Ctrl-C: training is over, and its model is still written (Ctrl-C again leaves at once)"
    ]


@pytest.mark.parametrize(
    ("first", "second", "after", "leaves"),
    [
        (signal.SIGINT, signal.SIGINT, 1.5, True),
        (signal.SIGINT, signal.SIGINT, 0.3, False),
        (signal.SIGINT, signal.SIGTERM, 1.5, True),
        (signal.SIGTERM, signal.SIGINT, 1.5, True),
        (signal.SIGTERM, signal.SIGTERM, 1.5, False),
    ],
)
def test_signal_a_second_later_again_leaves_at_once(
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    first: signal.Signals,
    second: signal.Signals,
    after: float,
    leaves: bool,
) -> None:
    now, codes = 5.0, []
    monkeypatch.setattr(stop_module.os, "_exit", codes.append)
    with StopRequest(now=lambda: now) as stop, stop.while_training():
        os.kill(os.getpid(), first)
        wait_for(lambda: said)
        now += after
        os.kill(os.getpid(), second)
    # The thread has read all signals when the block is left.
    assert codes == [130] * leaves
    assert len(said) == 1 + leaves
