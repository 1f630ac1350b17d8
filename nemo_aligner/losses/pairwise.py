"""Losses on comparisons: Bradley-Terry and its variants, models of ties, and Plackett-Luce.

S is the number of rewards, P the number of pairs and R the number of records. ``length.py`` has the
terms that depend on reply lengths.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_aligner.batch.outputs import HeadOutputs
from nemo_aligner.batch.packed import Records
from nemo_aligner.batch.pairs import PairRows
from nemo_aligner.config.common import Aggregate
from nemo_aligner.losses.base import (
    Objective,
    PairObjective,
    check_above,
    check_choice,
    check_flag,
    check_number,
)
from nemo_aligner.losses.length import (
    PAIRS,
    REPLIES,
    explained_by_length,
    length_correlation,
    reply_lengths,
    weigh_longer_chosen,
)
from nemo_aligner.losses.soft_labels import SoftLabels
from nemo_aligner.utils.host_transfer import to_device

# Bradley-Terry; its variants are settings of one class.

LABEL_MARGIN = "label_margin"
# Two values of the setting ``label_margin``, each with the label that leaves a pair's loss
# unchanged. A pair without a label gets this label.
_NEUTRAL_LABELS = {"subtract": 0.0, "scale": 1.0}
AGGREGATES = tuple(rule.value for rule in Aggregate)


@dataclass(frozen=True)
class BradleyTerry(SoftLabels, PairObjective):
    """``-log sigmoid(m)`` of the margin m, which is the better reward minus the worse one.

    This is eq. 1 of Ouyang et al. 2022, "Training language models to follow instructions with human
    feedback". First ``aggregate`` determines the rewards, and ``length_bias`` is added to the
    margin. Then the other settings change a pair's loss ``L(m)``, in the order of this list:

    Attributes:
        label_margin: ``subtract`` makes the loss ``-log sigmoid(m - d)`` with the label d of the
            column ``label_margin`` (Touvron et al. 2023, "Llama 2", eq. 2); ``scale`` makes it
            ``-d * log sigmoid(m)`` (Wang et al. 2024, "HelpSteer2-Preference"). A pair without a
            label has the plain loss.
        focal_gamma: multiplies the loss by ``(1 - 2 * max(0, p - 1/2)) ** focal_gamma``, where p is
            the sigmoid in ``L(m)``. This discounts pairs that are ordered well (Cai et al. 2024,
            "InternLM2 Technical Report", with 2; after Lin et al. 2017, "Focal loss").
        label_smoothing: e, which makes the loss ``(1 - e) * L(m) + e * L(-m)``, as if a fraction e
            of the labels were swapped (Mitchell 2023, "A note on DPO with noisy preferences &
            relationship to IPO").
        ties: ``half`` trains on tied completions with ``(L(m) + L(-m)) / 2``; ``drop`` ignores
            them.
        soft_label_weight: w, which makes the loss ``p * L(m) + (1 - p) * L(-m)`` for records with a
            teacher's rewards t, where p is ``(1 - w) * h + w * sigmoid((t_better - t_worse) / T)``.
            h is the hard label, that is 1, ``1 - label_smoothing`` or, for a tie, 1/2. The base
            class explains this, and the temperature T.
        center_rewards_coefficient: factor of ``(better + worse) ** 2``, which is added to the loss
            to keep rewards around 0 (Eisenstein et al. 2023, "Helping or herding?", as in TRL).
        aggregate: how the rewards of a sample's turns or steps become its reward: by ``last``,
            ``min``, ``mean`` or ``product`` (see the function ``aggregate``). The model's scoring
            contract has the same rule.
        longer_chosen_weight: weight of a pair whose longer reply was chosen; other pairs and ties
            have 1. If people chose the longer reply in a fraction p of the pairs, ``(1 - p) / p``
            gives both kinds the same total weight (inverse propensity; Horvitz and Thompson 1952).
        length_bias: b, which makes the loss ``L(m + b * log(n_better / n_worse))`` with the tokens
            n of the replies. The added term explains what lengths predict, so that the reward need
            not (a product of experts: Clark et al. 2019, "Don't take the easy way out"; for rewards
            Shen et al. 2023, "Loose lips sink ships"). It is not part of the reward.
        learn_length_bias: learn b, starting at ``length_bias``.
        length_correlation_penalty: factor of the square of Pearson's r between reward and length
            over the whole global batch, which is added to the loss (as in ODIN, Chen et al. 2024,
            arXiv:2402.07319).
        length_correlation_of: whether r is computed over ``replies`` or over ``pairs`` (see the
            function ``length_correlation``).
    """

    label_smoothing: float = 0.0
    center_rewards_coefficient: float = 0.0
    focal_gamma: float = 0.0
    label_margin: str = "none"
    ties: str = "drop"
    aggregate: str = "last"
    longer_chosen_weight: float = 1.0
    length_bias: float = 0.0
    learn_length_bias: bool = False
    length_correlation_penalty: float = 0.0
    length_correlation_of: str = REPLIES

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above(self, "longer_chosen_weight", 0)
        check_number(self, "length_bias", 0)
        check_flag(self, "learn_length_bias")
        check_number(self, "length_correlation_penalty", 0)
        check_choice(self, "length_correlation_of", (REPLIES, PAIRS))
        check_choice(self, "aggregate", AGGREGATES)
        check_number(self, "label_smoothing", 0, 0.5)
        check_number(self, "center_rewards_coefficient", 0)
        check_number(self, "focal_gamma", 0)
        check_choice(self, "label_margin", ("none", *_NEUTRAL_LABELS))
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
        """Return the sum over records of the mean loss of their pairs, and the number of records.

        ``rewards`` are ``[S, 1]``, or ``[S, 2]`` if the length bias is learned, as the second
        column.
        """
        outputs = self._merge_steps(self.output_columns.split(rewards), records)
        rewards = outputs.attributes[:, 0]
        # K ranked completions give K (K - 1) / 2 pairs, which together weigh as much as one record
        # (eq. 1 of Ouyang et al. 2022).
        pairs = records.pairs(with_ties=self.learns_from_ties)
        better, worse = pairs.of(rewards)
        margins = better - worse
        if self._reads_lengths:
            lengths = reply_lengths(rewards, records)
            bias: Tensor | float = self.length_bias
            if self.learn_length_bias:
                bias = pairs.of(outputs.learned[:, 0])[0]
            margins = margins + explained_by_length(bias, lengths, pairs)
        labels = self._pair_labels(pairs, records)
        losses = self._pair_losses(-margins, labels)
        share = self._reversed_share(pairs, losses)
        soft_share = self.mix_reversed_share(
            0.0 if share is None else share, pairs, records, losses
        )
        share = share if soft_share is None else soft_share
        if share is not None:
            losses = (1 - share) * losses + share * self._pair_losses(margins, labels)
        if self.center_rewards_coefficient:
            losses = losses + self.center_rewards_coefficient * (better + worse).square()
        if not self._reads_lengths:
            return pairs.sum_and_count(losses)
        losses = weigh_longer_chosen(losses, self.longer_chosen_weight, lengths, pairs)
        total, count = pairs.sum_and_count(losses)
        r = length_correlation(rewards, lengths, pairs, self.length_correlation_of)
        return total + count * self.length_correlation_penalty * r.square(), count

    @property
    def _reads_lengths(self) -> bool:
        """True if a setting makes the loss depend on reply lengths."""
        has_bias = self.length_bias > 0 or self.learn_length_bias
        return has_bias or self.longer_chosen_weight != 1 or self.is_batch_level

    @property
    def is_batch_level(self) -> bool:
        """True if the loss has a length correlation, which is not a sum over micro-batches."""
        return self.length_correlation_penalty > 0

    @property
    def initial_scalars(self) -> tuple[float, ...]:
        return (self.length_bias,) if self.learn_length_bias else ()

    def learned_scalars(self, rewards: Tensor) -> dict[str, float]:
        if not self.learn_length_bias or len(rewards) == 0:
            return {}
        return {"length_bias": float(self.output_columns.split(rewards).learned[0, 0])}

    def report(self, rewards: Tensor, records: Records, reply_lengths: Tensor) -> dict[str, float]:
        lengths = reply_lengths[records.reward_bounds[1:] - 1]
        return super().report(rewards, records, lengths)

    def _sample_rewards(self, outputs: Tensor, records: Records) -> Tensor:
        """Merge the rewards of turns or steps into one for each sample, ``[Q]``, for metrics.

        The merge is in float64 and the result is rounded once, as evaluation and a server do, so
        that their metrics agree with those of training.
        """
        merged = self._merge_steps(self.output_columns.split(outputs.double()), records)
        return merged.attributes[:, 0].to(outputs.dtype)

    def _merge_steps(self, outputs: HeadOutputs, records: Records) -> HeadOutputs:
        """Merge the outputs ``[S, ...]`` of turns or steps into one row per sample, ``[Q, ...]``.

        The label mean is added first, because a product of steps depends on the level of rewards.
        Learned scalars are the same in every row, so the row of the last step is taken.
        """
        (offset,), last = records.labels.offsets(self.attributes), Aggregate.last.value
        rule = self.aggregate if self.has_steps else last
        return HeadOutputs(
            aggregate(outputs.attributes + offset, records, rule),
            aggregate(outputs.learned, records, last),
        )

    def _pair_labels(self, pairs: PairRows, records: Records) -> Tensor | None:
        """Return the label ``[P]`` of each pair, which is that of its record.

        A missing label becomes the label that leaves the loss unchanged. None if the setting
        ``label_margin`` is ``none``.
        """
        if self.label_margin == "none":
            return None
        labels = records.labels.targets(self.columns)[:, 0]
        return pairs.of_records(labels.nan_to_num(_NEUTRAL_LABELS[self.label_margin]))

    def _pair_losses(self, negative_margins: Tensor, labels: Tensor | None) -> Tensor:
        """Compute the losses ``[P]`` of pairs from their margins, before label smoothing.

        The settings ``label_margin`` and ``focal_gamma`` are applied here.

        Args:
            negative_margins: ``[P]`` reward of the worse reply minus that of the better one.
            labels: ``[P]`` values of the column ``label_margin``; None if it is not used.
        """
        if labels is not None and self.label_margin == "subtract":
            negative_margins = negative_margins + labels
        # The loss is -log sigmoid(m) = softplus(-m); exp would overflow at large margins.
        losses = F.softplus(negative_margins)
        if self.focal_gamma:
            losses = losses * _focal_factor(negative_margins, self.focal_gamma)
        if labels is not None and self.label_margin == "scale":
            losses = losses * labels
        return losses

    def _reversed_share(self, pairs: PairRows, losses: Tensor) -> Tensor | float | None:
        """Return the weight of the reversed loss ``L(-m)`` in each pair's loss.

        The weight is 1/2 for tied pairs and ``label_smoothing`` for other pairs: ``[P]`` if some
        pairs are tied, one number if none is, None if that number is 0.
        """
        if pairs.are_ties is None:
            return self.label_smoothing or None
        shares = torch.full(pairs.are_ties.shape, self.label_smoothing, dtype=losses.dtype)
        return to_device(shares.masked_fill(pairs.are_ties, 0.5), losses.device)


def _focal_factor(negative_margins: Tensor, gamma: float) -> Tensor:
    """Compute ``(1 - 2 * max(0, p - 1/2)) ** gamma`` with ``p = sigmoid(-negative_margins)``.

    The factor is computed from its logarithm, because a power would have no gradient where its base
    underflows to 0.
    """
    # 1 - 2 (p - 1/2) = 2 (1 - p), and 1 - p = sigmoid(negative_margins). For p below 1/2 the
    # logarithm is above 0, and the clamp makes the factor 1.
    return torch.exp(gamma * (F.logsigmoid(negative_margins) + math.log(2)).clamp(max=0))


# Rules that merge the rewards of a sample's turns or steps into one reward.


def aggregate(rewards: Tensor, records: Records, rule: str) -> Tensor:
    """Merge the rewards ``[S, A]`` of turns or steps into one reward per sample, ``[Q, A]``.

    ``rule`` is ``last``, ``min`` or ``mean`` of the rewards r, or ``product``, which is
    ``sum log sigmoid(r)``: the logarithm of the product of the steps' probabilities. Lightman et
    al. 2023, "Let's Verify Step by Step", section 2.5, compare product and minimum.
    """
    bounds = records.reward_bounds
    if records.num_samples == len(rewards) and rule != "product":
        return rewards
    if rule == "last":
        return rewards[to_device(bounds[1:] - 1, rewards.device)]
    # Merge sample by sample: in a segmented sum, the rounding of a sample's result would depend on
    # the other samples in the batch.
    parts = rewards.split(bounds.diff().tolist())
    if rule == "min":
        merged = [part.amin(dim=0, keepdim=True) for part in parts]
    elif rule == "mean":
        merged = [part.mean(dim=0, keepdim=True) for part in parts]
    else:
        merged = [F.logsigmoid(part).sum(dim=0, keepdim=True) for part in parts]
    return torch.cat([rewards[:0], *merged])


# Losses with a tie as a third outcome: Davidson, and Rao and Kupper.

Number: TypeAlias = float | Tensor


@dataclass(frozen=True)
class TieModel(Objective):
    """Mixin of losses with ties as a third outcome, next to the base class ``PairObjective``.

    The tie parameter says how often replies with equal rewards are tied. It is fixed, or learned
    with the model, as in the papers of Rao and Kupper and of Davidson. If it is learned, the head
    has one more output, a scalar x that is the same for every sample, and the tie parameter is
    ``lowest_parameter + exp(x)``.

    Attributes:
        tie_parameter: value of the tie parameter, above ``lowest_parameter``; if ``learned``, the
            value to start from.
        learned: learn the tie parameter, through the scalar x.
        lowest_parameter: value with which replies with equal rewards are never tied.
    """

    attributes: tuple[str, ...] = ("reward",)
    tie_parameter: float = 1.0
    learned: bool = False
    lowest_parameter: ClassVar[float] = 0.0

    def __post_init__(self) -> None:
        check_flag(self, "learned")
        check_above(self, "tie_parameter", self.lowest_parameter)

    @property
    def learns_from_ties(self) -> bool:
        return True

    @property
    def initial_scalars(self) -> tuple[float, ...]:
        return (math.log(self.tie_parameter - self.lowest_parameter),) if self.learned else ()

    def loss(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """Return the sum over records of the mean loss of their pairs, and the number of records.

        ``rewards`` are ``[S, 1]``, or ``[S, 2]`` if the tie parameter is learned, with x as the
        second column.
        """
        outputs = self.output_columns.split(rewards)
        pairs = records.pairs(with_ties=True)
        better, worse = pairs.of(outputs.attributes[:, 0])
        x = pairs.of(outputs.learned[:, 0])[0] if self.learned else None
        losses = self.win_losses(better - worse, x)
        if pairs.are_ties is not None:
            are_ties = to_device(pairs.are_ties, losses.device)
            losses = torch.where(are_ties, self.tie_losses(better - worse, x), losses)
        return pairs.sum_and_count(losses)

    def learned_scalars(self, rewards: Tensor) -> dict[str, float]:
        if not self.learned or len(rewards) == 0:
            return {}
        x = float(self.output_columns.split(rewards).learned[0, 0])
        return {"tie_parameter": self.lowest_parameter + math.exp(x)}

    @abstractmethod
    def win_losses(self, margins: Tensor, x: Tensor | None) -> Tensor:
        """Compute the loss ``[P]`` of pairs with a winner: ``-log P(the better reply wins)``.

        Args:
            margins: ``[P]`` rewards of the better replies minus those of the worse ones.
            x: ``[P]``, the learned scalar, repeated for each pair; None if the tie parameter is
                fixed.
        """

    @abstractmethod
    def tie_losses(self, margins: Tensor, x: Tensor | None) -> Tensor:
        """Compute the loss ``[P]`` of tied pairs: ``-log P(tie)``.

        ``margins [P]`` and the learned scalar ``x [P]`` are those of ``win_losses``.
        """


@dataclass(frozen=True)
class Davidson(TieModel, PairObjective):
    """Wins, losses and ties in proportion to ``exp(m / 2)``, ``exp(-m / 2)`` and ``tie_parameter``.

    m is the margin. The probability of a tie is the geometric mean of those of a win and a loss,
    times the tie parameter (Davidson 1970, "On extending the Bradley-Terry model to accommodate
    ties in paired comparison experiments", which calls the parameter nu).

    Attributes:
        tie_parameter: above 0; replies with equal rewards are tied with probability
            ``tie_parameter / (tie_parameter + 2)``.
        learned: start at ``tie_parameter`` and learn x with ``tie_parameter = exp(x)``.
    """

    def win_losses(self, margins: Tensor, x: Tensor | None) -> Tensor:
        return self._log_normalizer(margins, x) - margins / 2

    def tie_losses(self, margins: Tensor, x: Tensor | None) -> Tensor:
        log_parameter = math.log(self.tie_parameter) if x is None else x
        return self._log_normalizer(margins, x) - log_parameter

    def _log_normalizer(self, margins: Tensor, x: Tensor | None) -> Tensor:
        """Return the log of the sum that turns the weights of the outcomes into probabilities.

        The weights are ``exp(m / 2)`` for a win, ``exp(-m / 2)`` for a loss, and the tie parameter
        t for a tie. The result is ``log(exp(m / 2) + exp(-m / 2) + t)``, ``[P]``.
        """
        # A learned x is log t, so t stays above 0.
        tie = torch.full_like(margins, math.log(self.tie_parameter)) if x is None else x
        return torch.stack([margins / 2, -margins / 2, tie]).logsumexp(dim=0)


_LOG_2 = math.log(2)


@dataclass(frozen=True)
class RaoKupper(TieModel, PairObjective):
    """Wins have probability ``sigmoid(m - h)``, losses ``sigmoid(-m - h)``; the rest are ties.

    m is the margin, and h is ``log(tie_parameter)``, a threshold below which differences go
    unnoticed (Rao and Kupper 1967, "Ties in paired-comparison experiments: a generalization of the
    Bradley-Terry model").

    Attributes:
        tie_parameter: above 1; replies with equal rewards are tied with probability
            ``(tie_parameter - 1) / (tie_parameter + 1)``.
        learned: start at ``tie_parameter`` and learn x with ``tie_parameter = 1 + exp(x)``.
    """

    tie_parameter: float = 2.0
    lowest_parameter: ClassVar[float] = 1.0

    def win_losses(self, margins: Tensor, x: Tensor | None) -> Tensor:
        # The threshold h is log t, which is log(1 + exp(x)) = softplus(x) if x is learned.
        threshold: Number = math.log(self.tie_parameter) if x is None else F.softplus(x)
        return F.softplus(threshold - margins)

    def tie_losses(self, margins: Tensor, x: Tensor | None) -> Tensor:
        # P(tie) = 1 - P(win) - P(loss) = (t ** 2 - 1) * P(win) * P(loss).
        log_factor: Number = math.log(self.tie_parameter**2 - 1)
        if x is not None:
            # t ** 2 - 1 = (t - 1) * (t + 1) with t = 1 + exp(x).
            log_factor = x + F.softplus(x - _LOG_2) + _LOG_2
        return self.win_losses(margins, x) + self.win_losses(-margins, x) - log_factor


# The loss on rankings of more than two completions: Plackett-Luce.


@dataclass(frozen=True)
class PlackettLuce(SoftLabels, PairObjective):
    """Negative log-likelihood of choosing the completions one after the other in their order.

    The softmax of the rewards of the remaining completions gives the probability of each choice
    (Luce 1959, "Individual choice behavior"; Plackett 1975, "The analysis of permutations"; as a
    loss: Xia et al. 2008, "Listwise approach to learning to rank", ListMLE). With two completions
    it is Bradley-Terry.

    Tied completions are not compared: a completion competes only with those ranked below it. So a
    record with one best completion, whose other completions are tied, gives a single softmax.

    A record with a teacher's rewards t has the loss ``(1 - w) * L + w * C`` with this loss L, the
    setting w = ``soft_label_weight``, and the cross-entropy C of all its completions against
    ``softmax(t / soft_label_temperature)`` (``SoftLabels.softmax_losses``).
    """

    def loss(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """Return the sum of the records' losses, and the number of records that are not all tied.

        ``rewards`` are ``[S, 1]``.
        """
        rows, is_candidate, num_ordered = _choice_candidates(records)
        rewards = rewards[:, 0]
        # Row s is the loss of choosing completion s: the logarithm of the softmax's denominator
        # over the remaining completions, minus the reward of completion s. The last completion of a
        # record is the only candidate left, which gives a loss of 0.
        candidates = rewards[to_device(rows, rewards.device)]
        candidates = candidates.masked_fill(~to_device(is_candidate, rewards.device), -torch.inf)
        losses = candidates.logsumexp(dim=1) - rewards
        soft = self.softmax_losses(rewards, records)
        if soft is not None:
            losses = self._mix(losses, *soft, records)
        # Create the count on the device, because copying it from the host would synchronise.
        count = torch.full((), num_ordered, dtype=torch.int64, device=rewards.device)
        return losses.sum(), count

    def _mix(
        self, losses: Tensor, soft_losses: Tensor, is_soft: Tensor, records: Records
    ) -> Tensor:
        """Mix the soft losses ``[R]`` into the losses of all choices, ``[Q]``.

        The result has the losses of all records in its sum: ``[Q + R]``. Records whose completions
        are all tied have no loss, with or without soft labels.
        """
        sizes = records.sample_bounds.diff()
        owners = torch.arange(len(sizes)).repeat_interleave(sizes)
        first = records.ranks[records.sample_bounds[:-1]].repeat_interleave(sizes)
        is_ordered = torch.zeros(len(sizes), dtype=torch.bool)
        is_ordered[owners[records.ranks != first]] = True
        weight = self.soft_label_weight * is_soft.to(losses.dtype)
        hard = losses * (1 - weight)[to_device(owners, losses.device)]
        return torch.cat([hard, soft_losses * weight * to_device(is_ordered, losses.device)])


def _choice_candidates(records: Records) -> tuple[Tensor, Tensor, int]:
    """List the candidates at each choice of a completion.

    Returns:
        For each of the Q completions, the rows ``[Q, K]`` of all completions in its record, where K
        is the size of the largest record; the mask ``[Q, K]`` of the candidates among these, which
        are the chosen completion and those ranked below it; and the number of records whose
        completions are not all tied.
    """
    starts, sizes, ranks = records.sample_bounds[:-1], records.sample_bounds.diff(), records.ranks
    largest = int(sizes.max()) if len(sizes) else 0
    chosen, places = torch.arange(len(ranks))[:, None], torch.arange(largest)
    rows = starts.repeat_interleave(sizes)[:, None] + places
    exists = places < sizes.repeat_interleave(sizes)[:, None]
    rows = torch.where(exists, rows, chosen)
    is_worse = ranks[rows] > ranks[chosen]
    owners = torch.arange(len(sizes)).repeat_interleave(sizes)
    num_ordered = len(owners[is_worse.any(dim=1)].unique())
    return rows, is_worse | (rows == chosen) & exists, num_ordered
