"""Losses on ratings: squared error, Huber, cross-entropies, quantiles; and on ratings and pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_aligner.batch.packed import LabelColumns, Records
from nemo_aligner.contract.readout import (
    BINS,
    LOG_ODDS,
    PROBABILITY,
    QUANTILES,
    SIGMOID,
    Readout,
)
from nemo_aligner.losses.base import (
    RIGHT_FROM,
    RatingObjective,
    check_above,
    check_integer,
    check_number,
)
from nemo_aligner.losses.pairwise import BradleyTerry
from nemo_aligner.losses.value import merge_attributes
from nemo_aligner.metrics.ranking import PairRewards
from nemo_aligner.metrics.table import measure_pairs, measure_ratings
from nemo_aligner.utils.host_transfer import to_device

# Losses on single outputs. Missing labels are masked; the count is of labels, not of replies.


@dataclass(frozen=True)
class MaskedMse(RatingObjective):
    """``(reward - label) ** 2`` over the labels that are present."""

    def loss(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """Sum over labels, and their count (int), of rewards ``[S, A]``."""
        errors, present = self.errors(rewards, records)
        return errors.square().sum(), present.sum()


@dataclass(frozen=True)
class Huber(RatingObjective):
    """``e ** 2 / 2`` for errors e up to ``delta``, ``delta * (abs(e) - delta / 2)`` beyond.

    Huber 1964, "Robust estimation of a location parameter". Over the labels that are present.
    """

    delta: float = 1.0

    def __post_init__(self) -> None:
        check_above(self, "delta", 0)

    def loss(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """Sum over labels, and their count (int), of rewards ``[S, A]``."""
        errors, present = self.errors(rewards, records)
        losses = F.huber_loss(
            errors, errors.new_zeros(errors.shape), reduction="none", delta=self.delta
        )
        return losses.sum(), present.sum()


@dataclass(frozen=True)
class BinaryCrossEntropy(RatingObjective):
    """``-(l * log sigmoid(r) + (1 - l) * log sigmoid(-r))`` of a reward r, for labels l of 0 to 1.

    Over the labels that are present: of every step where steps are scored, else of the text. A
    label between 0 and 1, as the share of completions that come to the right answer, is the
    probability to learn (the soft estimation of Wang et al. 2023, "Math-Shepherd", eq. 3).

    Attributes:
        scale: ``probability``: the head's output r is read as ``sigmoid(r)``, the probability of a
            right step, and 0.5 is undecided; ``log_odds``: the reward is r, and 0 is undecided.
    """

    scale: str = PROBABILITY

    centres_labels: ClassVar[bool] = False
    main_metric: ClassVar[str] = "loss"
    lowest_label: ClassVar[float | None] = 0.0
    highest_label: ClassVar[float | None] = 1.0

    def __post_init__(self) -> None:
        if self.scale not in (PROBABILITY, LOG_ODDS):
            raise ValueError(f"scale: got {self.scale!r}, wanted {PROBABILITY} or {LOG_ODDS}")

    @property
    def readout(self) -> Readout | None:
        if self.scale == LOG_ODDS:
            return None
        return Readout(SIGMOID, ((1.0,),) * len(self.attributes))

    @property
    def right_from(self) -> float:
        return 0.0 if self.scale == LOG_ODDS else RIGHT_FROM

    def loss(self, outputs: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """Sum over labels, and their count (int), of ``outputs [S, A]``."""
        labels = records.labels.targets(self.attributes)
        present = ~torch.isnan(labels)
        outputs = self.output_columns.split(outputs).attributes
        # log(1 + exp(r)) - l r, without the overflow of exp.
        losses = F.softplus(outputs) - labels.nan_to_num() * records.as_single(outputs)
        return torch.where(present, losses, 0.0).sum(), present.sum()


@dataclass(frozen=True)
class ProbabilityCrossEntropy(RatingObjective):
    """The same of rewards that are probabilities already, for evaluation, which has no outputs.

    As fp32 rounds a probability near 1, it counts at most as one of ``1 - 2 ** -25``.
    """

    centres_labels: ClassVar[bool] = False
    main_metric: ClassVar[str] = "loss"

    def loss(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """Sum over labels, and their count (int), of rewards ``[S, A]``."""
        labels = records.labels.targets(self.attributes)
        present = ~torch.isnan(labels)
        tiny = torch.finfo(torch.float32).tiny
        right = records.as_single(rewards).double().clamp(tiny, 1 - 2**-25)
        share = labels.nan_to_num().double()
        losses = -(share * right.log() + (1 - share) * torch.log1p(-right))
        return torch.where(present, losses, 0.0).sum(), present.sum()


# Losses on K outputs per attribute, which a readout converts into a reward.


@dataclass(frozen=True)
class Quantiles(RatingObjective):
    """Mean over K levels t of ``max(t * u, (t - 1) * u)``, u the label minus the output of t.

    The pinball loss of Koenker and Bassett 1978, "Regression quantiles", over the labels that are
    present. The median is the reward, and the distance of the outer levels its uncertainty.

    Attributes:
        levels: ascending, between 0 and 1, with 0.5 among them.
    """

    levels: Sequence[float] = (0.1, 0.5, 0.9)

    def __post_init__(self) -> None:
        try:
            _ = self.readout
        except TypeError as error:
            raise ValueError(f"levels: got {self.levels!r}, wanted a list of numbers") from error

    @property
    def readout(self) -> Readout:
        return Readout(QUANTILES, (tuple(map(float, self.levels)),) * len(self.attributes))

    def loss(self, outputs: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """Sum over labels, and their count (int), of ``outputs [S, A * K]``."""
        levels = to_device(torch.tensor(self.levels, dtype=outputs.dtype), outputs.device)
        labels = records.labels.targets(self.attributes)
        present = ~torch.isnan(labels)
        quantiles = self.output_columns.by_attribute(records.as_single(outputs))
        # u > 0: the output is too low, which costs t of the distance; too high costs 1 - t of it.
        short = labels.nan_to_num()[..., None] - quantiles
        losses = torch.maximum(levels * short, (levels - 1) * short).mean(dim=2)
        return torch.where(present, losses, 0.0).sum(), present.sum()


@dataclass(frozen=True)
class OrdinalBins(RatingObjective):
    """``-sum_k w_k log softmax(outputs)_k`` over K bins, for the labels that are present.

    w is 1 at the bin that is the label. A label between two bins is split over both, so that the
    weighted sum of bins is the label ("two-hot": Imani and White 2018, "Improving regression
    performance with distributional losses"; Farebrother et al. 2024, "Stop regressing"). The reward
    is the expected value.

    Attributes:
        values: ascending values of the bins: a list for all attributes, or a mapping from attribute
            to list. None spaces ``bins`` values evenly over the range of the training labels.
        bins: number of values where ``values`` is None.
    """

    values: Any = None
    bins: int = 5

    centres_labels: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_integer(self, "bins", 2)
        if self.values is not None:
            _ = self.readout

    @property
    def readout(self) -> Readout | None:
        """None until the values are known."""
        if self.values is None:
            return None
        rows = _rows(self.values, self.attributes)
        return Readout(BINS, tuple(tuple(map(float, row)) for row in rows))

    def fit_to_labels(self, labels: LabelColumns, kept: Readout | None) -> OrdinalBins:
        """Fill in the values: those of ``kept``, else the range of each attribute's ``labels``.

        Values that are set stay.

        Raises:
            ValueError: all labels of an attribute are equal or missing.
        """
        if self.values is not None:
            return self
        if kept is not None and kept.kind == BINS:
            own = zip(self.attributes, map(list, kept.numbers), strict=True)
            return replace(self, values=dict(own))
        columns = [labels.values[:, labels.names.index(name)] for name in self.attributes]
        ranges = [column[~torch.isnan(column)] for column in columns]
        values = {}
        for name, given in zip(self.attributes, ranges, strict=True):
            if given.numel() == 0 or given.min() == given.max():
                raise ValueError(f"values: got none, wanted them, as all labels of {name} are one")
            low, high = float(given.min()), float(given.max())
            values[name] = np.linspace(low, high, self.bins).tolist()
        return replace(self, values=values)

    def loss(self, outputs: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """Sum over labels, and their count (int), of ``outputs [S, A * K]``."""
        readout = self.readout
        assert readout is not None, "training fits it to its data first"
        values = to_device(torch.tensor(readout.numbers, dtype=outputs.dtype), outputs.device)
        labels = records.labels.targets(self.attributes)
        present = ~torch.isnan(labels)
        # Softmax in each attribute's own K outputs.
        logits = self.output_columns.by_attribute(records.as_single(outputs))
        weights = _two_hot(labels.nan_to_num().to(outputs.dtype), values)
        losses = -(weights * logits.log_softmax(dim=2)).sum(dim=2)
        return torch.where(present, losses, 0.0).sum(), present.sum()


def _rows(values: Any, attributes: Sequence[str]) -> list[Any]:
    """Expand ``values`` to a list per attribute; ValueError if one is missing or not numbers."""
    rows = [values] * len(attributes)
    if isinstance(values, Mapping):
        if set(values) != set(attributes):
            raise ValueError(f"values: got those of {list(values)}, wanted {list(attributes)}")
        rows = [values[name] for name in attributes]
    for row in rows:
        are_numbers = isinstance(row, list | tuple) and all(
            isinstance(value, int | float) and not isinstance(value, bool) for value in row
        )
        if not are_numbers:
            raise ValueError(f"values: got {row!r}, wanted a list of numbers")
    return rows


def _two_hot(labels: Tensor, values: Tensor) -> Tensor:
    """Distribute labels ``[S, A]`` over values ``[A, K]``: weights ``[S, A, K]`` that sum to 1.

    Labels beyond the outer values are clamped.
    """
    within = torch.minimum(torch.maximum(labels, values[:, 0]), values[:, -1])[..., None]
    steps = values.diff(dim=1)
    ones = torch.ones_like(within)
    # Position of the label between a value and the one below it, and the one above it.
    rising = torch.cat([ones.expand_as(within), (within - values[:, :-1]) / steps], dim=2)
    falling = torch.cat([(values[:, 1:] - within) / steps, ones.expand_as(within)], dim=2)
    return torch.minimum(rising, falling).clamp(0, 1)


# Ratings and pairs in one loss.


@dataclass(frozen=True)
class RankingAndRegression(RatingObjective):
    """``-log sigmoid(m)`` of comparisons, and the mean squared error over a rating's labels.

    Ratings say what is good about a reply, pairs which one people prefer on the whole. Wang et al.
    2024, "Interpretable preferences via multi-objective reward modeling and mixture-of-experts",
    learn one after the other; here it is one loss.

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
        pairs = records.pairs()
        merged = self._merged(rewards + torch.tensor(records.labels.offsets(self.attributes)))
        known = None if lengths is None else torch.stack(pairs.of(lengths), dim=1)
        return PairRewards.of(torch.stack(pairs.of(merged), dim=1), known)


def _rated_rows(records: Records) -> tuple[Tensor, Tensor]:
    """Indices of the ratings among ``records``, and the rows of their rewards; on the host."""
    rated = (records.sizes == 1).nonzero().flatten()
    return rated, records.bounds[:-1][rated]
