"""PackedBatch: the one shape that data makes and models eat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedBatch:
    """Sequences laid end to end, without padding between them.

    A record owns ``sequences_per_record`` neighbouring sequences: 2 for a comparison (chosen, then
    rejected), 1 for a rating or a text to score. T counts tokens, S sequences, R records
    (``S == R * sequences_per_record``), A attributes.

    Attributes:
        tokens: ``[T]`` int64 token ids.
        position_ids: ``[T]`` int64, starting at 0 in every sequence.
        cu_seqlens: int32 bounds of the attention segments, from 0 to T: ``[S + 1]``, or ``[S + 2]``
            where ``padded_to_multiple`` added a filler segment at the tail.
        last_token: ``[S]`` int64 index into ``tokens`` of every sequence's last token.
        record_ids: ``[R]`` int64 position of each record in its data set (or request).
        sequences_per_record: 1 or 2.
        labels: ``[R, A]`` float32, NaN where a label is missing; None for comparisons and scoring.
    """

    tokens: Tensor
    position_ids: Tensor
    cu_seqlens: Tensor
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
    ) -> PackedBatch:
        """Lay ``sequences`` (S of them, in record order, none empty) end to end."""
        if len(sequences) != len(record_ids) * sequences_per_record:
            raise ValueError(
                f"{len(sequences)} sequences for {len(record_ids)} records "
                f"of {sequences_per_record}"
            )
        lengths = torch.tensor([len(sequence) for sequence in sequences], dtype=torch.int64)
        if len(sequences) == 0 or int(lengths.min()) < 1:
            raise ValueError("a pack needs at least one sequence, and no sequence may be empty")
        cu_seqlens = torch.zeros(len(sequences) + 1, dtype=torch.int32)
        cu_seqlens[1:] = lengths.cumsum(0)
        return cls(
            tokens=torch.cat(
                [torch.as_tensor(sequence, dtype=torch.int64) for sequence in sequences]
            ),
            position_ids=torch.cat([torch.arange(int(length)) for length in lengths]),
            cu_seqlens=cu_seqlens,
            last_token=cu_seqlens[1:].long() - 1,
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

    @property
    def max_seqlen(self) -> int:
        """The longest attention segment, in tokens."""
        return int((self.cu_seqlens[1:] - self.cu_seqlens[:-1]).max())

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
