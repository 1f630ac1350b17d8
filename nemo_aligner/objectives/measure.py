"""What an objective says of rewards that are all there: its loss, its metrics, each by source."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nemo_aligner.batch import Records
from nemo_aligner.metrics.by_source import by_source
from nemo_aligner.objectives.base import Objective


def mean_loss(objective: Objective, rewards: Tensor, records: Records) -> float:
    """The objective's own loss in float64, the mean over all ``records``; 0 where none counts."""
    total, count = objective.loss(rewards.double(), records)
    return float(total / count.clamp(min=1))


def measure_step(objective: Objective, rewards: Tensor, records: Records) -> dict[str, float]:
    """The loss and what makes sense of one batch of rewards ``[S, A]``."""
    return {
        "loss": mean_loss(objective, rewards, records),
        **objective.step_metrics(rewards, records),
    }


def measure_set(
    objective: Objective,
    rewards: Tensor,
    records: Records,
    reply_lengths: Tensor,
    sources: Sequence[str],
) -> dict[str, float]:
    """The loss and the report of a whole data set, and of each of its sources.

    Args:
        rewards: ``[S, A]`` of every record once.
        reply_lengths: ``[S]`` integer.
        sources: of every record where it is from; "" where it does not say.
    """

    def report(indices: Sequence[int]) -> dict[str, float]:
        rows, chosen = records.rows(indices), records.select(indices)
        return {
            "loss": mean_loss(objective, rewards[rows], chosen),
            **objective.report(rewards[rows], chosen, reply_lengths[rows]),
        }

    return {**report(range(len(records))), **by_source(sources, report)}
