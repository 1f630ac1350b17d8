"""Objective: the interface of a loss, its base classes, checks of settings, and metrics.

S is the number of rewards (one per sample, or one per turn or step) and A the number of attributes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from nemo_aligner.batch.outputs import OutputColumns
from nemo_aligner.batch.packed import LabelColumns, Records
from nemo_aligner.config.common import Aggregate, RecordKind
from nemo_aligner.contract.readout import BINS, Readout
from nemo_aligner.metrics.ranking import PairRewards
from nemo_aligner.metrics.regression import RatedRewards, StepVerdicts
from nemo_aligner.metrics.table import (
    BY_PRINCIPLE,
    POSITION,
    by_source,
    measure_pairs,
    measure_ratings,
    measure_spreads,
    measure_steps,
)

# The interface of objectives, and the base classes of objectives on pairs and on ratings.

# A step counts as right if its label or reward is at least this, where both are from 0 to 1.
RIGHT_FROM = 0.5


@dataclass(frozen=True)
class Objective(ABC):
    """Base class of all training objectives. Every member has a default, except abstract ones.

    A loss inherits from ``PairObjective`` or ``RatingObjective``. It overrides a member with a
    property, a class attribute or a field with a default. Its fields are settings.

    The parameter ``rewards`` of its methods is ``[S, A]``, in the order of ``records``, which hold
    the labels and say to which record each reward belongs. If the objective has a ``readout``, it
    has K outputs for each attribute instead. If the objective learns scalars, they are further
    columns. ``output_columns`` splits the columns. The scoring contract's label means are not yet
    added; ``records.labels`` has them (``add_label_means``).

    Attributes:
        attributes: A names, one for each reward of a sample.
        has_steps: True if a sample has a reward for each of its turns or steps. The scoring
            contract determines it (``ScoringContract.has_steps``), so it is not a setting.
        record_kind: kind of records that the objective trains on.
        main_metric: metric that ranks checkpoints by default.
    """

    attributes: tuple[str, ...]
    has_steps: bool = field(default=False, kw_only=True)
    record_kind: ClassVar[RecordKind]
    main_metric: ClassVar[str]

    @abstractmethod
    def loss(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses and their count, as scalar tensors.

        Training divides the sum over the global batch by the count over the global batch.
        """

    @abstractmethod
    def step_metrics(self, rewards: Tensor, records: Records) -> dict[str, float]:
        """Compute the metrics that are logged at each training step, by name, without the loss."""

    @abstractmethod
    def report(self, rewards: Tensor, records: Records, reply_lengths: Tensor) -> dict[str, float]:
        """Compute the metrics of a whole data set, by name, without the loss.

        ``reply_lengths`` are ``[S]`` integers, in tokens.
        """

    # Properties that say which records and labels the objective reads.

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the label columns that the data must have; empty if the loss needs no labels."""
        return ()

    @property
    def learns_from_ties(self) -> bool:
        """True if the objective trains on comparisons whose completions are all tied."""
        return False

    @property
    def learns_soft_labels(self) -> bool:
        """True if the objective learns the rewards that a teacher gave the replies of comparisons.

        Training with another objective on records that have such rewards is an error.
        """
        return False

    @property
    def takes_comparisons(self) -> bool:
        """True if an objective on ratings also trains on comparisons."""
        return False

    @property
    def lowest_label(self) -> float | None:
        """Smallest value allowed in the label columns; None sets no limit."""
        return None

    @property
    def highest_label(self) -> float | None:
        """Largest value allowed in the label columns; None sets no limit."""
        return None

    @property
    def centres_labels(self) -> bool:
        """True if the objective trains on labels minus their means.

        The scoring contract adds the means back to rewards.
        """
        return False

    def fit_to_labels(self, labels: LabelColumns, base_readout: Readout | None) -> Objective:
        """Return the objective with settings that depend on the training set's ``labels``.

        Most objectives return themselves.

        Args:
            base_readout: readout of the head that training starts from; None if it has one output
                for each attribute.

        Raises:
            ValueError: the labels do not determine a setting.
        """
        return self

    def for_measuring(self) -> Objective:
        """Return the objective that measures a data set; most objectives return themselves.

        A loss that weighs records at random, for example, is measured without these weights,
        because its value would depend on the draws.
        """
        return self

    # Properties that say how the outputs of the head become rewards.

    @property
    def readout(self) -> Readout | None:
        """Conversion of the head's outputs into rewards; None if outputs are rewards."""
        return None

    @property
    def aggregate(self) -> str | None:
        """Rule that merges the rewards of a sample's turns or steps into one reward.

        None if the objective cannot train on rewards of turns or steps.
        """
        return None

    @property
    def right_from(self) -> float:
        """Lowest reward with which the model judges a step right, if steps have rewards.

        It is 0.5 for probabilities and 0 for log-odds.
        """
        return RIGHT_FROM

    # Properties that say how the loss is computed.

    @property
    def is_batch_level(self) -> bool:
        """True if the loss is a function of all rewards of a batch instead of a sum over records.

        A training step then needs an additional forward pass to compute all rewards
        (``reward_gradient``).
        """
        return False

    @property
    def initial_scalars(self) -> tuple[float, ...]:
        """Initial values of scalars that a loss learns, such as a length bias; empty without any.

        The head has an output for each.
        """
        return ()

    @property
    def output_columns(self) -> OutputColumns:
        """How many columns the head's outputs have for attributes and for learned scalars.

        The methods of the objective get these outputs as their argument ``rewards``.
        """
        width = 1 if self.readout is None else self.readout.width
        return OutputColumns(len(self.attributes), width, len(self.initial_scalars))

    def learned_scalars(self, rewards: Tensor) -> dict[str, float]:
        """Return the learned scalars by name; empty if there are none, or no rewards to read."""
        return {}


