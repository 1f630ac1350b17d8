"""The pace of the model: how many tokens it computes in the longest call that is allowed."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from itertools import accumulate

# Calls that the estimate is made of: enough that one hiccup of the machine does not show.
_CALLS = 16
# Below this share of the longest call nothing is noted: such a model needs no limit.
_SHORT = 1 / 16
# So many tokens a call may always have: in smaller ones the model's fixed costs would weigh.
_LEAST_TOKENS = 512


class ModelPace:
    """Limits calls to the tokens that are expected to be computed in ``max_secs``.

    The estimate is the median of the last calls' tokens per second, each weighted by its tokens: a
    call of few tokens says little about one of many.
    """

    def __init__(self, max_secs: float) -> None:
        """``max_secs`` 0: no limit."""
        self._max_secs = max_secs
        self._calls: deque[tuple[float, int]] = deque(maxlen=_CALLS)  # tokens/s, tokens
        self._limit: int | None = None

    def limit(self, most_tokens: int) -> int:
        """Tokens of the next call, at most ``most_tokens``."""
        return most_tokens if self._limit is None else min(most_tokens, self._limit)

    def notes(self, seconds: float) -> bool:
        """Tell whether ``note`` has to be called for a call that took ``seconds``."""
        if not self._max_secs:
            return False
        # Where a limit was found, fast calls are what lifts it.
        return bool(self._calls) or seconds >= _SHORT * self._max_secs

    def note(self, tokens: int, seconds: float) -> None:
        """Take account of a call that has ended."""
        self._calls.append((tokens / max(seconds, 1e-6), tokens))
        if all(tokens < _SHORT * self._max_secs * rate for rate, tokens in self._calls):
            self._calls.clear()
            self._limit = None
            return
        self._limit = max(_LEAST_TOKENS, int(self._median_rate() * self._max_secs))

    def _median_rate(self) -> float:
        calls = sorted(self._calls)
        totals = [*accumulate(tokens for _, tokens in calls)]
        return calls[bisect_left(totals, totals[-1] / 2)][0]
