"""Plackett-Luce: K completions in their order, the best one chosen first."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_aligner.batch.packed import Records
from nemo_aligner.losses.base import PairObjective
from nemo_aligner.utils.host_transfer import to_device


@dataclass(frozen=True)
class PlackettLuce(PairObjective):
    """``-log`` of the probability that completions are chosen in their order, one after the other.

    Each is chosen by the softmax of its reward among those that are left (Luce 1959, "Individual
    choice behavior"; Plackett 1975, "The analysis of permutations"; as a loss: Xia et al. 2008,
    "Listwise approach to learning to rank", ListMLE). Two completions are Bradley-Terry's case.

    Tied completions are not compared: each of them is chosen among itself and those that are worse.
    So a best one among others that are all tied is one softmax.
    """

    def loss(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """The sum over records, and how many of them have an order, of rewards ``[S, 1]``."""
        rows, is_left, num_ordered = _choices(records)
        first = rewards[:, 0]
        left = first[to_device(rows, first.device)]
        left = left.masked_fill(~to_device(is_left, first.device), -torch.inf)
        losses = left.logsumexp(dim=1) - first
        # Made on the device: a number of the host's would have it wait.
        count = torch.full((), num_ordered, dtype=torch.int64, device=first.device)
        return losses.sum(), count


def _choices(records: Records) -> tuple[Tensor, Tensor, int]:
    """``[S, K]`` rows of all completions of each one's record; which are left beside it; records.

    K is the largest record's number of completions. What is left when one is chosen is that one,
    and what is worse. The number is of records that are not tied as a whole.
    """
    sizes, starts, ranks = records.sizes, records.bounds[:-1], records.ranks
    most = int(sizes.max()) if len(sizes) else 0
    own, places = torch.arange(len(ranks))[:, None], torch.arange(most)
    rows = starts.repeat_interleave(sizes)[:, None] + places
    exists = places < sizes.repeat_interleave(sizes)[:, None]
    rows = torch.where(exists, rows, own)
    is_worse = ranks[rows] > ranks[own]
    owners = torch.arange(len(sizes)).repeat_interleave(sizes)
    num_ordered = len(owners[is_worse.any(dim=1)].unique())
    return rows, is_worse | (rows == own) & exists, num_ordered
