"""Objective: the interface of a loss, its settings' checks, and how its metrics are computed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from nemo_aligner.batch.packed import LabelColumns, Records
from nemo_aligner.config.common import RecordKind
from nemo_aligner.contract.readout import BINS, Readout
from nemo_aligner.metrics.ranking import PairRewards
from nemo_aligner.metrics.regression import RatedRewards
from nemo_aligner.metrics.table import by_source, measure_pairs, measure_ratings

# What an objective is, and what those on pairs and those on ratings have in common.


class Objective(Protocol):
    """A way to learn: its loss, the label columns that it reads, and its metrics.

    Rewards are ``[S, A]``, in the order of ``records``, which say who owns them and what people
    said. ``reply_lengths`` are ``[S]`` whole tokens. An objective may have a ``readout``, too:
    what it is given are then the head's ``[S, A * K]`` outputs, K of each attribute.

    Attributes:
        attributes: A names, of the columns of the rewards.
        record_kind: what it learns from.
        main_metric: the one by which checkpoints are compared when nobody says otherwise.
    """

    record_kind: ClassVar[RecordKind]
    main_metric: ClassVar[str]

    @property
    def attributes(self) -> tuple[str, ...]: ...

    @property
    def columns(self) -> tuple[str, ...]:
        """The label columns that the data must have."""
        ...

    @property
    def learns_from_ties(self) -> bool:
        """Whether comparisons whose completions are all tied are of use."""
        ...

    @property
    def lowest_label(self) -> float | None:
        """What no label of its columns may be below; None allows all."""
        ...

    def loss(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """The sum of the losses, and over how many: the mean is taken once, over everything."""
        ...

    def step_metrics(self, rewards: Tensor, records: Records) -> dict[str, float]:
        """What makes sense of one batch, beside the loss."""
        ...

    def report(self, rewards: Tensor, records: Records, reply_lengths: Tensor) -> dict[str, float]:
        """What makes sense of a whole data set, beside the loss."""
        ...


@dataclass(frozen=True)
class PairObjective:
    """Learns from pairs: one attribute; every metric of pairs."""

    attributes: tuple[str, ...] = ("reward",)
    record_kind: ClassVar[RecordKind] = RecordKind.comparison
    main_metric: ClassVar[str] = "accuracy"

    @property
    def columns(self) -> tuple[str, ...]:
        return ()

    @property
    def learns_from_ties(self) -> bool:
        return False

    @property
    def lowest_label(self) -> float | None:
        return None

    def step_metrics(self, rewards: Tensor, records: Records) -> dict[str, float]:
        found = measure_pairs(PairRewards.of(_first(rewards, records)), in_step=True)
        return {**found, **self.numbers_learned(rewards)}

    def report(self, rewards: Tensor, records: Records, reply_lengths: Tensor) -> dict[str, float]:
        lengths = torch.stack(records.pairs().of(reply_lengths), dim=1)
        found = measure_pairs(PairRewards.of(_first(rewards, records), lengths))
        return {**found, **self.numbers_learned(rewards)}

    def numbers_learned(self, rewards: Tensor) -> dict[str, float]:
        """By name what it learns beside the weights, of the head's outputs; most learn nothing."""
        return {}


