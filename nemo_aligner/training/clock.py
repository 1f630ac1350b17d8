"""The run's wall clock: a time limit, a request to stop, and how long each part of a step takes."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from nemo_aligner.errors import ConfigError

_MAX_TIME = re.compile(r"(\d+):([01]?\d|2[0-3]):([0-5]?\d):([0-5]?\d)")


def parse_max_time(text: str) -> float:
    """Seconds of ``DD:HH:MM:SS``.

    Raises:
        ConfigError: another form.
    """
    match = _MAX_TIME.fullmatch(str(text).strip())
    if match is None:
        raise ConfigError(f"trainer.max_time: got {text!r}, wanted DD:HH:MM:SS, as in 00:03:45:00")
    days, hours, minutes, seconds = (int(part) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60.0 + seconds


class StopRequest:
    """Why this process should stop after its step: the time is up, or SIGTERM came.

    As a context manager it takes SIGTERM over: the signal ends the loop and not the process.
    """

    def __init__(
        self, max_time: str | None = None, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._now = now
        self._deadline = None if max_time is None else now() + parse_max_time(max_time)
        self._max_time = max_time
        self._signalled = False

    @property
    def reason(self) -> str | None:
        """What a person is told; None to go on."""
        if self._signalled:
            return "SIGTERM"
        if self._deadline is not None and self._now() >= self._deadline:
            return f"the time limit (trainer.max_time={self._max_time})"
        return None

    def __enter__(self) -> StopRequest:
        self._previous = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(self, *unused: object) -> None:
        signal.signal(signal.SIGTERM, self._previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True


class Timers:
    """Seconds spent in named parts, since they were last taken."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time of the block to ``name``."""
        start = time.perf_counter()
        yield
        self.add_since(start, name)

    def add_since(self, start: float, name: str) -> None:
        """Add the time since ``start``, of ``time.perf_counter``, to ``name``."""
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """``timing/<name>`` -> seconds, and start anew."""
        taken = {f"timing/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return taken
