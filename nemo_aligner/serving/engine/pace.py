"""Estimate how fast the model computes, to limit a call's tokens so that it ends in time."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from itertools import accumulate

# The estimate uses this many of the latest calls: enough that a single slow call hardly counts.
_CALLS = 16
# Maximum number of tokens of a call until the first call has been measured.
_FIRST_TOKENS = 1024
# The limit of a call is never below this many tokens: smaller calls take about as long, because of
# their fixed costs.
_LEAST_TOKENS = 512
# While the estimate does not limit the tokens of a call, calls shorter than this fraction of the
# time limit are not added to it, because they are far from too slow.
_LONG = 1 / 16


@dataclass
class CallClock:
    """The end of the latest operation on the ranks: a batcher's call, or e.g. a training.

    The operations take turns. With the clock, a batcher's call that waited for another operation
    does not count the wait as its duration.

    Attributes:
        last_end: end of the latest operation, in seconds of ``time.monotonic``.
    """

    last_end: float = 0.0


class ModelPace:
    """Limits the tokens of a call, so that the model probably computes it within ``max_secs``.

    The estimate is the median of the latest calls' tokens per second, weighted by their tokens,
    because a small call tells little about a large one.

    Attributes:
        limit: maximum number of tokens of the next call.
    """

    def __init__(self, max_secs: float, most_tokens: int) -> None:
        """Set the limits; with ``max_secs`` 0, ``most_tokens`` is the only limit."""
        self._max_secs, self._most_tokens = max_secs, most_tokens
        # The latest calls, each as (tokens per second, tokens).
        self._calls: deque[tuple[float, int]] = deque(maxlen=_CALLS)
        self.limit = min(most_tokens, _FIRST_TOKENS) if max_secs else most_tokens

    def needs(self, seconds: float) -> bool:
        """Return whether to add a call of ``seconds`` to the estimate.

        While the limit is ``most_tokens``, calls shorter than ``_LONG * max_secs`` are not added.
        """
        is_limited = self.limit < self._most_tokens
        return self._max_secs > 0 and (is_limited or seconds >= _LONG * self._max_secs)

    def add(self, tokens: int, seconds: float) -> None:
        """Update ``limit`` with a call of ``tokens`` tokens that took ``seconds``."""
        self._calls.append((tokens / max(seconds, 1e-6), tokens))
        limit = max(_LEAST_TOKENS, int(self._median_rate() * self._max_secs))
        self.limit = min(self._most_tokens, limit)

    def _median_rate(self) -> float:
        calls = sorted(self._calls)
        totals = [*accumulate(tokens for _, tokens in calls)]
        return calls[bisect_left(totals, totals[-1] / 2)][0]
