"""Objective: the interface of a loss, its base classes, settings checks and metrics."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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
    POSITION,
    by_source,
    measure_pairs,
    measure_ratings,
    measure_steps,
)

# The interface, and what objectives on pairs and on ratings share.


RIGHT_FROM = 0.5  # of labels and rewards from 0 to 1


@dataclass(frozen=True)
class Objective(ABC):
    """Base of all training objectives, with a default for every member but the abstract ones.

    A loss inherits from ``PairObjective`` or ``RatingObjective``, which add what those have in
    common, and overrides what differs, by a property, a class attribute or a field with a default.
    Its fields are settings.

    ``rewards`` are ``[S, A]``, in the order of ``records``, which hold their owners and labels. An
    objective with a ``readout`` gets K outputs for each attribute instead, and one that learns
    scalars also gets these: ``output_columns`` tells them apart.

    Attributes:
        attributes: A names, one for each reward of a sample.
        record_kind: kind of records it trains on.
        main_metric: metric that ranks checkpoints by default.
    """

    attributes: tuple[str, ...]
    record_kind: ClassVar[RecordKind]
    main_metric: ClassVar[str]

    @abstractmethod
    def loss(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """Sum of the losses and their count; the mean is taken once, over the global batch."""

    @abstractmethod
    def step_metrics(self, rewards: Tensor, records: Records) -> dict[str, float]:
        """Metrics of one batch, in addition to the loss."""

    @abstractmethod
    def report(self, rewards: Tensor, records: Records, reply_lengths: Tensor) -> dict[str, float]:
        """Metrics of a whole data set, in addition to the loss.

        ``reply_lengths`` are ``[S]`` integers, in tokens.
        """

    # Which records and labels it reads.

    @property
    def columns(self) -> tuple[str, ...]:
        """Label columns that the data must have."""
        return ()

    @property
    def learns_from_ties(self) -> bool:
        """True if comparisons whose completions are all tied contribute to the loss."""
        return False

    @property
    def takes_comparisons(self) -> bool:
        """True if an objective on ratings also learns from comparisons."""
        return False

    @property
    def lowest_label(self) -> float | None:
        """Least value allowed in its label columns; None allows all."""
        return None

    @property
    def highest_label(self) -> float | None:
        """Greatest value allowed in its label columns; None allows all."""
        return None

    @property
    def centres_labels(self) -> bool:
        """True if it trains on labels minus their means, which are added back to rewards."""
        return False

    def fit_to_labels(self, labels: LabelColumns, kept: Readout | None) -> Objective:
        """Return the objective fitted to the training set's ``labels``; most do not change.

        Args:
            kept: readout of the head that training starts from; None if it has one output for each
                attribute.

        Raises:
            ValueError: the labels do not determine it.
        """
        return self

    # How the head's outputs become rewards.

    @property
    def readout(self) -> Readout | None:
        """Conversion of outputs into rewards; None if outputs are rewards."""
        return None

    @property
    def aggregate(self) -> str | None:
        """Rule that makes one reward of those of a sample's turns or steps.

        None if it has none, and cannot learn from rewards of turns or steps.
        """
        return None

    @property
    def right_from(self) -> float:
        """Reward from which on a step counts as right, if steps are scored."""
        return RIGHT_FROM

    # What the loss needs in addition to rewards.

    @property
    def is_batch_level(self) -> bool:
        """True if its loss is not a sum over records but a function of all rewards of a batch."""
        return False

    @property
    def initial_scalars(self) -> tuple[float, ...]:
        """Initial values of L scalars it learns in addition to the weights."""
        return ()

    @property
    def output_columns(self) -> OutputColumns:
        """Columns of the head's outputs, which its methods take as ``rewards``."""
        width = 1 if self.readout is None else self.readout.width
        return OutputColumns(len(self.attributes), width, len(self.initial_scalars))

    def learned_scalars(self, rewards: Tensor) -> dict[str, float]:
        """Report the scalars it learns, by name; empty if there are none, or no rewards."""
        return {}