@dataclass(frozen=True)
class PairObjective(Objective):
    """Base class of objectives on comparisons: one attribute, and metrics of pairs."""

    attributes: tuple[str, ...] = ("reward",)
    record_kind: ClassVar[RecordKind] = RecordKind.comparison
    main_metric: ClassVar[str] = "accuracy"

    def step_metrics(self, rewards: Tensor, records: Records) -> dict[str, float]:
        metrics = measure_pairs(PairRewards.of(self._sides(rewards, records)), in_step=True)
        return {**metrics, **self.learned_scalars(rewards)}

    def report(self, rewards: Tensor, records: Records, reply_lengths: Tensor) -> dict[str, float]:
        lengths = torch.stack(records.pairs().of(reply_lengths), dim=1)
        sides, teacher = self._sides(rewards, records), teacher_sides(records)
        metrics = measure_pairs(PairRewards.of(sides, lengths, teacher))
        return {**metrics, **self.learned_scalars(rewards)}

    def _sides(self, outputs: Tensor, records: Records) -> Tensor:
        """Return the rewards ``[P, 2]`` of the better and the worse reply of every pair."""
        return torch.stack(records.pairs().of(self._sample_rewards(outputs, records)), dim=1)

    def _sample_rewards(self, outputs: Tensor, records: Records) -> Tensor:
        """Convert the head's ``outputs [S, ...]`` to a reward for each sample, ``[Q]``."""
        rewards = rewards_of(self.readout, self.output_columns.split(outputs).attributes)
        return add_label_means(rewards, records.labels, self.attributes)[:, 0]


