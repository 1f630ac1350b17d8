"""Losses on pairs: Bradley-Terry and its variants, and models of ties (Davidson, Rao-Kupper)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_aligner.batch.packed import PairRows, Records
from nemo_aligner.losses.base import (
    PairObjective,
    check_above,
    check_choice,
    check_flag,
    check_number,
)
from nemo_aligner.utils.host_transfer import to_device

# Bradley-Terry: the better reply above the worse one, and the usual changes of that loss.

LABEL_MARGIN = "label_margin"
# What a label of a pair does, and what a missing one is, so that its loss is the plain one.
_MISSING = {"subtract": 0.0, "scale": 1.0}


@dataclass(frozen=True)
class BradleyTerry(PairObjective):
    """``-log sigmoid(m)`` of the margin m, the better reward minus the worse one.

    Eq. 1 of Ouyang et al. 2022, "Training language models to follow instructions with human
    feedback". Each setting changes the loss ``L(m)`` of a pair by itself, in this order:

    Attributes:
        label_margin: ``subtract`` makes it ``-log sigmoid(m - d)`` with the label d of the column
            ``label_margin`` (Touvron et al. 2023, "Llama 2", eq. 2), ``scale`` ``d * -log
            sigmoid(m)`` (Wang et al. 2024, "HelpSteer2-Preference"). A pair whose label is
            missing has the plain loss.
        focal_gamma: times ``(1 - 2 * max(0, p - 1/2)) ** focal_gamma``, p the sigmoid in L: pairs
            that are well in order count less (Cai et al. 2024, "InternLM2 Technical Report", with
            2, after Lin et al. 2017, "Focal loss").
        label_smoothing: ``(1 - e) * L(m) + e * L(-m)``: so many labels are the wrong way round
            (Mitchell 2023, "A note on DPO with noisy preferences & relationship to IPO").
        ties: with ``half`` tied completions are a pair, too, half of it won by either:
            ``(L(m) + L(-m)) / 2``; with ``drop`` nothing is learned from them.
        center_rewards_coefficient: adds so many times ``(better + worse) ** 2``, which keeps
            rewards around 0 (Eisenstein et al. 2023, "Helping or herding?", as TRL has it).
    """

    label_smoothing: float = 0.0
    center_rewards_coefficient: float = 0.0
    focal_gamma: float = 0.0
    label_margin: str = "none"
    ties: str = "drop"

    def __post_init__(self) -> None:
        check_number(self, "label_smoothing", 0, 0.5)
        check_number(self, "center_rewards_coefficient", 0)
        check_number(self, "focal_gamma", 0)
        check_choice(self, "label_margin", ("none", *_MISSING))
        check_choice(self, "ties", ("drop", "half"))

    @property
    def columns(self) -> tuple[str, ...]:
        return () if self.label_margin == "none" else (LABEL_MARGIN,)

    @property
    def learns_from_ties(self) -> bool:
        return self.ties == "half"

    @property
    def lowest_label(self) -> float | None:
        return 0.0 if self.label_margin == "scale" else None

    def loss(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """The sum over records of their pairs' mean, and their number, of rewards ``[S, 1]``."""
        pairs = records.pairs(with_ties=self.learns_from_ties)
        better, worse = pairs.of(rewards[:, 0])
        labels = self._labels(pairs, records)
        losses = self._ordered(worse - better, labels)
        share = self._share_reversed(pairs, losses)
        if share is not None:
            losses = (1 - share) * losses + share * self._ordered(better - worse, labels)
        if self.center_rewards_coefficient:
            losses = losses + self.center_rewards_coefficient * (better + worse).square()
        return pairs.sum_and_count(losses)

    def _labels(self, pairs: PairRows, records: Records) -> Tensor | None:
        """``[P]`` label of every pair's record; None where none counts."""
        if self.label_margin == "none":
            return None
        labels = records.labels.targets(self.columns)[:, 0]
        return pairs.of_records(labels.nan_to_num(_MISSING[self.label_margin]))

    def _ordered(self, behind: Tensor, labels: Tensor | None) -> Tensor:
        """``[P]`` losses of pairs whose first is behind the second by so much, and better."""
        if labels is not None and self.label_margin == "subtract":
            behind = behind + labels
        losses = F.softplus(behind)
        if self.focal_gamma:
            losses = losses * _focus(behind, self.focal_gamma)
        if labels is not None and self.label_margin == "scale":
            losses = losses * labels
        return losses

    def _share_reversed(self, pairs: PairRows, losses: Tensor) -> Tensor | float | None:
        """How much of each pair counts the other way round; None is nothing of any."""
        if pairs.are_ties is None:
            return self.label_smoothing or None
        shares = torch.full(pairs.are_ties.shape, self.label_smoothing, dtype=losses.dtype)
        return to_device(shares.masked_fill(pairs.are_ties, 0.5), losses.device)


def _focus(behind: Tensor, gamma: float) -> Tensor:
    """``(1 - 2 * max(0, sigmoid(-behind) - 1/2)) ** gamma``, by its logarithm.

    The power of what has become 0 would have no gradient.
    """
    return torch.exp(gamma * (F.logsigmoid(behind) + math.log(2)).clamp(max=0))


# What models of pairs that may be tied have in common.
#
# Their parameter says how often equals are tied. It is fixed, or learned with the model (as Rao and
# Kupper, and Davidson, estimate it): the head then has one more output, the same number x for every
# text, of which the parameter is made.

Number: TypeAlias = float | Tensor


