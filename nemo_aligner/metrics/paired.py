"""How sure a share is, and whether two models differ on the same pairs."""

from __future__ import annotations

import math

import numpy as np

# Of the standard normal distribution, for an interval of 95%.
_Z = 1.959963984540054
_DRAWS = 10_000


def wilson_interval(right: float, count: int) -> tuple[float, float]:
    """The 95% interval of a share of which ``right`` of ``count`` were seen (Wilson 1927).

    ``right`` may have halves. Of nothing it is from 0 to 1.
    """
    if count == 0:
        return 0.0, 1.0
    share, weight = right / count, _Z * _Z / count
    middle = (share + weight / 2) / (1 + weight)
    reach = math.sqrt(weight * (share * (1 - share) + weight / 4)) / (1 + weight)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def mcnemar(lost: int, gained: int) -> float:
    """How likely verdicts turn at least so unevenly if neither model is better (McNemar 1947).

    Exact and two-sided: of ``lost + gained`` verdicts that turned, each way is as likely.
    """
    count, fewer = lost + gained, min(lost, gained)
    if count == 0:
        return 1.0
    chances = [
        math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
        for k in range(fewer + 1)
    ]
    tail = float(np.exp(np.array(chances) - count * math.log(2)).sum())
    return min(1.0, 2 * tail)


def bootstrap_interval(differences: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """The 95% interval of the mean of ``[N]`` paired differences (Efron 1979, percentiles).

    10,000 draws of N pairs, the same ones for the same seed. Of nothing it is NaN.
    """
    if differences.size == 0:
        return math.nan, math.nan
    # As few values occur, their counts are drawn and not the pairs.
    values, counts = np.unique(differences, return_counts=True)
    random = np.random.RandomState(seed)
    drawn = random.multinomial(differences.size, counts / differences.size, size=_DRAWS)
    low, high = np.percentile(drawn @ values / differences.size, (2.5, 97.5))
    return float(low), float(high)
