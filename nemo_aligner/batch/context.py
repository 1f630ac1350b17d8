"""ContextShare: which tokens of a pack a rank of a context parallel group computes."""

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

    Of every segment, cut into ``2 * ranks`` chunks, rank r has number r from its beginning and
    number r from its end: under a causal mask that is as much work for each (Llama 3, Dubey et al.
    2024, section 3.3.2). All ranks have equally many tokens, n.

    Attributes:
        rank: index of the rank in its group.
        chunks: of every rank the first row in the pack of each chunk, and the row behind its last.
        rows: ``[n]`` int64, its tokens as rows of the pack, chunk after chunk.
        gathered: ``[T]`` int64, where the pack's rows lie among those of all ranks, rank by rank.
        reads: ``[r]`` int64, which of the tokens that the head reads are among its own.
        read_rows: ``[r]`` int64, where these are in ``rows``.
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
        """Cut segments of these ``bounds`` for a rank; the head reads the rows ``reads [S]``.

        A filler segment behind the last bound, of which each rank has what it lacks, makes n the
        same ``multiple`` for all of them.
        """
        chunks = [_chunks_of(each, ranks, bounds) for each in range(ranks)]
        sizes = [sum(end - start for start, end in own) for own in chunks]
        each = -(-max(sizes) // multiple) * multiple
        filled = bounds[-1]
        for own, size in zip(chunks, sizes, strict=True):
            if size < each:
                own.append((filled, filled + each - size))
                filled += each - size
        rows = torch.cat([torch.arange(*chunk) for own in chunks for chunk in own])
        gathered = rows.argsort()
        mine, places = _own(gathered[reads], rank, each)
        first = rank * each
        return cls(
            rank,
            tuple(map(tuple, chunks)),
            rows=rows[first : first + each],
            gathered=gathered,
            reads=mine,
            read_rows=places,
        )

    def own(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the pack's rows ``index [M]`` are its own, ``[m]``, and their places there."""
        return _own(self.gathered[index], self.rank, self.rows.numel())

    def to(self, device: torch.device | str) -> ContextShare:
        """Move what the model computes with; the chunks stay on the host."""
        rows, gathered, reads, read_rows = (
            to_device(each, device)
            for each in (self.rows, self.gathered, self.reads, self.read_rows)
        )
        return ContextShare(self.rank, self.chunks, rows, gathered, reads, read_rows)


def _own(places: Tensor, rank: int, each: int) -> tuple[Tensor, Tensor]:
    mine = (places // each == rank).nonzero().flatten()
    return mine, places[mine] - rank * each


def _chunks_of(rank: int, ranks: int, bounds: Sequence[int]) -> list[tuple[int, int]]:
    """Rows of a rank's chunks of segments with these ``bounds``."""
    chunks = []
    for start, end in pairwise(bounds):
        cuts = [start + (end - start) * number // (2 * ranks) for number in range(2 * ranks + 1)]
        first, last = cuts[rank : rank + 2], cuts[-rank - 2 :][:2]
        # The last rank's two stand side by side.
        pairs = [(first[0], last[1])] if rank == ranks - 1 else [first, last]
        chunks += [(begin, stop) for begin, stop in pairs if begin < stop]
    return chunks
