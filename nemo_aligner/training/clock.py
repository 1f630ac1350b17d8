"""The run's wall clock: a time limit, and how long each part of a step takes."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

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
