"""Estimate from the model's pace how many tokens a call may have to end within the time limit."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from itertools import accumulate

# Number of latest calls in the estimate: enough that one hiccup of the machine does not show.
_CALLS = 16
# Most tokens of a call before a first call was measured.
_FIRST_TOKENS = 1024
# A call may always have this many tokens: in smaller ones the fixed costs of a call dominate.
_LEAST_TOKENS = 512
# While the estimate does not limit calls, only calls that take at least this fraction of the time
# limit are measured.
_LONG = 1 / 16


class ModelPace:
    """Limits calls to the tokens that are expected to be computed within ``max_secs``.

    The estimate is the median of the latest calls' tokens per second, weighted by their tokens,
    because a small call tells little about a large one.

    Attributes:
        limit: most tokens of the next call.
    """

    def __init__(self, max_secs: float, most_tokens: int) -> None:
        """Set the limits; with ``max_secs`` 0, ``most_tokens`` is the only limit."""
        self._max_secs, self._most_tokens = max_secs, most_tokens
        # The latest calls, each as (tokens per second, tokens).
        self._calls: deque[tuple[float, int]] = deque(maxlen=_CALLS)
        self.limit = min(most_tokens, _FIRST_TOKENS) if max_secs else most_tokens

    def needs(self, seconds: float) -> bool:
        """Tell whether the estimate needs a call that took ``seconds``; if so, call ``add``."""
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
