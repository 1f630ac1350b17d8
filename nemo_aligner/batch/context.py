"""ContextShare: which tokens of a pack each rank of a context parallel group computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from nemo_aligner.utils.host_transfer import to_device


@dataclass(frozen=True)
class ContextShare:
    """The part of a pack that one rank of a context parallel group computes.

    Every segment is cut into ``2 * ranks`` chunks. Rank r computes chunk r counted from the
    beginning and chunk r counted from the end, which balances the work under a causal mask (Llama
    3, Dubey et al. 2024, section 3.3.2). Each rank has the same number of tokens, n.

    Attributes:
        rank: index of the rank in its group.
        chunks: for every rank, its chunks. A chunk is given by the index in the pack of its first
            token, and of the token after its last.
        rows: ``[n]`` int64, indices in the pack of the tokens that this rank computes, chunk after
            chunk. A token is a row of the pack's tensors.
        gathered: ``[T]`` int64, position of each token of the pack in the concatenation of all
            ranks' ``rows``, in rank order.
        reads: ``[r]`` int64, the tokens that the head reads and this rank computes, as indices into
            all tokens that the head reads.
        read_rows: ``[r]`` int64, positions in ``rows`` of the tokens that ``reads`` names.
    """

    rank: int
    chunks: tuple[tuple[tuple[int, int], ...], ...]
    rows: Tensor
    gathered: Tensor
    reads: Tensor
    read_rows: Tensor

    @classmethod
    def of(
        cls, bounds: Sequence[int], reads: Tensor, rank: int, ranks: int, multiple: int
    ) -> ContextShare:
        """Split the segments of a pack over ``ranks`` ranks; return what ``rank`` computes.

        A filler segment after the last bound gives every rank the same number of tokens, n, which
        is a multiple of ``multiple``.

        Args:
            bounds: ``[G + 1]`` bounds of the segments, from 0 to the number of tokens.
            reads: ``[S]`` indices in the pack of the tokens that the head reads.
        """
        chunks = [_cut_chunks(number, ranks, bounds) for number in range(ranks)]
        sizes = [sum(end - start for start, end in rank_chunks) for rank_chunks in chunks]
        size_per_rank = -(-max(sizes) // multiple) * multiple
        end_of_pack = bounds[-1]
        for rank_chunks, size in zip(chunks, sizes, strict=True):
            if size < size_per_rank:
                rank_chunks.append((end_of_pack, end_of_pack + size_per_rank - size))
                end_of_pack += size_per_rank - size
        rows = torch.cat([torch.arange(*chunk) for rank_chunks in chunks for chunk in rank_chunks])
        gathered = rows.argsort()
        local_reads, read_rows = _select_local(gathered[reads], rank, size_per_rank)
        first = rank * size_per_rank
        return cls(
            rank,
            tuple(map(tuple, chunks)),
            rows=rows[first : first + size_per_rank],
            gathered=gathered,
            reads=local_reads,
            read_rows=read_rows,
        )

    def own(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Find which of the pack's tokens at the indices ``index [M]`` this rank computes.

        Returns:
            For the m tokens that it computes, their positions in ``index`` and their positions in
            ``rows``, both ``[m]`` int64.
        """
        return _select_local(self.gathered[index], self.rank, self.rows.numel())

    def to(self, device: torch.device | str) -> ContextShare:
        """Return a copy whose tensors are on ``device``; ``chunks`` are Python numbers."""
        rows, gathered, reads, read_rows = (
            to_device(index, device)
            for index in (self.rows, self.gathered, self.reads, self.read_rows)
        )
        return ContextShare(self.rank, self.chunks, rows, gathered, reads, read_rows)


def _select_local(gathered: Tensor, rank: int, size_per_rank: int) -> tuple[Tensor, Tensor]:
    """Find which of the positions ``gathered [M]`` belong to ``rank``.

    Rank r has the positions from ``r * size_per_rank`` up to, but not including, ``(r + 1) *
    size_per_rank``.

    Returns:
        For the m positions of the rank: their indices in ``gathered``, and their positions among
            those of the rank, from 0, both ``[m]`` int64.
    """
    local = (gathered // size_per_rank == rank).nonzero().flatten()
    return local, gathered[local] - rank * size_per_rank


def _cut_chunks(rank: int, ranks: int, bounds: Sequence[int]) -> list[tuple[int, int]]:
    """Cut each segment between ``bounds`` into ``2 * ranks`` chunks; return the chunks of ``rank``.

    A chunk is a pair: the index in the pack of its first token, and of the token after its last.
    Empty chunks are dropped.
    """
    chunks = []
    for start, end in pairwise(bounds):
        cuts = [start + (end - start) * number // (2 * ranks) for number in range(2 * ranks + 1)]
        first, last = cuts[rank : rank + 2], cuts[-rank - 2 :][:2]
        # Chunks r from the beginning and from the end meet in the middle if r is the last rank:
        # join them.
        pairs = [(first[0], last[1])] if rank == ranks - 1 else [first, last]
        chunks += [(begin, stop) for begin, stop in pairs if begin < stop]
    return chunks
