"""Losses on rewards of turns and steps: cross-entropy at each, and one reward of all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_aligner.batch.packed import Records
from nemo_aligner.config.common import Aggregate
from nemo_aligner.losses.base import RatingObjective
from nemo_aligner.utils.host_transfer import to_device


@dataclass(frozen=True)
class BinaryCrossEntropy(RatingObjective):
    """``-(l * log sigmoid(r) + (1 - l) * log sigmoid(-r))`` of a reward r, for labels l of 0 to 1.

    Over the labels that are present: of every step where steps are scored, else of the text. A
    label between 0 and 1, as the share of completions that come to the right answer, is the
    probability to learn (the soft estimation of Wang et al. 2023, "Math-Shepherd", eq. 3). The
    reward is the log-odds of a right step, and 0 is undecided.
    """

    centres_labels: ClassVar[bool] = False
    main_metric: ClassVar[str] = "loss"
    lowest_label: ClassVar[float | None] = 0.0
    highest_label: ClassVar[float | None] = 1.0
    # The reward from which on a step counts as right.
    right_from: ClassVar[float] = 0.0

    def loss(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """Sum over labels, and their count (int), of rewards ``[S, A]``."""
        labels = records.labels.targets(self.attributes)
        present = ~torch.isnan(labels)
        # log(1 + exp(r)) - l r, without the overflow of exp.
        losses = F.softplus(rewards) - labels.nan_to_num() * records.as_single(rewards)
        return torch.where(present, losses, 0.0).sum(), present.sum()


# One reward of a text, out of those of its turns or steps.

AGGREGATES = tuple(each.value for each in Aggregate)


def aggregate(rewards: Tensor, records: Records, how: str) -> Tensor:
    """One reward of each text, ``[Q, A]``, of the rewards ``[S, A]`` of its turns or steps.

    ``last``, ``min`` and ``mean`` are of the rewards r; ``product`` is ``sum log sigmoid(r)``, the
    logarithm of the product of the steps' probabilities. Lightman et al. 2023, "Let's Verify Step
    by Step", section 2.5, has product and minimum.
    """
    bounds = records.text_bounds()
    if how == "last":
        return rewards[to_device(bounds[1:] - 1, rewards.device)]
    # Text by text: a segmented sum would round a text by what stands beside it.
    parts = rewards.split(bounds.diff().tolist())
    if how == "min":
        found = [part.amin(dim=0, keepdim=True) for part in parts]
    elif how == "mean":
        found = [part.mean(dim=0, keepdim=True) for part in parts]
    else:
        found = [F.logsigmoid(part).sum(dim=0, keepdim=True) for part in parts]
    return torch.cat([rewards[:0], *found])
