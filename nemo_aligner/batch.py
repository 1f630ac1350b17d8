"""PackedBatch: the one shape that data makes and models eat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Fewer tokens are not worth a segment of their own.
_MIN_SHARED = 8


def shared_tokens(first: Sequence[int] | Tensor, second: Sequence[int] | Tensor) -> int:
    """How many tokens two sequences share at their beginning, where that is worth a segment.

    It is less than the shorter one's length, as every sequence needs a last token of its own.
    """
    most = min(len(first), len(second)) - 1
    if most < _MIN_SHARED:
        return 0
    differs = torch.as_tensor(first[:most]) != torch.as_tensor(second[:most])
    shared = int(differs.int().argmax()) if bool(differs.any()) else most
    return shared if shared >= _MIN_SHARED else 0


@dataclass(frozen=True)
class Group:
    """``size`` neighbouring sequences that begin with the same ``shared`` tokens."""

    size: int
    shared: int


class _Segments:
    """The segments of a pack in the making."""

    def __init__(self) -> None:
        self.tokens: list[Tensor] = []
        self.positions: list[Tensor] = []
        self.lengths: list[int] = []
        self.prefixes: list[int] = []
        self.ends: list[int] = []  # the segment that each sequence ends with

    def add_group(self, sequences: Sequence[Sequence[int] | Tensor], shared: int) -> None:
        if shared >= min(map(len, sequences)):
            raise ValueError(f"{shared} shared tokens leave no last token to a sequence")
        prefix = -1
        if shared:
            prefix = len(self.lengths)
            self._add(sequences[0], 0, shared, -1)
        for sequence in sequences:
            self.ends.append(len(self.lengths))
            self._add(sequence, shared, len(sequence), prefix)

    def _add(self, sequence: Sequence[int] | Tensor, start: int, stop: int, prefix: int) -> None:
        self.tokens.append(torch.as_tensor(sequence[start:stop], dtype=torch.int64))
        self.positions.append(torch.arange(start, stop))
        self.lengths.append(stop - start)
        self.prefixes.append(prefix)


@dataclass(frozen=True)
class PackedBatch:
    """Sequences laid end to end, without padding between them; what some begin with is there once.

    A record owns ``sequences_per_record`` neighbouring sequences: 2 for a comparison (chosen, then
    rejected), 1 for a rating or a text to score. T counts tokens, S sequences, R records
    (``S == R * sequences_per_record``), A attributes.

    The pack is made of G segments. A sequence is one segment, or two: a beginning that it shares
    with its neighbours, and the rest of its own. In attention a segment sees itself, causally, and
    the whole of its beginning; so every token has the hidden state that it has in its sequence.

    Attributes:
        tokens: ``[T]`` int64 token ids.
        position_ids: ``[T]`` int64 places in the sequences, counted from 0.
        cu_seqlens: ``[G + 1]`` int32 bounds of the segments, from 0 to T.
        prefixes: ``[G]`` int64, the segment that a segment begins with, -1 for none.
        last_token: ``[S]`` int64 index into ``tokens`` of every sequence's last token.
        record_ids: ``[R]`` int64 position of each record in its data set (or request).
        sequences_per_record: 1 or 2.
        labels: ``[R, A]`` float32, NaN where a label is missing; None for comparisons and scoring.
    """

    tokens: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
    prefixes: Tensor
    last_token: Tensor
    record_ids: Tensor
    sequences_per_record: int
    labels: Tensor | None = None

    @classmethod
    def pack(
        cls,
        sequences: Sequence[Sequence[int] | Tensor],
        record_ids: Sequence[int],
        sequences_per_record: int,
        labels: Tensor | None = None,
        groups: Sequence[Group] | None = None,
    ) -> PackedBatch:
        """Lay ``sequences`` (S of them, in record order, none empty) end to end.

        ``groups`` says which neighbours share a beginning; without it none do.
        """
        if len(sequences) != len(record_ids) * sequences_per_record:
            raise ValueError(
                f"{len(sequences)} sequences for {len(record_ids)} records "
                f"of {sequences_per_record}"
            )
        if len(sequences) == 0 or min(map(len, sequences)) < 1:
            raise ValueError("a pack needs at least one sequence, and no sequence may be empty")
        segments = _Segments()
        rest = iter(sequences)
        for group in groups or [Group(1, 0)] * len(sequences):
            segments.add_group([next(rest) for _ in range(group.size)], group.shared)
        bounds = torch.tensor([0, *segments.lengths], dtype=torch.int32).cumsum(0).int()
        return cls(
            tokens=torch.cat(segments.tokens),
            position_ids=torch.cat(segments.positions),
            cu_seqlens=bounds,
            prefixes=torch.tensor(segments.prefixes),
            last_token=bounds[1:][torch.tensor(segments.ends)].long() - 1,
            record_ids=torch.as_tensor(record_ids, dtype=torch.int64),
            sequences_per_record=sequences_per_record,
            labels=labels,
        )

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()

    @property
    def num_sequences(self) -> int:
        return self.last_token.numel()

    @property
    def num_records(self) -> int:
        return self.record_ids.numel()

    def padded_to_multiple(self, multiple: int) -> PackedBatch:
        """The same batch with a filler segment at the tail, so that T divides by ``multiple``."""
        fill = -self.num_tokens % multiple
        if fill == 0:
            return self
        total = self.cu_seqlens.new_tensor([self.num_tokens + fill])
        return replace(
            self,
            tokens=torch.cat([self.tokens, self.tokens.new_zeros(fill)]),
            position_ids=torch.cat(
                [self.position_ids, torch.arange(fill, device=self.tokens.device)]
            ),
            cu_seqlens=torch.cat([self.cu_seqlens, total]),
            prefixes=torch.cat([self.prefixes, self.prefixes.new_tensor([-1])]),
        )

    def to(self, device: torch.device | str) -> PackedBatch:
        """Move what the model computes with; ``record_ids`` stay where they are."""
        return replace(
            self,
            tokens=self.tokens.to(device, non_blocking=True),
            position_ids=self.position_ids.to(device, non_blocking=True),
            cu_seqlens=self.cu_seqlens.to(device, non_blocking=True),
            last_token=self.last_token.to(device, non_blocking=True),
            labels=None if self.labels is None else self.labels.to(device, non_blocking=True),
        )
