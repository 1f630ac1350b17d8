"""Plackett-Luce: a loss on the ranking of K completions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_aligner.batch.packed import Records
from nemo_aligner.losses.base import PairObjective
from nemo_aligner.utils.host_transfer import to_device


@dataclass(frozen=True)
class PlackettLuce(PairObjective):
    """``-log`` probability of choosing the completions one after the other in their order.

    Each is chosen by the softmax of its reward among those that are left (Luce 1959, "Individual
    choice behavior"; Plackett 1975, "The analysis of permutations"; as a loss: Xia et al. 2008,
    "Listwise approach to learning to rank", ListMLE). With two completions it is Bradley-Terry.

    Tied completions are not compared: each competes with itself and those ranked below. One best
    completion among otherwise tied ones is therefore a single softmax.
    """

    def loss(self, rewards: Tensor, records: Records) -> tuple[Tensor, Tensor]:
        """Sum over records of rewards ``[S, 1]``, and the count of records with an order."""
        rows, is_left, num_ordered = _choices(records)
        first = rewards[:, 0]
        # Row s is the choice of completion s: the softmax's log-denominator over those left then,
        # minus its own reward. The last of a record chooses from itself alone, with a loss of 0.
        left = first[to_device(rows, first.device)]
        left = left.masked_fill(~to_device(is_left, first.device), -torch.inf)
        losses = left.logsumexp(dim=1) - first
        # Built on the device: copying a host scalar would synchronise.
        count = torch.full((), num_ordered, dtype=torch.int64, device=first.device)
        return losses.sum(), count


def _choices(records: Records) -> tuple[Tensor, Tensor, int]:
    """Candidates at each choice.

    Returns:
        ``[S, K]`` rows of all completions of the chosen one's record, K the largest record; a mask
        ``[S, K]`` of the candidates: the chosen one and those ranked below; and the number of
        records that are not one tie.
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