class TieModel(Protocol):
    """``-log`` of the probabilities that a pair is won, and that it is tied."""

    @property
    def learned(self) -> bool:
        """Whether the parameter is made of an x."""
        ...

    def parameter(self, x: float) -> float:
        """The parameter that any x makes."""
        ...

    def won(self, margins: Tensor, x: Tensor | None) -> Tensor:
        """``[P]`` losses of pairs that were won, by the better rewards minus the worse."""
        ...

    def tied(self, margins: Tensor, x: Tensor | None) -> Tensor:
        """``[P]`` losses of pairs that were tied."""
        ...


def won_or_tied(model: TieModel, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
    """The sum over records of their pairs' mean loss, and their number.

    Of rewards ``[S, 1]``, or ``[S, 2]`` with x where it is learned.
    """
    pairs = records.pairs(with_ties=True)
    better, worse = pairs.of(rewards[:, 0])
    x = pairs.of(rewards[:, 1])[0] if model.learned else None
    losses = model.won(better - worse, x)
    if pairs.are_ties is not None:
        are_ties = to_device(pairs.are_ties, losses.device)
        losses = torch.where(are_ties, model.tied(better - worse, x), losses)
    return pairs.sum_and_count(losses)


def tie_parameter_of(model: TieModel, rewards: Tensor) -> dict[str, float]:
    """The parameter by its name, of rewards with x; nothing where it is fixed."""
    if not model.learned or len(rewards) == 0:
        return {}
    return {"tie_parameter": model.parameter(float(rewards[0, 1]))}


# Davidson: a tie is as likely as the mean of a win and a loss says.


@dataclass(frozen=True)
class Davidson(PairObjective):
    """Of a margin m: won, lost and tied as ``exp(m / 2)``, ``exp(-m / 2)`` and ``tie_parameter``.

    A tie is as likely as the geometric mean of a win and a loss, times the parameter (Davidson
    1970, "On extending the Bradley-Terry model to accommodate ties in paired comparison
    experiments", who calls it nu).

    Attributes:
        tie_parameter: above 0; replies of equal rewards are tied with the probability
            ``tie_parameter / (tie_parameter + 2)``.
        learned: ``tie_parameter`` is only where it begins; it is ``exp(x)`` of a learned x.
    """

    tie_parameter: float = 1.0
    learned: bool = False

    def __post_init__(self) -> None:
        check_flag(self, "learned")
        check_above(self, "tie_parameter", 0)

    @property
    def learns_from_ties(self) -> bool:
        return True

    @property
    def start_of_learned(self) -> tuple[float, ...]:
        return (math.log(self.tie_parameter),) if self.learned else ()

    def loss(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """As ``won_or_tied``, of rewards ``[S, 1]``, or ``[S, 2]`` with x where it is learned."""
        return won_or_tied(self, rewards, records)

    def numbers_learned(self, rewards: Tensor) -> dict[str, float]:
        return tie_parameter_of(self, rewards)

    def parameter(self, x: float) -> float:
        return math.exp(x)

    def won(self, margins: Tensor, x: Tensor | None) -> Tensor:
        return self._total(margins, x) - margins / 2

    def tied(self, margins: Tensor, x: Tensor | None) -> Tensor:
        return self._total(margins, x) - (math.log(self.tie_parameter) if x is None else x)

    def _total(self, margins: Tensor, x: Tensor | None) -> Tensor:
        """``[P]`` logarithms of what the three sum up to."""
        tie = torch.full_like(margins, math.log(self.tie_parameter)) if x is None else x
        return torch.stack([margins / 2, -margins / 2, tie]).logsumexp(dim=0)


# Rao-Kupper: who is nearly equal is tied.

_LOG_2 = math.log(2)


@dataclass(frozen=True)
class RaoKupper(PairObjective):
    """Of a margin m: won with ``sigmoid(m - h)``, lost with ``sigmoid(-m - h)``, else tied.

    h is ``log(tie_parameter)``: a difference below it is not seen (Rao and Kupper 1967, "Ties in
    paired-comparison experiments: a generalization of the Bradley-Terry model").

    Attributes:
        tie_parameter: above 1; replies of equal rewards are tied with the probability
            ``(tie_parameter - 1) / (tie_parameter + 1)``.
        learned: ``tie_parameter`` is only where it begins; it is ``1 + exp(x)`` of a learned x.
    """

    tie_parameter: float = 2.0
    learned: bool = False

    def __post_init__(self) -> None:
        check_flag(self, "learned")
        check_above(self, "tie_parameter", 1)

    @property
    def learns_from_ties(self) -> bool:
        return True

    @property
    def start_of_learned(self) -> tuple[float, ...]:
        return (math.log(self.tie_parameter - 1),) if self.learned else ()

    def loss(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """As ``won_or_tied``, of rewards ``[S, 1]``, or ``[S, 2]`` with x where it is learned."""
        return won_or_tied(self, rewards, records)

    def numbers_learned(self, rewards: Tensor) -> dict[str, float]:
        return tie_parameter_of(self, rewards)

    def parameter(self, x: float) -> float:
        return 1 + math.exp(x)

    def won(self, margins: Tensor, x: Tensor | None) -> Tensor:
        height: Number = math.log(self.tie_parameter) if x is None else F.softplus(x)
        return F.softplus(height - margins)

    def tied(self, margins: Tensor, x: Tensor | None) -> Tensor:
        # The rest of the two others is their product times a constant, t ** 2 - 1.
        rest: Number = math.log(self.tie_parameter**2 - 1)
        if x is not None:
            # (t - 1) * (t + 1) with t = 1 + exp(x).
            rest = x + F.softplus(x - _LOG_2) + _LOG_2
        return self.won(margins, x) + self.won(-margins, x) - rest
