"""The pace of the model: how many tokens it computes in the longest call that is allowed."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from itertools import accumulate

# Calls that the estimate is made of: enough that one hiccup of the machine does not show.
_CALLS = 16
# Tokens of a call before any was measured.
_FIRST_TOKENS = 1024
# So many tokens a call may always have: in smaller ones the model's fixed costs would weigh.
_LEAST_TOKENS = 512
# Where calls of all tokens fit, those are measured that take this share of the longest one.
_LONG = 1 / 16


class ModelPace:
    """Limits calls to the tokens that are expected to be computed in ``max_secs``.

    The estimate is the median of the last calls' tokens per second, each weighted by its tokens: a
    call of few tokens says little about one of many.

    Attributes:
        limit: tokens of the next call.
    """

    def __init__(self, max_secs: float, most_tokens: int) -> None:
        """``max_secs`` 0: ``most_tokens`` are the only limit."""
        self._max_secs, self._most_tokens = max_secs, most_tokens
        self._calls: deque[tuple[float, int]] = deque(maxlen=_CALLS)  # tokens/s, tokens
        self.limit = min(most_tokens, _FIRST_TOKENS) if max_secs else most_tokens

    def needs(self, seconds: float) -> bool:
        """Tell whether ``add`` has to be called for a call that took ``seconds``."""
        is_limited = self.limit < self._most_tokens
        return self._max_secs > 0 and (is_limited or seconds >= _LONG * self._max_secs)

    def add(self, tokens: int, seconds: float) -> None:
        """Take account of a call that has ended."""
        self._calls.append((tokens / max(seconds, 1e-6), tokens))
        limit = max(_LEAST_TOKENS, int(self._median_rate() * self._max_secs))
        self.limit = min(self._most_tokens, limit)

    def _median_rate(self) -> float:
        calls = sorted(self._calls)
        totals = [*accumulate(tokens for _, tokens in calls)]
        return calls[bisect_left(totals, totals[-1] / 2)][0]
