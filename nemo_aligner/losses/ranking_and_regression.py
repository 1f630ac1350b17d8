"""Joint loss on pairs, by a weighted sum of attributes, and on ratings.

Ratings say what is good about a reply, pairs which one people prefer on the whole. Wang et al.
2024, "Interpretable preferences via multi-objective reward modeling and mixture-of-experts", learn
one after the other; here it is one loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nemo_aligner.batch.packed import Records
from nemo_aligner.losses.base import RatingObjective, check_number
from nemo_aligner.losses.pairwise import BradleyTerry
from nemo_aligner.losses.value import merge_attributes
from nemo_aligner.metrics.ranking import PairRewards
from nemo_aligner.metrics.table import measure_pairs, measure_ratings
from nemo_aligner.utils.host_transfer import to_device


@dataclass(frozen=True)
class RankingAndRegression(RatingObjective):
    """``-log sigmoid(m)`` of comparisons, and the mean squared error over a rating's labels.

    m is the margin of the weighted sums of attributes. Every record counts once: a comparison by
    the mean of its pairs, a rating by the mean over its labels times ``regression_weight``.

    Attributes:
        weights: of the attributes in the sum (``model.regression.attribute_weights``); 1 each if
            empty.
    """

    weights: tuple[float, ...] = ()
    regression_weight: float = 1.0

    main_metric: ClassVar[str] = "loss"
    takes_comparisons: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number(self, "regression_weight", 0)

    def loss(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """Sum over records of rewards ``[S, A]``, and the count of those with a pair or a label."""
        # A rating has one completion and so no pair: Bradley-Terry counts comparisons alone.
        total, count = BradleyTerry().loss(self._merged(rewards)[:, None], records)
        rated, rows = _rated_rows(records)
        if len(rated) == 0:
            return total, count
        labels = records.labels.targets(self.attributes)
        labels = labels[to_device(rated, labels.device)]
        present = ~torch.isnan(labels)
        errors = rewards[to_device(rows, rewards.device)] - labels.nan_to_num()
        squares = torch.where(present, errors, 0.0).square().sum(dim=1)
        # Its labels share one record's weight, however many of them it has.
        means = squares / present.sum(dim=1).clamp(min=1)
        return total + self.regression_weight * means.sum(), count + present.any(dim=1).sum()

    def step_metrics(self, rewards: Tensor, records: Records) -> dict[str, float]:
        return measure_pairs(self._pair_rewards(rewards, records), in_step=True)

    def report(self, rewards: Tensor, records: Records, reply_lengths: Tensor) -> dict[str, float]:
        """Metrics of pairs if there are comparisons, and of ratings if there are any."""
        found: dict[str, float] = {}
        rated, rows = _rated_rows(records)
        if len(rated) < len(records):
            found |= measure_pairs(self._pair_rewards(rewards, records, reply_lengths))
        if len(rated):
            own = self._rated(rewards[rows], records.select(rated), reply_lengths[rows])
            found |= measure_ratings(own)
        return found

    def _merged(self, rewards: Tensor) -> Tensor:
        """Weighted sums ``[S]``."""
        return merge_attributes(rewards, self.weights or (1.0,) * len(self.attributes))

    def _pair_rewards(
        self, rewards: Tensor, records: Records, lengths: Tensor | None = None
    ) -> PairRewards:
        """Pair the weighted sums, with the means of centred labels added back."""
        pairs, offsets = records.pairs(), _offsets(records)
        added = torch.tensor([offsets.get(name) or 0.0 for name in self.attributes])
        merged = self._merged(rewards + added)
        known = None if lengths is None else torch.stack(pairs.of(lengths), dim=1)
        return PairRewards.of(torch.stack(pairs.of(merged), dim=1), known)


def _rated_rows(records: Records) -> tuple[Tensor, Tensor]:
    """Indices of the ratings among ``records``, and the rows of their rewards; on the host."""
    rated = (records.sizes == 1).nonzero().flatten()
    return rated, records.bounds[:-1][rated]


def _offsets(records: Records) -> Mapping[str, float | None]:
    return dict(zip(records.labels.names, records.labels.means, strict=True))
