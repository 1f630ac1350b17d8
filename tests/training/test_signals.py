"""Signals, the time limit and clocks; whole runs are stopped in test_interruptions.py."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from nemo_aligner.config.training import TrainerConfig, parse_max_time
from nemo_aligner.training import signals as stop_module
from nemo_aligner.training.gauges import Timers
from nemo_aligner.training.signals import Phase, SignalHandler, StopReason
from nemo_aligner.utils.errors import ConfigError


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(SignalHandler, "_announce", lambda self, text: lines.append(text))
    return lines


def test_time_limit_stops_a_run() -> None:
    now = 5.0
    stop = SignalHandler("00:00:01:00", clock=lambda: now)
    now = 64.9
    assert stop.reason is None
    now = 65.0
    assert stop.reason == StopReason("the time limit (trainer.max_time=00:00:01:00)", exit_code=0)
    assert SignalHandler(None).reason is None


CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129, signal.SIGUSR1: 138}


@pytest.fixture(autouse=True)
def not_under_nohup() -> Iterator[None]:
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, previous)


def test_signal_stops_a_run_that_trains(announced: list[str]) -> None:
    for number, code in CODES.items():
        announced.clear()
        name = "Ctrl-C" if number == signal.SIGINT else number.name
        previous = [signal.getsignal(signum) for signum in CODES]
        with SignalHandler() as stop, stop.while_training():
            assert stop.reason is None
            os.kill(os.getpid(), number)
            assert stop.reason == StopReason(name, code if number == signal.SIGUSR1 else 0)
            wait_for(lambda: announced)
        assert [signal.getsignal(signum) for signum in CODES] == previous
        assert signal.set_wakeup_fd(-1) == -1
        assert announced == [f"{name}: {Phase.training.value}"]


def test_signal_before_the_first_step_ends_a_run_at_once(announced: list[str]) -> None:
    for number, code in CODES.items():
        announced.clear()
        cleaned = []

        def load(number: int = number, cleaned: list[str] = cleaned) -> None:
            try:
                os.kill(os.getpid(), number)
            finally:
                # The same Ctrl-C, passed on by a launcher, does not disturb the clearing up.
                os.kill(os.getpid(), number)
                cleaned.append("the folder")

        with pytest.raises(SystemExit) as caught, SignalHandler():
            load()
        assert caught.value.code == code
        assert cleaned == ["the folder"]
        assert [line.partition(": ")[2] for line in announced] == [Phase.starting.value]


def test_run_under_nohup_ignores_that_its_terminal_is_closed() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with SignalHandler() as stop, stop.while_training():
        os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert stop.reason is None


@pytest.mark.parametrize("connect", [os.openpty, os.pipe])
def test_run_whose_terminal_is_closed_may_still_print(
    announced: list[str], connect: Callable[[], tuple[int, int]]
) -> None:
    """So may one whose output goes through a pipe to tee, which has got the signal, too."""
    terminal, output = connect()
    previous = os.dup(1)
    os.dup2(output, 1)
    try:
        with SignalHandler() as stop, stop.while_training():
            os.close(terminal)
            with pytest.raises(OSError, match=r"Input/output error|Broken pipe"):
                os.write(1, b"step 1")
            os.kill(os.getpid(), signal.SIGHUP)
            wait_for(lambda: announced)
            assert os.write(1, b"saved") == len(b"saved")
    finally:
        os.dup2(previous, 1)
        os.close(previous)
        os.close(output)


def test_signal_is_told_and_not_what_other_ranks_say_of_it(announced: list[str]) -> None:
    def load() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except SystemExit:
            raise RuntimeError("connection closed by peer") from None

    with pytest.raises(SystemExit) as caught, SignalHandler():
        load()
    assert caught.value.code == 130


def test_signal_after_the_last_step_leaves_the_model_to_be_written(announced: list[str]) -> None:
    with SignalHandler() as stop:
        with stop.while_training():
            pass
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(lambda: announced)
    assert announced == [f"Ctrl-C: {Phase.finishing.value}"]


def test_signal_a_second_later_again_leaves_at_once(
    announced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for first, second, after, leaves in (
        (signal.SIGINT, signal.SIGINT, 1.5, True),
        (signal.SIGINT, signal.SIGINT, 0.3, False),
        (signal.SIGINT, signal.SIGTERM, 1.5, True),
        (signal.SIGTERM, signal.SIGINT, 1.5, True),
        (signal.SIGTERM, signal.SIGTERM, 1.5, False),
        (signal.SIGINT, signal.SIGHUP, 1.5, False),
    ):
        now, codes = [5.0], []
        announced.clear()
        monkeypatch.setattr(stop_module.os, "_exit", codes.append)
        with SignalHandler(clock=lambda now=now: now[0]) as stop, stop.while_training():
            os.kill(os.getpid(), first)
            wait_for(lambda: announced)
            now[0] += after
            os.kill(os.getpid(), second)
        # The thread has read all signals when the block is left.
        assert (codes, len(announced)) == ([130] * leaves, 1 + leaves), (first, second, after)


def test_max_time_is_days_hours_minutes_and_seconds() -> None:
    expected = {"00:00:00:01": 1, "00:03:45:00": 13500, "1:2:3:4": 93784, "10:23:59:59": 950399}
    assert {text: parse_max_time(text) for text in expected} == expected
    for text in ("", "03:45:00", "00:24:00:00", "00:00:60:00", "4h", "-1:0:0:0"):
        with pytest.raises(ConfigError, match=r"trainer\.max_time: got .* wanted DD:HH:MM:SS"):
            TrainerConfig(max_time=text)


def test_timers_add_up_and_start_anew() -> None:
    timers = Timers()
    for _ in range(2):
        with timers.measure("step"):
            pass
    taken = timers.take()
    assert list(taken) == ["timing/step"]
    assert 0 <= taken["timing/step"] < 1
    assert timers.take() == {}


def test_ctrl_c_in_a_program_raises_and_leaves_the_process(
    announced: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now, codes = 5.0, []
    monkeypatch.setattr(stop_module.os, "_exit", codes.append)
    with (
        pytest.raises(KeyboardInterrupt, match="before the first step"),
        SignalHandler(in_program=True),
    ):
        os.kill(os.getpid(), signal.SIGINT)
    with SignalHandler(clock=lambda: now, in_program=True) as stop, stop.while_training():
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(lambda: stop.reason)
        now += 1.5
        with pytest.raises(KeyboardInterrupt, match="unsaved work is lost"):
            os.kill(os.getpid(), signal.SIGINT)
    assert codes == []


def test_run_in_another_thread_leaves_signals_to_the_program() -> None:
    previous, seen = signal.getsignal(signal.SIGINT), []

    def run() -> None:
        with SignalHandler(in_program=True) as stop, stop.while_training():
            seen.append((signal.getsignal(signal.SIGINT), stop.reason))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [(previous, None)]