@dataclass(frozen=True)
class RatingObjective:
    """Learns from rated replies: a label column and an attribute of each name."""

    attributes: tuple[str, ...]
    record_kind: ClassVar[RecordKind] = RecordKind.rating
    main_metric: ClassVar[str] = "pearson_mean"
    learns_from_ties: ClassVar[bool] = False
    lowest_label: ClassVar[float | None] = None
    # Whether it learns labels minus their means, which are added to rewards.
    centres_labels: ClassVar[bool] = True

    @property
    def columns(self) -> tuple[str, ...]:
        return self.attributes

    @property
    def readout(self) -> Readout | None:
        """How outputs become rewards; None where they are the rewards."""
        return None

    def errors(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """``[S, A]`` rewards minus their labels, 0 where there is no label; and where one is."""
        labels = records.labels.targets(self.attributes)
        present = ~torch.isnan(labels)
        errors = torch.where(present, records.as_single(rewards) - labels.nan_to_num(), 0.0)
        return errors, present

    def step_metrics(self, rewards: Tensor, records: Records) -> dict[str, float]:
        rated = self._rated(rewards, records, torch.zeros(len(rewards), dtype=torch.int64))
        return measure_ratings(rated, in_step=True)

    def report(self, rewards: Tensor, records: Records, reply_lengths: Tensor) -> dict[str, float]:
        return measure_ratings(self._rated(rewards, records, reply_lengths))

    def _rated(self, rewards: Tensor, records: Records, reply_lengths: Tensor) -> RatedRewards:
        outputs, labels = records.as_single(rewards), records.labels.targets(self.attributes)
        lengths = records.as_single(reply_lengths)
        spreads = spreads_of(self.readout, outputs)
        return RatedRewards.of(
            rewards_of(self.readout, outputs), labels, self.attributes, lengths, spreads
        )


def _first(rewards: Tensor, records: Records) -> Tensor:
    """``[P, 2]``: the first attribute of the better and the worse of every pair."""
    return torch.stack(records.pairs().of(rewards[:, 0]), dim=1)


def readout_of(objective: Objective) -> Readout | None:
    """How its head's outputs become rewards; objectives from outside may know of none."""
    return getattr(objective, "readout", None)


def start_of_learned(objective: Objective) -> tuple[float, ...]:
    """Where numbers begin that it learns beside the weights; its head gives them with each text."""
    return getattr(objective, "start_of_learned", ())


def count_outputs(objective: Objective) -> int:
    """How many outputs its head has; the last ones are numbers that the objective learns."""
    readout = readout_of(objective)
    of_texts = len(objective.attributes) * (1 if readout is None else readout.width)
    return of_texts + len(start_of_learned(objective))


def rewards_of(readout: Readout | None, outputs: Tensor) -> Tensor:
    """``[S, A]`` of a head's ``outputs``, without what labels were centred on."""
    return outputs if readout is None else torch.from_numpy(readout.rewards(_on_host(outputs)))


def spreads_of(readout: Readout | None, outputs: Tensor) -> Tensor | None:
    """``[S, A]``, how uncertain these rewards are; None where nothing says so."""
    return None if readout is None else torch.from_numpy(readout.spreads(_on_host(outputs)))


def fitted(objective: Objective, labels: LabelColumns, kept: Readout | None) -> Objective:
    """With what it takes from the training set's ``labels``; most objectives take nothing.

    ``kept`` is how the head is read that training starts from, if that has several outputs.

    Raises:
        ValueError: they do not say it.
    """
    fit = getattr(objective, "fitted", None)
    return objective if fit is None else fit(labels, kept)


def label_limits(objective: Objective, names: Sequence[str]) -> Tensor:
    """``[len(names), 2]`` float32: the lowest and the highest label that each column may have."""
    lowest, readout = objective.lowest_label, readout_of(objective)
    limits = dict.fromkeys(names, (-math.inf if lowest is None else lowest, math.inf))
    if readout is not None and readout.kind == BINS:
        ends = [(row[0], row[-1]) for row in readout.numbers]
        limits |= dict(zip(objective.attributes, ends, strict=True))
    return torch.tensor([limits[name] for name in names], dtype=torch.float32).view(-1, 2)


def _on_host(outputs: Tensor) -> np.ndarray:
    return outputs.detach().cpu().numpy()


# Settings of objectives that are not what they must be, in one sentence.


def check_number(objective: object, name: str, low: float, below: float = math.inf) -> None:
    """Refuse a setting that is no finite number from ``low`` on, and less than ``below``.

    Raises:
        ValueError: it says what was got, and what was wanted.
    """
    less = "" if below == math.inf else f" and less than {below:g}"
    fits = low <= _as_number(objective, name) < below
    _require(objective, name, fits, f"a number of {low:g} or more{less}")


def check_above(objective: object, name: str, low: float) -> None:
    """Refuse a setting that is no finite number above ``low``.

    Raises:
        ValueError: it says what was got, and what was wanted.
    """
    value = _as_number(objective, name)
    _require(objective, name, low < value < math.inf, f"a number above {low:g}")


def check_flag(objective: object, name: str) -> None:
    """Refuse a setting that is neither true nor false.

    Raises:
        ValueError: it says what was got, and what was wanted.
    """
    _require(objective, name, isinstance(getattr(objective, name), bool), "true or false")


def check_whole(objective: object, name: str, low: int) -> None:
    """Refuse a setting that is no whole number from ``low`` on.

    Raises:
        ValueError: it says what was got, and what was wanted.
    """
    value = getattr(objective, name)
    _require(objective, name, type(value) is int and value >= low, f"a whole number from {low} on")


def check_choice(objective: object, name: str, choices: Sequence[str]) -> None:
    """Refuse a setting that is none of ``choices``.

    Raises:
        ValueError: it says what was got, and what was wanted.
    """
    fits = getattr(objective, name) in choices
    _require(objective, name, fits, f"one of {', '.join(choices)}")


def _as_number(objective: object, name: str) -> float:
    """The setting, or NaN, which lies within no bounds, where it is no number."""
    value = getattr(objective, name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else math.nan


def _require(objective: object, name: str, fits: bool, wanted: str) -> None:
    if not fits:
        raise ValueError(f"{name}: got {getattr(objective, name)!r}, wanted {wanted}")


# What an objective says of rewards that are all there: its loss, its metrics, each by source.


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
