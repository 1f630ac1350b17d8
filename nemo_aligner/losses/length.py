"""Losses on pairs against length: Bradley-Terry with terms against it, and ODIN's two heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from nemo_aligner.batch.packed import Records
from nemo_aligner.losses.base import check_above, check_choice, check_flag, check_number
from nemo_aligner.losses.pairwise import BradleyTerry
from nemo_aligner.utils.host_transfer import to_device

REPLIES, PAIRS = "replies", "pairs"


@dataclass(frozen=True)
class LengthDebiased(BradleyTerry):
    """Bradley-Terry with terms against length; each is off by default.

    Lengths are tokens of the replies. Bradley-Terry's own settings hold, too.

    Attributes:
        longer_chosen_weight: weight of the loss of a pair whose longer reply was chosen; the others
            have 1. Where a share p of pairs chose the longer one, ``(1 - p) / p`` makes both kinds
            weigh the same (inverse propensity; Horvitz and Thompson 1952).
        length_bias: b in ``L(m + b * log(n_better / n_worse))``: what a reader who only sees
            lengths would add to the log-odds, so that the reward need not say it (a product of
            experts: Clark et al. 2019, "Don't take the easy way out"; for rewards Shen et al. 2023,
            "Loose lips sink ships"). It is no part of the reward.
        learned: start at ``length_bias`` and learn it.
        correlation_penalty: adds this times the square of Pearson's r of reward and length over
            the whole global batch (as in the loss of ODIN, Chen et al. 2024, arXiv:2402.07319).
        correlation_of: what r is over: ``replies``, all of them; ``pairs``, of margins and
            differences of length, without centring, as either reply may stand first.
    """

    longer_chosen_weight: float = 1.0
    length_bias: float = 0.0
    learned: bool = False
    correlation_penalty: float = 0.0
    correlation_of: str = REPLIES

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above(self, "longer_chosen_weight", 0)
        check_number(self, "length_bias", 0)
        check_flag(self, "learned")
        check_number(self, "correlation_penalty", 0)
        check_choice(self, "correlation_of", (REPLIES, PAIRS))

    @property
    def is_of_batch(self) -> bool:
        """True if r is needed, which is no sum over micro-batches."""
        return self.correlation_penalty > 0

    @property
    def start_of_learned(self) -> tuple[float, ...]:
        return (self.length_bias,) if self.learned else ()

    def numbers_learned(self, rewards: Tensor) -> dict[str, float]:
        if not self.learned or len(rewards) == 0:
            return {}
        return {"length_bias": float(rewards[0, 1])}

    def loss(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """Sum over records, and their count, of rewards ``[S, 1]``, and b ``[S, 2]`` if learned."""
        rewards, records = self._of_texts(rewards, records)
        pairs = records.pairs(with_ties=self.learns_from_ties)
        lengths = _lengths(rewards, records)
        better, worse = pairs.of(rewards[:, 0])
        longer, shorter = pairs.of(lengths)
        bias = pairs.of(rewards[:, 1])[0] if self.learned else self.length_bias
        explained = bias * (longer.clamp(min=1).log() - shorter.clamp(min=1).log())
        losses = self._losses(better, worse, pairs, records, explained)
        if self.longer_chosen_weight != 1:
            losses = torch.where(longer > shorter, self.longer_chosen_weight * losses, losses)
        total, count = pairs.sum_and_count(losses)
        if not self.is_of_batch:
            return total, count
        if self.correlation_of == PAIRS:
            r = _cosine(better - worse, longer - shorter)
        else:
            r = pearson(rewards[:, 0], lengths)
        return total + count * self.correlation_penalty * r.square(), count


@dataclass(frozen=True)
class Odin(BradleyTerry):
    """``L(m_Q + m_L) + length_coefficient * (|r_Q| - r_L) + orthogonality_coefficient * |cos|``.

    ODIN (Chen et al. 2024, "ODIN: Disentangled reward mitigates hacking in RLHF",
    arXiv:2402.07319, section 4): two heads, quality Q and length L, whose sum is ranked. r are
    Pearson's of each head and the replies' tokens over the whole global batch, and cos is that of
    the heads' weights, which the paper normalises in the model and here keep their norms. The
    quality head is the model's reward; the length head ends with the run.

    Attributes:
        length_coefficient, orthogonality_coefficient: 1 in the authors' training script.
    """

    length_coefficient: float = 1.0
    orthogonality_coefficient: float = 1.0

    auxiliary_heads: ClassVar[int] = 1
    is_of_batch: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "length_coefficient", 0)
        check_number(self, "orthogonality_coefficient", 0)

    def loss(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """Sum and count of outputs ``[S, 3]``: quality, length, and the cosine of their weights."""
        cosine = rewards[:, 2].abs().sum() / max(1, len(rewards))  # the same in every row
        rewards, records = self._of_texts(rewards, records)
        total, count = super().loss(rewards[:, :2].sum(dim=1, keepdim=True), records)
        lengths = _lengths(rewards, records)
        of_quality, of_length = (pearson(rewards[:, head], lengths) for head in (0, 1))
        term = self.length_coefficient * (of_quality.abs() - of_length)
        return total + count * (term + self.orthogonality_coefficient * cosine), count


def _lengths(rewards: Tensor, records: Records) -> Tensor:
    """Tokens ``[S]`` of the replies, as a number for each of the rewards and where these are."""
    if records.reply_lengths is None:
        raise ValueError("got records whose replies were not counted, wanted their lengths")
    return to_device(records.reply_lengths, rewards.device).to(rewards.dtype)


def pearson(first: Tensor, second: Tensor) -> Tensor:
    """Pearson's r of two ``[N]``; 0, without a gradient, if one of them is constant."""
    if first.numel() == 0:
        return first.sum()
    return _cosine(first - first.mean(), second - second.mean())


def _cosine(first: Tensor, second: Tensor) -> Tensor:
    squares = first.square().sum() * second.square().sum()
    # ``where`` twice: the gradient of the branch that is left out would be 0 times infinity.
    scale = torch.where(squares > 0, squares, 1.0).sqrt()
    return torch.where(squares > 0, (first * second).sum() / scale, 0.0)
