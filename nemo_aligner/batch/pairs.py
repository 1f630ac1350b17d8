"""PairRows: pairs of rewards of ranked completions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_aligner.utils.host_transfer import to_device


@dataclass(frozen=True)
class PairRows:
    """P pairs of samples, each of one of R records, by their indices among Q samples.

    Attributes:
        better, worse: ``[P]`` int64 rows, on the host; slices where every record is one pair, the
            better first.
        records: ``[P]`` int64 numbers of the records, on the host; a slice in the same case.
        shares: ``[P]`` float32, of its record's pairs each is one part; None in the same case.
        are_ties: ``[P]`` bool, pairs of which neither is better; None where there is none.
        num_records: how many records have a pair.
    """

    better: Tensor | slice
    worse: Tensor | slice
    records: Tensor | slice
    shares: Tensor | None
    are_ties: Tensor | None
    num_records: int

    def of(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """``values [Q, ...]`` of the better ones and of the worse, ``[P, ...]`` each."""
        return values[_on(self.better, values)], values[_on(self.worse, values)]

    def of_records(self, values: Tensor) -> Tensor:
        """``values [R, ...]`` as ``[P, ...]``."""
        return values[_on(self.records, values)]

    def sum_and_count(self, losses: Tensor) -> tuple[Tensor, Tensor]:
        """Sum over records of the mean of their pairs' ``losses [P]``, and how many records.

        The pairs of a prompt count as one (Ouyang et al. 2022, section 3.5): they are no more
        independent of each other than its completions.
        """
        if self.shares is not None:
            losses = losses * to_device(self.shares, losses.device)
        # Made on the device: a number of the host's would have it wait.
        count = torch.full((), self.num_records, dtype=torch.int64, device=losses.device)
        return losses.sum(), count


def _on(rows: Tensor | slice, values: Tensor) -> Tensor | slice:
    return rows if isinstance(rows, slice) else to_device(rows, values.device)


def pair_rows(bounds: Tensor, ranks: Tensor, with_ties: bool = False) -> PairRows:
    """The pairs of records with the samples from ``bounds [R + 1]`` on, by ``ranks [Q]``."""
    sizes = bounds.diff()
    if bool((sizes == 2).all()) and bool((ranks[::2] < ranks[1::2]).all()):
        # Pairs, better first, as nearly all data is: slices are views, and nothing is copied.
        every = slice(None)
        return PairRows(slice(0, None, 2), slice(1, None, 2), every, None, None, len(sizes))
    owner = torch.arange(len(sizes)).repeat_interleave(sizes)
    found = [_pairs_of_size(bounds[:-1][sizes == size], int(size)) for size in sizes.unique()]
    first, second = torch.cat(found).sort(dim=1).values.unbind(dim=1)
    # Record by record, whatever the sizes of the others.
    order = (first * len(ranks) + second).argsort()
    first, second = first[order], second[order]
    are_ties = ranks[first] == ranks[second]
    if not with_ties:
        first, second = first[~are_ties], second[~are_ties]
    in_order = ranks[first] <= ranks[second]
    records = owner[first]
    counts = records.bincount(minlength=len(sizes))
    return PairRows(
        better=torch.where(in_order, first, second),
        worse=torch.where(in_order, second, first),
        records=records,
        shares=1 / counts[records].float(),
        are_ties=are_ties if with_ties else None,
        num_records=int((counts > 0).sum()),
    )


def _pairs_of_size(starts: Tensor, size: int) -> Tensor:
    """``[n * size * (size - 1) / 2, 2]`` rows of all pairs of records that start there."""
    pairs = torch.combinations(torch.arange(size), 2)
    return (starts[:, None, None] + pairs).view(-1, 2)
