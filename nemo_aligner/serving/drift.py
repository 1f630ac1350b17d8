"""How far the rewards of late are from those that the scoring contract was measured on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nemo_aligner.text.contract import ScoringContract


@dataclass(frozen=True)
class AttributeDrift:
    """Of one attribute: mean and standard deviation of its last ``rows`` rewards.

    Against those of the contract, where it has them: ``mean_drift`` is how far the mean has moved,
    in the contract's standard deviations, and ``std_ratio`` the deviation over the contract's.
    """

    rows: int
    mean: float
    std: float
    mean_drift: float | None
    std_ratio: float | None


class RecentRewards:
    """The last rewards, at most ``most_rows`` of them; rows that have none do not count."""

    def __init__(self, most_rows: int) -> None:
        self._most_rows = most_rows
        self._kept = np.zeros((0, 0), dtype=np.float32)

    def add(self, rewards: np.ndarray) -> None:
        """``[N, A]`` more; of another number of attributes, they replace what was kept."""
        scored = rewards[np.isfinite(rewards).all(axis=1)]
        if len(scored) and scored.shape[1] != self._kept.shape[1]:
            self._kept = np.zeros((0, scored.shape[1]), dtype=np.float32)
        if len(scored):
            self._kept = np.concatenate([self._kept, scored])[-self._most_rows :]

    def drift(self, contract: ScoringContract | None) -> list[AttributeDrift]:
        """Of each attribute; empty before any reward."""
        if not len(self._kept):
            return []
        kept = self._kept.astype(np.float64)
        means, stds = kept.mean(axis=0), kept.std(axis=0)
        return [
            AttributeDrift(
                len(kept), float(mean), float(std), *_against(contract, column, mean, std)
            )
            for column, (mean, std) in enumerate(zip(means, stds, strict=True))
        ]


def _against(
    contract: ScoringContract | None, column: int, mean: float, std: float
) -> tuple[float | None, float | None]:
    if contract is None or contract.reward_mean is None or contract.reward_std is None:
        return None, None
    usual = contract.reward_std[column]
    if usual <= 0:
        return None, None
    return float((mean - contract.reward_mean[column]) / usual), float(std / usual)
