"""What is learned: for each type of reward model, a loss and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from nemo_aligner.losses import bradley_terry, masked_mse
from nemo_aligner.metrics.ranking import ranking_metrics, ranking_report
from nemo_aligner.metrics.regression import regression_report
from nemo_aligner.text.contract import ScoringContract


class Objective(Protocol):
    """Rewards are ``[R, sequences, A]``; labels ``[R, A]``, or None where there are none.

    ``reply_lengths`` are ``[R, sequences]``, in tokens.

    ``main_metric`` is the one by which checkpoints are compared when nobody says otherwise.
    """

    main_metric: str
    attributes: tuple[str, ...]

    def loss(self, rewards: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """The sum of the losses, and over how many."""
        ...

    def step_metrics(self, rewards: Tensor, labels: Tensor | None) -> dict[str, float]:
        """What makes sense of one batch."""
        ...

    def report(
        self, rewards: Tensor, labels: Tensor | None, reply_lengths: Tensor
    ) -> dict[str, float]:
        """What makes sense of a whole data set."""
        ...


class RankingObjective:
    """Chosen above rejected."""

    main_metric = "accuracy"
    attributes: tuple[str, ...] = ("reward",)

    def loss(self, rewards: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        return bradley_terry(rewards[:, :, 0])

    def step_metrics(self, rewards: Tensor, labels: Tensor | None) -> dict[str, float]:
        return ranking_metrics(rewards[:, :, 0])

    def report(
        self, rewards: Tensor, labels: Tensor | None, reply_lengths: Tensor
    ) -> dict[str, float]:
        return ranking_report(rewards[:, :, 0], reply_lengths)


class RegressionObjective:
    """Every attribute near its label."""

    main_metric = "pearson_mean"

    def __init__(self, attributes: Sequence[str]) -> None:
        self.attributes = tuple(attributes)

    def loss(self, rewards: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        return masked_mse(rewards[:, 0], _present(labels))

    def step_metrics(self, rewards: Tensor, labels: Tensor | None) -> dict[str, float]:
        total, count = self.loss(rewards.double(), labels)
        return {"loss": float(total / count.clamp(min=1))}

    def report(
        self, rewards: Tensor, labels: Tensor | None, reply_lengths: Tensor
    ) -> dict[str, float]:
        return regression_report(rewards[:, 0], _present(labels), self.attributes, reply_lengths)


def build_objective(contract: ScoringContract) -> Objective:
    """The objective of the contract's reward model type."""
    if contract.reward_model_type == "regression":
        return RegressionObjective(contract.attributes)
    return RankingObjective()


def _present(labels: Tensor | None) -> Tensor:
    if labels is None:
        raise ValueError("regression needs labels")
    return labels
