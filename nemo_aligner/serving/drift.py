"""How far recent rewards have drifted from the statistics in the scoring contract."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nemo_aligner.contract.contract import ScoringContract


@dataclass(frozen=True)
class AttributeDrift:
    """Statistics of the latest rewards of one attribute.

    Attributes:
        rows: number of rewards.
        mean: mean of the rewards.
        std: standard deviation of the rewards.
        mean_drift: (mean - the contract's mean) / the contract's standard deviation; None if the
            contract has no statistics.
        std_ratio: ``std`` / the contract's standard deviation; None if the contract has none.
    """

    rows: int
    mean: float
    std: float
    mean_drift: float | None
    std_ratio: float | None


class RecentRewards:
    """Keeps the latest rewards, at most ``most_rows`` rows; rows without a reward are skipped."""

    def __init__(self, most_rows: int) -> None:
        self._most_rows = most_rows
        self._rewards = np.zeros((0, 0), dtype=np.float32)

    def add(self, rewards: np.ndarray) -> None:
        """Add rewards ``[N, A]``; if A has changed, earlier rewards are dropped."""
        scored = rewards[np.isfinite(rewards).all(axis=1)]
        # The number of attributes changes if the backends now have another model.
        if len(scored) and scored.shape[1] != self._rewards.shape[1]:
            self._rewards = np.zeros((0, scored.shape[1]), dtype=np.float32)
        if len(scored):
            self._rewards = np.concatenate([self._rewards, scored])[-self._most_rows :]

    def drift(self, contract: ScoringContract | None) -> list[AttributeDrift]:
        """Compare each attribute's recent rewards with the contract.

        Empty before the first reward.
        """
        if not len(self._rewards):
            return []
        rewards = self._rewards.astype(np.float64)
        means, stds = rewards.mean(axis=0), rewards.std(axis=0)
        return [
            AttributeDrift(
                len(rewards), float(mean), float(std), *_drift_of(contract, column, mean, std)
            )
            for column, (mean, std) in enumerate(zip(means, stds, strict=True))
        ]


def _drift_of(
    contract: ScoringContract | None, column: int, mean: float, std: float
) -> tuple[float | None, float | None]:
    if contract is None or contract.reward_mean is None or contract.reward_std is None:
        return None, None
    contract_std = contract.reward_std[column]
    if contract_std <= 0:
        return None, None
    return float((mean - contract.reward_mean[column]) / contract_std), float(std / contract_std)