@dataclass(frozen=True)
class PairObjective(Objective):
    """Base of objectives on pairs, with one attribute and every metric of pairs."""

    attributes: tuple[str, ...] = ("reward",)
    record_kind: ClassVar[RecordKind] = RecordKind.comparison
    main_metric: ClassVar[str] = "accuracy"

    def step_metrics(self, rewards: Tensor, records: Records) -> dict[str, float]:
        found = measure_pairs(PairRewards.of(self._sides(rewards, records)), in_step=True)
        return {**found, **self.learned_scalars(rewards)}

    def report(self, rewards: Tensor, records: Records, reply_lengths: Tensor) -> dict[str, float]:
        lengths = torch.stack(records.pairs().of(reply_lengths), dim=1)
        found = measure_pairs(PairRewards.of(self._sides(rewards, records), lengths))
        return {**found, **self.learned_scalars(rewards)}

    def _sides(self, outputs: Tensor, records: Records) -> Tensor:
        """Reward of the better and the worse of every pair, ``[P, 2]``."""
        rewards = rewards_of(self.readout, self.output_columns.split(outputs).attributes)
        return torch.stack(records.pairs().of(rewards[:, 0]), dim=1)


@dataclass(frozen=True)
class RatingObjective(Objective):
    """Base of objectives on rated replies, with a label column for each attribute."""

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
        """Errors ``[S, A]``, reward minus label and 0 where a label is missing; and a mask."""
        labels = records.labels.targets(self.attributes)
        present = ~torch.isnan(labels)
        # ``where`` alone would not do: the gradient of the branch it leaves out is 0 times NaN.
        outputs = records.as_single(self.output_columns.split(rewards).attributes)
        errors = torch.where(present, outputs - labels.nan_to_num(), 0.0)
        return errors, present

    def step_metrics(self, rewards: Tensor, records: Records) -> dict[str, float]:
        rated = self._rated(rewards, records, torch.zeros(len(rewards), dtype=torch.int64))
        return {
            **measure_ratings(rated, in_step=True),
            **measure_steps(self._verdicts(rated, records), in_step=True),
            **self.learned_scalars(rewards),
        }

    def report(self, rewards: Tensor, records: Records, reply_lengths: Tensor) -> dict[str, float]:
        rated = self._rated(rewards, records, reply_lengths)
        return {
            **measure_ratings(rated),
            **measure_steps(self._verdicts(rated, records)),
            **self.learned_scalars(rewards),
        }

    def _verdicts(self, rated: RatedRewards, records: Records) -> StepVerdicts | None:
        if not records.labels.of_rewards:
            return None
        # Rounded to fp32 first, as the centred labels are: a label of 0 is then exactly 0 again.
        offsets = torch.tensor(records.labels.offsets(self.attributes)).double()
        rewards, labels = rated.rewards + offsets, rated.labels + offsets
        sizes = records.sizes.tolist()
        return StepVerdicts.of(rewards, labels, sizes, self.attributes, self.right_from)

    def _rated(self, rewards: Tensor, records: Records, reply_lengths: Tensor) -> RatedRewards:
        outputs = records.as_single(self.output_columns.split(rewards).attributes)
        labels = records.labels.targets(self.attributes)
        lengths = records.as_single(reply_lengths)
        spreads = spreads_of(self.readout, outputs)
        return RatedRewards.of(
            rewards_of(self.readout, outputs), labels, self.attributes, lengths, spreads
        )


def reward_gradient(objective: Objective, rewards: Tensor, records: Records) -> Tensor:
    """Gradient ``[S, outputs]`` of a global batch's mean loss by each reward, times its records.

    A step that multiplies each pack's rewards by their rows of it, and counts its records, has the
    gradient of the loss over the whole batch, whatever the packs are (the cached gradients of Gao
    et al. 2021, "Scaling deep contrastive learning batch size under memory limited setup").
    """
    leaf = rewards.double().requires_grad_()
    # In float64 on the host: every rank has all rewards, so no rank waits for another's part.
    total, count = objective.loss(leaf, records)
    (gradient,) = torch.autograd.grad(total, leaf)
    return (gradient * (len(records) / count.clamp(min=1))).float()


