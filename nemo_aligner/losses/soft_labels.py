"""Soft labels: losses that learn from a teacher's rewards, as probabilities of the better reply.

A teacher, such as a larger model or an ensemble, gives each reply a reward t. With the temperature
T, it prefers the better reply of a pair with the probability ``s = sigmoid((t_b - t_w) / T)``, and
chooses among the replies of a record by ``softmax(t / T)``. A loss with the weight w of soft labels
learns ``(1 - w) * hard + w * soft`` by cross-entropy (Hinton et al. 2015, "Distilling the knowledge
in a neural network", arXiv:1503.02531). Records without a teacher's rewards keep their hard labels.
P is the number of pairs, Q that of samples and R that of records.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nemo_aligner.batch.packed import Records
from nemo_aligner.batch.pairs import PairRows
from nemo_aligner.losses.base import Objective, check_above, check_share
from nemo_aligner.utils.host_transfer import to_device


@dataclass(frozen=True)
class SoftLabels(Objective):
    """Mixin of losses that learn soft labels, next to the base class ``PairObjective``.

    Attributes:
        soft_label_weight: weight w of the teacher's probabilities, from 0 (only hard labels) to 1
            (only soft labels) for records that have them.
        soft_label_temperature: divides the differences of the teacher's rewards; above 1 makes its
            probabilities softer.
    """

    attributes: tuple[str, ...] = ("reward",)
    soft_label_weight: float = field(default=1.0, kw_only=True)
    soft_label_temperature: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        check_share(self, "soft_label_weight")
        check_above(self, "soft_label_temperature", 0)

    @property
    def learns_soft_labels(self) -> bool:
        return True

    def mix_reversed_share(
        self, hard_share: Tensor | float, pairs: PairRows, records: Records, rewards: Tensor
    ) -> Tensor | None:
        """Mix soft labels into the weight of a pair's reversed loss, ``L(-m)``.

        The weight is the probability that the worse reply is better: 0 for a hard label.

        Args:
            hard_share: this probability by the hard labels, ``[P]`` or one number for all pairs.
            rewards: tensor whose dtype and device the result has.

        Returns:
            ``[P]``; None if no record has soft labels or their weight is 0.
        """
        teacher = self._teacher_rewards(records, rewards)
        if teacher is None:
            return None
        better, worse = pairs.of(teacher)
        # A pair without a teacher's rewards has NaN here.
        soft_share = torch.sigmoid((worse - better) / self.soft_label_temperature)
        weight = self.soft_label_weight
        mixed = (1 - weight) * hard_share + weight * soft_share
        return torch.where(soft_share.isnan(), hard_share, mixed)

    def softmax_losses(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor] | None:
        """Compute the cross-entropy of all replies of each record against the teacher's softmax.

        This is the listwise loss of Cao et al. 2007, "Learning to rank: from pairwise approach to
        listwise approach" (ListNet, top one), with the teacher's rewards as its scores.

        Args:
            rewards: ``[Q]``.

        Returns:
            The losses ``[R]``, 0 for a record without soft labels; and the mask ``[R]`` of records
            with soft labels. None if no record has any or their weight is 0.
        """
        teacher = self._teacher_rewards(records, rewards)
        if teacher is None:
            return None
        sizes, starts = records.sample_bounds.diff(), records.sample_bounds[:-1]
        places = torch.arange(int(sizes.max()) if len(sizes) else 0)
        exists = places < sizes[:, None]
        rows = torch.where(exists, starts[:, None] + places, starts[:, None])
        rows, exists = to_device(rows, rewards.device), to_device(exists, rewards.device)
        is_soft = ~teacher[rows[:, :1]].isnan().any(dim=1)
        scores = teacher[rows].nan_to_num() / self.soft_label_temperature
        chances = scores.masked_fill(~exists, -torch.inf).softmax(dim=1)
        logits = rewards[rows].masked_fill(~exists, -torch.inf).log_softmax(dim=1)
        # Positions beyond a record's samples have the logarithm -inf and the probability 0, whose
        # product would be NaN.
        losses = -(chances * logits.masked_fill(~exists, 0)).sum(dim=1)
        return torch.where(is_soft, losses, 0), is_soft

    def _teacher_rewards(self, records: Records, rewards: Tensor) -> Tensor | None:
        """Return the teacher's rewards ``[Q]`` like ``rewards``; None if they are not used."""
        if records.teacher_rewards is None or not self.soft_label_weight:
            return None
        return to_device(records.teacher_rewards, rewards.device).to(rewards.dtype)
