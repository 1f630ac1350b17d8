"""A loss on comparisons that trains an ensemble of reward heads on one transformer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_aligner.batch.packed import Records
from nemo_aligner.contract.readout import HEADS, Readout
from nemo_aligner.losses.base import PairObjective, check_flag, check_integer, check_number
from nemo_aligner.losses.soft_labels import SoftLabels
from nemo_aligner.utils.host_transfer import to_device

# Cumulative probabilities P(0), P(0 or 1), ... of a Poisson distribution with mean 1. Counts above
# 17 are omitted: their probability is below 2 ** -53.
_POISSON = np.array([*accumulate(math.exp(-1) / math.factorial(k) for k in range(18))])


@dataclass(frozen=True)
class HeadEnsemble(SoftLabels, PairObjective):
    """Mean over K heads of ``-log sigmoid(m) + center_rewards_coefficient * (better + worse)^2``.

    m is the margin, the better reward minus the worse one. Each head starts from its own random
    weights. Comparisons do not determine the level of a head's rewards, so without the second term
    the heads would mostly disagree about their level (Eisenstein et al. 2023, "Helping or herding?
    Reward model ensembles mitigate but do not eliminate reward hacking", arXiv:2312.09244, which
    uses the coefficient 0.01).

    The reward is the mean of the heads, and its uncertainty is their standard deviation. Such heads
    on a shared transformer are the bootstrapped heads of Osband et al. 2016, "Deep exploration via
    bootstrapped DQN". Coste et al. 2023, "Reward model ensembles help mitigate overoptimization",
    arXiv:2310.02743, describe how to use ensembles of rewards.

    Attributes:
        heads: K, 2 or more.
        bootstrap: weigh each record for each head by a number from a Poisson distribution of mean 1
            that depends only on the record and the head (online bootstrap: Oza and Russell 2001,
            "Online bagging and boosting"). False gives every record the weight 1, as does the loss
            that measures a data set.
        center_rewards_coefficient: coefficient of the second term; 0 leaves the level of each
            head's rewards undetermined.
        soft_label_weight: every head learns soft labels as ``BradleyTerry`` does.
    """

    heads: int = 5
    bootstrap: bool = True
    center_rewards_coefficient: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer(self, "heads", 2)
        check_number(self, "center_rewards_coefficient", 0)
        check_flag(self, "bootstrap")

    @property
    def readout(self) -> Readout:
        return Readout(HEADS, (tuple(map(float, range(1, self.heads + 1))),))

    def for_measuring(self) -> HeadEnsemble:
        """Return the objective without bootstrap: its weights depend on the order of records."""
        return replace(self, bootstrap=False)

    def loss(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """Return the sum of the records' losses, and the number of records.

        ``rewards`` are the outputs of the heads, ``[S, K]``.
        """
        pairs = records.pairs()
        (offset,) = records.labels.offsets(self.attributes)
        better, worse = pairs.of(rewards + offset)
        losses = F.softplus(worse - better)
        share = self.mix_reversed_share(0.0, pairs, records, rewards)
        if share is not None:
            losses = (1 - share[:, None]) * losses + share[:, None] * F.softplus(better - worse)
        losses = losses + self.center_rewards_coefficient * (better + worse).square()
        if self.bootstrap:
            times = to_device(bootstrap_counts(records.ids, self.heads), losses.device)
            losses = losses * pairs.of_records(times)
        return pairs.sum_and_count(losses.mean(dim=1))


def bootstrap_counts(ids: Tensor, heads: int) -> Tensor:
    """Count how often each of ``heads`` heads trains on each record: ``[R, heads]`` float32.

    The counts follow a Poisson distribution of mean 1. They come from a hash of the record's id and
    the head's index (SplitMix64: Steele et al. 2014, "Fast splittable pseudorandom number
    generators"), so that they are the same in any layout and after a resume.
    """
    numbers = ids.numpy().astype(np.uint64)[:, None] * np.uint64(heads)
    mixed = (numbers + np.arange(1, heads + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ np.right_shift(mixed, np.uint64(shift))) * np.uint64(factor)
    mixed = mixed ^ np.right_shift(mixed, np.uint64(31))
    uniform = np.right_shift(mixed, np.uint64(11)) / 2.0**53
    return torch.from_numpy(np.searchsorted(_POISSON, uniform, side="right").astype(np.float32))