def losses_per_record(objective: Objective, records: Records) -> float:
    """How many losses the mean over a batch of ``records`` counts for each of them.

    It is 1 for most pairs, and the number of labels for ratings.
    """
    if objective.is_batch_level:
        return 1.0
    rewards = torch.zeros(records.num_rewards, objective.output_columns.count)
    _, count = objective.loss(rewards, records)
    return int(count) / len(records)


def rewards_of(readout: Readout | None, outputs: Tensor) -> Tensor:
    """Convert a head's ``outputs`` to rewards ``[S, A]``, without the means of centred labels."""
    return outputs if readout is None else torch.from_numpy(readout.rewards(_on_host(outputs)))


def spreads_of(readout: Readout | None, outputs: Tensor) -> Tensor | None:
    """Uncertainty ``[S, A]`` of the rewards; None if the outputs carry none."""
    return None if readout is None else torch.from_numpy(readout.spreads(_on_host(outputs)))


def label_limits(objective: Objective, names: Sequence[str]) -> Tensor:
    """Least and greatest label allowed in each column, ``[len(names), 2]`` float32."""
    # A label beyond the outer bins would silently be learned as the outer one.
    lowest, highest, readout = objective.lowest_label, objective.highest_label, objective.readout
    ends = -math.inf if lowest is None else lowest, math.inf if highest is None else highest
    limits = dict.fromkeys(names, ends)
    if readout is not None and readout.kind == BINS:
        bins = [(row[0], row[-1]) for row in readout.numbers]
        limits |= dict(zip(objective.attributes, bins, strict=True))
    return torch.tensor([limits[name] for name in names], dtype=torch.float32).view(-1, 2)


def _on_host(outputs: Tensor) -> np.ndarray:
    return outputs.detach().cpu().numpy()


# Checks of an objective's settings. A ValueError says what was got, and what was wanted.


def check_number(objective: Objective, name: str, low: float, below: float = math.inf) -> None:
    """Check that a setting is finite, at least ``low`` and less than ``below``."""
    less = "" if below == math.inf else f" and less than {below:g}"
    fits = low <= _as_number(objective, name) < below
    _require(objective, name, fits, f"a number of {low:g} or more{less}")


def check_above(objective: Objective, name: str, low: float) -> None:
    """Check that a setting is finite and greater than ``low``."""
    value = _as_number(objective, name)
    _require(objective, name, low < value < math.inf, f"a number above {low:g}")


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
    return asdict(objective)[name]


def _as_number(objective: Objective, name: str) -> float:
    """Return the setting, or NaN, which no range contains, if it is not a number."""
    value = _setting(objective, name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else math.nan


def _require(objective: Objective, name: str, fits: bool, wanted: str) -> None:
    if not fits:
        raise ValueError(f"{name}: got {_setting(objective, name)!r}, wanted {wanted}")


# Metrics of complete sets of rewards.


def mean_loss(objective: Objective, rewards: Tensor, records: Records) -> float:
    """Mean of the objective's loss over ``records``, in float64; 0 if none counts."""
    # In float64, so that the logged loss does not depend on the order of the sum.
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
) -> dict[str, float]:
    """Compute the loss and the report of a whole data set, and of each of its sources.

    Args:
        rewards: ``[S, A]``, every record once.
        reply_lengths: ``[S]`` integer.
        sources: of every record, "" if it names none.
    """

    def report(indices: Sequence[int]) -> dict[str, float]:
        rows, chosen = records.rows(indices), records.select(indices)
        return {
            "loss": mean_loss(objective, rewards[rows], chosen),
            **objective.report(rewards[rows], chosen, reply_lengths[rows]),
        }

    def of_source(indices: Sequence[int]) -> dict[str, float]:
        found = report(indices).items()
        return {name: value for name, value in found if not name.startswith(POSITION)}

    return {**report(range(len(records))), **by_source(sources, of_source)}
