"""The calls that run on the ranks now, and for how long, because a call may hang forever.

A rank that waits in a kernel or collective that never ends still sends heartbeats, which come from
another thread. So only the duration of its call shows that it hangs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock
from typing import Any

# Fraction of the limit after which a running call makes the server unready.
_UNREADY_PART = 1 / 5
# Interval between two checks of the running call: this fraction of the limit, up to a maximum in
# seconds.
_LOOK_PART, _MAX_LOOK_SECS = 1 / 20, 5.0


@dataclass(frozen=True)
class LongOperation:
    """An operation whose calls may take any amount of time, e.g. training: none counts as hung.

    ``run`` is collective: each rank calls it with the same arguments.
    """

    run: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        return self.run(*arguments)


@dataclass(frozen=True)
class RunningCall:
    """A call that the ranks compute.

    Attributes:
        operation: name of its operation.
        begun: when its computation began, in seconds of ``time.monotonic``.
        is_long: whether it may take any amount of time.
    """

    operation: str
    begun: float
    is_long: bool

    @property
    def seconds(self) -> float:
        """Seconds since its computation began."""
        return time.monotonic() - self.begun

    def describe(self) -> str:
        """Return its operation and its duration, for messages."""
        return f"{self.operation}, for {self.seconds:.0f} s"


class RunningCalls:
    """The calls that have begun on the ranks and not ended; any thread may call the methods.

    The ranks compute one call at a time, in the order in which they begin. If a call begins while
    another one is computed, its computation starts when that one ends.

    Attributes:
        look_secs: seconds between two calls of ``find_hung``.
    """

    def __init__(self, max_secs: float) -> None:
        """Set the limit: a call that takes longer than ``max_secs`` hangs; 0 means no limit."""
        self._max_secs = max_secs
        self.look_secs = min(_MAX_LOOK_SECS, _LOOK_PART * max_secs)
        self._lock = Lock()
        self._calls: dict[Future[Any], RunningCall] = {}
        self._last_end = 0.0
        self._suspect: RunningCall | None = None

    def begin(self, answer: Future[Any], operation: str, *, is_long: bool) -> None:
        """Note that the call with the future ``answer`` begins."""
        with self._lock:
            self._calls[answer] = RunningCall(operation, time.monotonic(), is_long)

    def end(self, answer: Future[Any]) -> None:
        """Note that the call with the future ``answer`` has ended."""
        with self._lock:
            self._calls.pop(answer, None)
            self._last_end = time.monotonic()

    @property
    def first(self) -> RunningCall | None:
        """The call that is computed now; None between calls."""
        with self._lock:
            call = next(iter(self._calls.values()), None)
            if call is None:
                return None
            return RunningCall(call.operation, max(call.begun, self._last_end), call.is_long)

    def find_hung(self) -> str | None:
        """Return the reason if the running call hangs; call this every ``look_secs``.

        A call hangs if two successive checks find it beyond the limit. So after the process was
        suspended for long, e.g. by Slurm, its call has the time between two checks to end.
        """
        suspect, self._suspect = self._suspect, self._find_longer_than(self._max_secs)
        if suspect is None or suspect != self._suspect:
            return None
        return (
            f"the model hangs: a call has not ended ({suspect.describe()}), and "
            f"server.max_stuck_secs allows {self._max_secs:g} s. If a call may take that long on "
            "this machine, raise it"
        )

    def find_delay(self) -> str | None:
        """Return the reason if the running call takes so long that it may hang; else None."""
        call = self._find_longer_than(_UNREADY_PART * self._max_secs)
        if call is None:
            return None
        return (
            f"the model may hang: a call has not ended ({call.describe()}); the server ends after "
            f"{self._max_secs:g} s (server.max_stuck_secs)"
        )

    def _find_longer_than(self, seconds: float) -> RunningCall | None:
        call = self.first
        if not self._max_secs or call is None or call.is_long:
            return None
        return call if call.seconds >= seconds else None