@dataclass(frozen=True)
class RatingObjective(Objective):
    """Base class of objectives on ratings: a label column for each attribute, which is centred."""

    record_kind: ClassVar[RecordKind] = RecordKind.rating
    main_metric: ClassVar[str] = "pearson_mean"

    @property
    def columns(self) -> tuple[str, ...]:
        return self.attributes

    @property
    def centres_labels(self) -> bool:
        return True

    @property
    def aggregate(self) -> str | None:
        return Aggregate.last.value

    def errors(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """Return rewards minus labels ``[S, A]``, and the mask ``[S, A]`` of present labels.

        The error of a missing label is 0.
        """
        labels = records.labels.targets(self.attributes)
        present = ~torch.isnan(labels)
        # Replace NaN before ``where``: the gradient of the unused branch would be 0 * NaN = NaN.
        outputs = records.as_single(self.output_columns.split(rewards).attributes)
        errors = torch.where(present, outputs - labels.nan_to_num(), 0.0)
        return errors, present

    def step_metrics(self, rewards: Tensor, records: Records) -> dict[str, float]:
        rated = self._join_ratings(rewards, records, torch.zeros(len(rewards), dtype=torch.int64))
        return {
            **measure_ratings(rated, in_step=True),
            **measure_steps(self._verdicts(rated, records), in_step=True),
            **self.learned_scalars(rewards),
        }

    def report(self, rewards: Tensor, records: Records, reply_lengths: Tensor) -> dict[str, float]:
        rated = self._join_ratings(rewards, records, reply_lengths)
        return {
            **measure_ratings(rated),
            **measure_steps(self._verdicts(rated, records)),
            **self.learned_scalars(rewards),
        }

    def _verdicts(self, rated: RatedRewards, records: Records) -> StepVerdicts | None:
        """Judge each step as right or wrong by its reward; None if steps have no rewards."""
        if not self.has_steps:
            return None
        rewards = add_label_means(rated.rewards, records.labels, self.attributes)
        # The labels as they are in the data: centring rounds them, so that a label of 1 would be
        # above 1 after the mean is added again.
        labels = original_labels(records.labels, self.attributes)
        counts = records.reward_bounds.diff().tolist()
        return StepVerdicts.of(rewards, labels, counts, self.attributes, self.right_from)

    def _join_ratings(
        self, rewards: Tensor, records: Records, reply_lengths: Tensor
    ) -> RatedRewards:
        """Build the table for metrics of ratings: rewards, labels, lengths and uncertainties.

        ``rewards`` are the head's outputs, and ``reply_lengths [S]`` are in tokens.
        """
        outputs = records.as_single(self.output_columns.split(rewards).attributes)
        labels = records.labels.targets(self.attributes)
        lengths = records.as_single(reply_lengths)
        spreads = spreads_of(self.readout, outputs)
        return RatedRewards.of(
            rewards_of(self.readout, outputs), labels, self.attributes, lengths, spreads
        )


def reward_gradient(objective: Objective, rewards: Tensor, records: Records) -> Tensor:
    """Compute the mean loss's gradient with respect to the rewards, times the number of records.

    This is how a loss over the whole batch (``is_batch_level``) is trained on packs. A training
    step multiplies the rewards of each pack by their rows of this gradient, ``[S, outputs]``, takes
    the sum of the products as the pack's loss, and divides by the number of records. The gradient
    of the weights is then that of the loss over the whole batch, however the batch is split into
    packs (the cached gradients of Gao et al. 2021, "Scaling deep contrastive learning batch size
    under memory limited setup").
    """
    leaf = rewards.double().requires_grad_()
    # Every rank has all rewards, and computes the gradient in float64 on the host, without
    # communication.
    total, count = objective.loss(leaf, records)
    (gradient,) = torch.autograd.grad(total, leaf)
    return (gradient * (len(records) / count.clamp(min=1))).float()


def losses_per_record(objective: Objective, records: Records) -> float:
    """Return the number of losses in a batch, divided by its number of ``records``.

    The loss counts labels for ratings, so the result is their mean number of labels; it is 1 for
    most losses on comparisons.
    """
    if objective.is_batch_level:
        return 1.0
    rewards = torch.zeros(records.num_rewards, objective.output_columns.count)
    _, count = objective.loss(rewards, records)
    return int(count) / len(records)


def rewards_of(readout: Readout | None, outputs: Tensor) -> Tensor:
    """Convert a head's ``outputs [S, A * K]`` to rewards ``[S, A]``; label means are not added."""
    return outputs if readout is None else torch.from_numpy(readout.rewards(_on_host(outputs)))


def spreads_of(readout: Readout | None, outputs: Tensor) -> Tensor | None:
    """Convert a head's ``outputs [S, A * K]`` to the uncertainties ``[S, A]`` of its rewards.

    None if there is no readout: the outputs are then the rewards themselves, and the model reports
    no uncertainty.
    """
    return None if readout is None else torch.from_numpy(readout.spreads(_on_host(outputs)))


def add_label_means(rewards: Tensor, labels: LabelColumns, names: Sequence[str]) -> Tensor:
    """Add the scoring contract's label means to ``rewards [S, A]`` of the attributes ``names``.

    The head's outputs do not include them: training on ratings subtracts them from the labels, and
    training on pairs keeps those of the reward model that it starts from.

    Returns:
        ``[S, A]`` float64, because fp32 could round two different rewards to the same value.
    """
    return rewards.double() + torch.tensor(labels.offsets(names), dtype=torch.float64)


def original_labels(labels: LabelColumns, names: Sequence[str]) -> Tensor:
    """Return the columns ``names`` of labels, ``[L, len(names)]``, as they are in the data.

    No mean is subtracted, unlike in ``LabelColumns.targets``.
    """
    return labels.values[:, [labels.names.index(name) for name in names]]


def teacher_sides(records: Records) -> Tensor | None:
    """Return the teacher's rewards ``[P, 2]`` of the better and the worse reply of every pair.

    They are NaN for a pair without soft labels. None if no record of the data set has any.
    """
    if records.teacher_rewards is None:
        return None
    return torch.stack(records.pairs().of(records.teacher_rewards), dim=1)


def label_limits(objective: Objective, names: Sequence[str]) -> Tensor:
    """Return the smallest and largest label allowed in each column: ``[len(names), 2]`` float32."""
    # The outer bins limit the labels, because a label beyond them would silently train the outer
    # bin.
    lowest, highest, readout = objective.lowest_label, objective.highest_label, objective.readout
    ends = -math.inf if lowest is None else lowest, math.inf if highest is None else highest
    limits = dict.fromkeys(names, ends)
    if readout is not None and readout.kind == BINS:
        bins = [(row[0], row[-1]) for row in readout.numbers]
        limits |= dict(zip(objective.attributes, bins, strict=True))
    return torch.tensor([limits[name] for name in names], dtype=torch.float32).view(-1, 2)


def _on_host(outputs: Tensor) -> np.ndarray:
    """Copy a tensor of any device to a numpy array, without its gradient."""
    return outputs.detach().cpu().numpy()


# Checks of an objective's setting ``name``. They raise a ValueError with its value and the values
# that are allowed.


def check_number(objective: Objective, name: str, low: float, below: float = math.inf) -> None:
    """Check that a setting is finite, at least ``low`` and less than ``below``."""
    less = "" if below == math.inf else f" and less than {below:g}"
    fits = low <= _as_number(objective, name) < below
    _require(objective, name, fits, f"a number of {low:g} or more{less}")


def check_above(objective: Objective, name: str, low: float) -> None:
    """Check that a setting is finite and greater than ``low``."""
    value = _as_number(objective, name)
    _require(objective, name, low < value < math.inf, f"a number above {low:g}")


def check_share(objective: Objective, name: str) -> None:
    """Check that a setting is a number from 0 to 1."""
    fits = 0 <= _as_number(objective, name) <= 1
    _require(objective, name, fits, "a number from 0 to 1")


def check_flag(objective: Objective, name: str) -> None:
    """Check that a setting is a bool."""
    _require(objective, name, isinstance(_setting(objective, name), bool), "true or false")


def check_integer(objective: Objective, name: str, low: int) -> None:
    """Check that a setting is an int of at least ``low``."""
    value = _setting(objective, name)
    _require(objective, name, type(value) is int and value >= low, f"a whole number from {low} on")


def check_choice(objective: Objective, name: str, choices: Sequence[str]) -> None:
    """Check that a setting is one of ``choices``."""
    fits = _setting(objective, name) in choices
    _require(objective, name, fits, f"one of {', '.join(choices)}")


def _setting(objective: Objective, name: str) -> Any:
    """Return the value of the objective's field ``name``, which is a setting."""
    return asdict(objective)[name]


def _as_number(objective: Objective, name: str) -> float:
    """Return a setting as a float; NaN, which is in no range, if the setting is not a number."""
    value = _setting(objective, name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else math.nan


def _require(objective: Objective, name: str, is_allowed: bool, allowed: str) -> None:
    """Raise a ValueError about the setting ``name``, unless ``is_allowed``.

    ``allowed`` says which values are allowed, for the message.
    """
    if not is_allowed:
        raise ValueError(f"{name}: got {_setting(objective, name)!r}, wanted {allowed}")


# Loss and metrics of the rewards of a whole batch or data set.


def mean_loss(objective: Objective, rewards: Tensor, records: Records) -> float:
    """Compute the mean loss over ``records`` in float64; 0 if no record has a loss."""
    # float64 makes the logged loss independent of the order of the sum.
    total, count = objective.loss(rewards.double(), records)
    return float(total / count.clamp(min=1))


def measure_step(objective: Objective, rewards: Tensor, records: Records) -> dict[str, float]:
    """Compute the loss and the step metrics of one batch of rewards ``[S, A]``."""
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
    principles: Sequence[str] = (),
    spreads: Tensor | None = None,
) -> dict[str, float]:
    """Compute the loss and the report of a whole data set, of each source and each principle.

    The loss is that of ``Objective.for_measuring``.

    Args:
        rewards: ``[S, A]`` rewards of all records, each record once.
        reply_lengths: ``[S]`` integers, in tokens.
        sources: source of every record; "" for a record that names none.
        principles: principle of every record, "" for a record without; empty if they are unknown.
        spreads: ``[S, A]`` uncertainties of rewards that a model reported with them; None if it
            reports none, or if ``rewards`` are outputs of the head, from which the objective
            computes both.
    """
    objective = objective.for_measuring()

    def report(indices: Sequence[int]) -> dict[str, float]:
        rows, chosen = records.rows(indices), records.select(indices)
        metrics = {
            "loss": mean_loss(objective, rewards[rows], chosen),
            **objective.report(rewards[rows], chosen, reply_lengths[rows]),
        }
        if spreads is None:
            return metrics
        names, labels = objective.attributes, chosen.labels.targets(objective.attributes)
        rated = RatedRewards.of(rewards[rows], labels, names, spreads=spreads[rows])
        return {**metrics, **measure_spreads(rated)}

    def report_source(indices: Sequence[int]) -> dict[str, float]:
        metrics = report(indices).items()
        return {name: value for name, value in metrics if not name.startswith(POSITION)}

    return {
        **report(range(len(records))),
        **by_source(sources, report_source),
        **by_source(principles, report_source, BY_PRINCIPLE),
    }
