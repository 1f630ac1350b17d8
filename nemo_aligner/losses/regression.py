"""Losses on ratings: squared error, Huber, cross-entropies, quantiles, bins; ratings and pairs.

S is the number of rewards (one per sample, or one per turn or step), A the number of attributes and
K the number of outputs per attribute.
"""

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
    add_label_means,
    check_above,
    check_integer,
    check_number,
    original_labels,
    teacher_sides,
)
from nemo_aligner.losses.pairwise import BradleyTerry
from nemo_aligner.losses.value import merge_attributes
from nemo_aligner.metrics.ranking import PairRewards
from nemo_aligner.metrics.table import measure_pairs, measure_ratings
from nemo_aligner.utils.host_transfer import to_device

# Losses on one output per attribute. They mask missing labels (NaN), and the number of losses that
# they return is that of labels, not of records.


@dataclass(frozen=True)
class MaskedMse(RatingObjective):
    """Mean squared error ``(reward - label) ** 2`` over the labels that are present."""

    def loss(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses of all labels, and their number.

        ``rewards`` are ``[S, A]``: a row for each reward, and a column for each attribute.
        """
        errors, present = self.errors(rewards, records)
        return errors.square().sum(), present.sum()


@dataclass(frozen=True)
class Huber(RatingObjective):
    """Huber loss over the labels that are present: quadratic up to ``delta``, linear beyond.

    It is ``e ** 2 / 2`` for errors e up to ``delta`` and ``delta * (abs(e) - delta / 2)`` beyond
    (Huber 1964, "Robust estimation of a location parameter").
    """

    delta: float = 1.0

    def __post_init__(self) -> None:
        check_above(self, "delta", 0)

    def loss(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """Return the loss summed over all labels, and their number; ``rewards`` are ``[S, A]``."""
        errors, present = self.errors(rewards, records)
        losses = F.huber_loss(
            errors, errors.new_zeros(errors.shape), reduction="none", delta=self.delta
        )
        return losses.sum(), present.sum()


@dataclass(frozen=True)
class BinaryCrossEntropy(RatingObjective):
    """``-(l * log sigmoid(r) + (1 - l) * log sigmoid(-r))`` of an output r and a label l in [0, 1].

    The loss is averaged over the labels that are present: those of every step if steps are scored,
    otherwise those of the sample. A label between 0 and 1, such as the fraction of completions that
    reach the right answer, is the probability to learn (the soft estimation of Wang et al. 2023,
    "Math-Shepherd", eq. 3).

    Attributes:
        scale: ``probability`` makes ``sigmoid(r)``, the probability of a right step, the reward,
            and 0.5 is undecided; ``log_odds`` makes r the reward, and 0 is undecided.
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
        """Return the loss summed over all labels, and their number; ``outputs`` are ``[S, A]``."""
        labels = records.labels.targets(self.attributes)
        present = ~torch.isnan(labels)
        outputs = self.output_columns.split(outputs).attributes
        # The loss is log(1 + exp(r)) - l * r. softplus computes it without overflow of exp.
        losses = F.softplus(outputs) - labels.nan_to_num() * records.as_single(outputs)
        return torch.where(present, losses, 0.0).sum(), present.sum()


@dataclass(frozen=True)
class ProbabilityCrossEntropy(RatingObjective):
    """Cross-entropy of rewards that already are probabilities.

    Evaluation uses it for models trained with ``BinaryCrossEntropy`` on steps, because the scoring
    contract has already applied the sigmoid to their outputs. fp32 rounds a probability near 1 to
    1, whose loss could be infinite, so a probability counts as at most ``1 - 2 ** -25``.
    """

    centres_labels: ClassVar[bool] = False
    main_metric: ClassVar[str] = "loss"

    def loss(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """Return the loss summed over all labels, and their number; ``rewards`` are ``[S, A]``."""
        labels = records.labels.targets(self.attributes)
        present = ~torch.isnan(labels)
        tiny = torch.finfo(torch.float32).tiny
        probabilities = records.as_single(rewards).double().clamp(tiny, 1 - 2**-25)
        share = labels.nan_to_num().double()
        losses = -(share * probabilities.log() + (1 - share) * torch.log1p(-probabilities))
        return torch.where(present, losses, 0.0).sum(), present.sum()


# Losses on K outputs per attribute, which a readout converts into one reward.


@dataclass(frozen=True)
class Quantiles(RatingObjective):
    """Pinball loss: mean over K levels t of ``max(t * u, (t - 1) * u)``.

    u is the label minus the output of level t (Koenker and Bassett 1978, "Regression quantiles").
    The loss is averaged over the labels that are present. The median (level 0.5) is the reward, and
    the distance between the outputs of the outer levels is its uncertainty.

    Attributes:
        levels: ascending numbers between 0 and 1, with 0.5 among them.
    """

    levels: Sequence[float] = (0.1, 0.5, 0.9)

    def __post_init__(self) -> None:
        _require_numbers("levels", self.levels)
        _ = self.readout

    @property
    def readout(self) -> Readout:
        return Readout(QUANTILES, (tuple(map(float, self.levels)),) * len(self.attributes))

    def loss(self, outputs: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """Return the loss summed over all labels, and their number.

        ``outputs`` are ``[S, A * K]``.
        """
        levels = to_device(torch.tensor(self.levels, dtype=outputs.dtype), outputs.device)
        labels = records.labels.targets(self.attributes)
        present = ~torch.isnan(labels)
        quantiles = self.output_columns.by_attribute(records.as_single(outputs))
        # ``short`` is u. An output that is too low (u > 0) costs t * u, and an output that is too
        # high costs (1 - t) * -u.
        short = labels.nan_to_num()[..., None] - quantiles
        losses = torch.maximum(levels * short, (levels - 1) * short).mean(dim=2)
        return torch.where(present, losses, 0.0).sum(), present.sum()


@dataclass(frozen=True)
class OrdinalBins(RatingObjective):
    """Cross-entropy ``-sum_k w_k log softmax(outputs)_k`` over K bins of label values.

    The loss is averaged over the labels that are present. The weight w_k is 1 for the bin whose
    value is the label, else 0. A label between two bins is split over both, so that the weighted
    sum of the bins' values is the label ("two-hot": Imani and White 2018, "Improving regression
    performance with distributional losses"; Farebrother et al. 2024, "Stop regressing"). The reward
    is the expected value.

    Attributes:
        values: ascending values of the bins: one list for all attributes, or a mapping from
            attribute to list. None spaces ``bins`` values evenly over the range of the training
            labels.
        bins: number of bins, K, if ``values`` is None.
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
        """Readout with the values of the bins; None until they are set or fitted to the labels."""
        if self.values is None:
            return None
        rows = _values_per_attribute(self.values, self.attributes)
        return Readout(BINS, tuple(tuple(map(float, row)) for row in rows))

    def fit_to_labels(self, labels: LabelColumns, base_readout: Readout | None) -> OrdinalBins:
        """Fill in the values of the bins if the settings do not have them.

        The values of ``base_readout`` are used if it has bins. Otherwise the values are spaced
        evenly over the range of each attribute's ``labels``.

        Raises:
            ValueError: all labels of an attribute are equal or missing.
        """
        if self.values is not None:
            return self
        if base_readout is not None and base_readout.kind == BINS:
            base_values = zip(self.attributes, map(list, base_readout.numbers), strict=True)
            return replace(self, values=dict(base_values))
        columns = original_labels(labels, self.attributes).unbind(dim=1)
        present = [column[~torch.isnan(column)] for column in columns]
        values = {}
        for name, numbers in zip(self.attributes, present, strict=True):
            if numbers.numel() == 0 or numbers.min() == numbers.max():
                raise ValueError(
                    f"values: got none, and all training labels of {name} are equal or missing, so "
                    "that no values follow from them. Set values"
                )
            low, high = float(numbers.min()), float(numbers.max())
            values[name] = np.linspace(low, high, self.bins).tolist()
        return replace(self, values=values)

    def loss(self, outputs: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """Return the loss summed over all labels, and their number.

        ``outputs`` are ``[S, A * K]``.
        """
        readout = self.readout
        assert readout is not None, "fit_to_labels comes before training"
        values = to_device(torch.tensor(readout.numbers, dtype=outputs.dtype), outputs.device)
        labels = records.labels.targets(self.attributes)
        present = ~torch.isnan(labels)
        # The softmax is over the K outputs of each attribute.
        logits = self.output_columns.by_attribute(records.as_single(outputs))
        weights = _two_hot(labels.nan_to_num().to(outputs.dtype), values)
        losses = -(weights * logits.log_softmax(dim=2)).sum(dim=2)
        return torch.where(present, losses, 0.0).sum(), present.sum()


def _values_per_attribute(values: Any, attributes: Sequence[str]) -> list[Any]:
    """Return the list of bin values of each attribute.

    Raises:
        ValueError: an attribute has no list, or a list has an item that is not a number.
    """
    rows = [values] * len(attributes)
    if isinstance(values, Mapping):
        if set(values) != set(attributes):
            raise ValueError(
                f"values: got lists for {list(values)}, wanted one for each of {list(attributes)}"
            )
        rows = [values[name] for name in attributes]
    for row in rows:
        _require_numbers("values", row)
    return rows


def _require_numbers(name: str, value: Any) -> None:
    """Raise ValueError if the setting ``name`` has a value other than a list of numbers."""
    are_numbers = isinstance(value, list | tuple) and all(
        isinstance(item, int | float) and not isinstance(item, bool) for item in value
    )
    if not are_numbers:
        raise ValueError(f"{name}: got {value!r}, wanted a list of numbers")


def _two_hot(labels: Tensor, values: Tensor) -> Tensor:
    """Split each label over the two nearest values, so that the weighted values add up to it.

    Args:
        labels: ``[S, A]``; labels beyond the outer values are clamped to these.
        values: ``[A, K]`` ascending values.

    Returns:
        Weights ``[S, A, K]`` that sum to 1 over K.
    """
    within = torch.minimum(torch.maximum(labels, values[:, 0]), values[:, -1])[..., None]
    steps = values.diff(dim=1)
    ones = torch.ones_like(within)
    # The weight of a value rises from 0 for a label at the value below to 1 for a label at the
    # value itself, and falls to 0 for a label at the value above.
    rising = torch.cat([ones.expand_as(within), (within - values[:, :-1]) / steps], dim=2)
    falling = torch.cat([(values[:, 1:] - within) / steps, ones.expand_as(within)], dim=2)
    return torch.minimum(rising, falling).clamp(0, 1)


# A loss on ratings and pairs together.


@dataclass(frozen=True)
class RankingAndRegression(RatingObjective):
    """``-log sigmoid(m)`` of comparisons plus the mean squared error of ratings.

    Ratings say what is good about a reply; comparisons say which reply people prefer overall. Wang
    et al. 2024, "Interpretable preferences via multi-objective reward modeling and
    mixture-of-experts", train on ratings first and then on comparisons; this loss trains on both
    together.

    m is the margin of the weighted sums of attributes. Every record counts once: a comparison with
    the mean over its pairs, a rating with the mean over its labels times ``regression_weight``.

    Attributes:
        weights: weights of the attributes in the sum (``model.regression.attribute_weights``);
            empty means 1 each.
        regression_weight: weight of a rating's loss relative to that of a comparison.
    """

    weights: tuple[float, ...] = ()
    regression_weight: float = 1.0

    main_metric: ClassVar[str] = "loss"
    takes_comparisons: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number(self, "regression_weight", 0)

    def loss(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """Return the sum of the records' losses, and the number of records that have a loss.

        ``rewards`` are ``[S, A]``. A comparison has a loss if its samples are not all tied, a
        rating if it has a label.
        """
        # A rating has one completion and thus no pair, so Bradley-Terry counts only comparisons.
        total, count = BradleyTerry().loss(self._merge(rewards)[:, None], records)
        rated, rows = _rated_rows(records)
        if len(rated) == 0:
            return total, count
        labels = records.labels.targets(self.attributes)
        labels = labels[to_device(rated, labels.device)]
        present = ~torch.isnan(labels)
        errors = rewards[to_device(rows, rewards.device)] - labels.nan_to_num()
        squares = torch.where(present, errors, 0.0).square().sum(dim=1)
        # Average over a record's labels, so that its weight does not depend on their number.
        means = squares / present.sum(dim=1).clamp(min=1)
        return total + self.regression_weight * means.sum(), count + present.any(dim=1).sum()

    def step_metrics(self, rewards: Tensor, records: Records) -> dict[str, float]:
        return measure_pairs(self._pair_rewards(rewards, records), in_step=True)

    def report(self, rewards: Tensor, records: Records, reply_lengths: Tensor) -> dict[str, float]:
        """Return metrics of pairs if there are comparisons, and of ratings if there are ratings."""
        metrics: dict[str, float] = {}
        rated, rows = _rated_rows(records)
        if len(rated) < len(records):
            metrics |= measure_pairs(self._pair_rewards(rewards, records, reply_lengths))
        if len(rated):
            ratings = self._join_ratings(rewards[rows], records.select(rated), reply_lengths[rows])
            metrics |= measure_ratings(ratings)
        return metrics

    def _merge(self, rewards: Tensor) -> Tensor:
        """Compute the weighted sums ``[S]`` of the attributes' rewards ``[S, A]``."""
        return merge_attributes(rewards, self.weights or (1.0,) * len(self.attributes))

    def _pair_rewards(
        self, rewards: Tensor, records: Records, lengths: Tensor | None = None
    ) -> PairRewards:
        """Compute the merged rewards of both replies of each pair, for metrics.

        A merged reward is the weighted sum of the attributes, after the means of centred labels
        are added back to them.
        """
        pairs = records.pairs()
        merged = self._merge(add_label_means(rewards, records.labels, self.attributes))
        pair_lengths = None if lengths is None else torch.stack(pairs.of(lengths), dim=1)
        sides = torch.stack(pairs.of(merged), dim=1)
        return PairRewards.of(sides, pair_lengths, teacher_sides(records))


def _rated_rows(records: Records) -> tuple[Tensor, Tensor]:
    """Find the ratings among ``records``, which may also have comparisons.

    Returns:
        The indices of the n ratings in ``records``, and those of their rewards in the batch's
        rewards, both ``[n]`` int64.
    """
    rated = (records.sample_bounds.diff() == 1).nonzero().flatten()
    return rated, records.record_bounds[:-1][rated]
