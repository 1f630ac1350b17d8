"""PairRows: the pairs of samples that losses and metrics of comparisons are computed over."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_aligner.utils.host_transfer import to_device


@dataclass(frozen=True)
class PairRows:
    """P pairs of samples, both of the same record, out of Q samples of R records.

    All tensors are on the host. If every record is a pair with the better sample first, as in most
    data, the indices are slices, which select without a copy.

    Attributes:
        better, worse: ``[P]`` int64 indices of the samples, or slices.
        records: ``[P]`` int64 index of each pair's record, or a slice.
        shares: ``[P]`` float32, weight of each pair. The weights of a record's pairs add up to 1.
            None if every record has one pair, so that all weights are 1.
        are_ties: ``[P]`` bool, True if neither sample is better; if None, no pair is tied.
        num_records: number of records with at least one pair.
    """

    better: Tensor | slice
    worse: Tensor | slice
    records: Tensor | slice
    shares: Tensor | None
    are_ties: Tensor | None
    num_records: int

    def of(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Select from ``values [Q, ...]`` those of the better and of the worse samples.

        Returns:
            Two tensors ``[P, ...]``.
        """
        return values[_move_rows(self.better, values)], values[_move_rows(self.worse, values)]

    def of_records(self, values: Tensor) -> Tensor:
        """Return for each pair the row of its record in ``values [R, ...]``, as ``[P, ...]``."""
        return values[_move_rows(self.records, values)]

    def sum_and_count(self, losses: Tensor) -> tuple[Tensor, Tensor]:
        """Average the ``losses [P]`` within each record, and sum these averages over all records.

        A record with many pairs thus weighs as much as a record with one pair, because pairs of the
        same prompt are correlated (Ouyang et al. 2022, section 3.5).

        Returns:
            The sum, and the number of records with a pair (int64), both scalars on the device of
            ``losses``.
        """
        if self.shares is not None:
            losses = losses * to_device(self.shares, losses.device)
        # Create the count on the device: a copy from the host would make the host wait for the GPU.
        count = torch.full((), self.num_records, dtype=torch.int64, device=losses.device)
        return losses.sum(), count


def _move_rows(rows: Tensor | slice, values: Tensor) -> Tensor | slice:
    return rows if isinstance(rows, slice) else to_device(rows, values.device)


def pair_rows(bounds: Tensor, ranks: Tensor, with_ties: bool = False) -> PairRows:
    """Pair the samples of each record; the sample with the lower rank is the better one.

    Args:
        bounds: ``[R + 1]`` bounds of the records in the samples, from 0 to Q.
        ranks: ``[Q]`` ranks of the samples.
        with_ties: also pair samples with equal ranks.
    """
    sizes = bounds.diff()
    if bool((sizes == 2).all()) and bool((ranks[::2] < ranks[1::2]).all()):
        # Every record is a pair with the better sample first, as in most data. Use slices, which
        # select views instead of copies.
        every = slice(None)
        return PairRows(slice(0, None, 2), slice(1, None, 2), every, None, None, len(sizes))
    owner = torch.arange(len(sizes)).repeat_interleave(sizes)
    pairs = [_pair_all(bounds[:-1][sizes == size], int(size)) for size in sizes.unique()]
    first, second = torch.cat(pairs).sort(dim=1).values.unbind(dim=1)
    # Put the pairs in the order of their records; above, they are grouped by record size.
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


def _pair_all(starts: Tensor, size: int) -> Tensor:
    """List all pairs within each of n records, which have ``size`` samples from ``starts [n]`` on.

    Returns:
        ``[n * size * (size - 1) / 2, 2]`` int64 indices of samples.
    """
    pairs = torch.combinations(torch.arange(size), 2)
    return (starts[:, None, None] + pairs).view(-1, 2)
