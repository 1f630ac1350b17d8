"""PackContext: all that a decoder's layers know of a pack besides its hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from nemo_aligner.models.attention.segments import PackedSegments
from nemo_aligner.models.gated_delta import ChunkTree
from nemo_aligner.models.rotary import Tables


@dataclass(frozen=True)
class Balance:
    """What a router counts of a pack towards its load and its auxiliary loss.

    Attributes:
        records: records of the pack, each of which the auxiliary loss counts once.
        tokens: rows of the layer's MLP, the first ones, that are not filler, over all tensor
            parallel ranks; 0 for a pack that exists only to feed other ranks' experts.
        losses_per_record: what the step's loss is divided by, for each of its records. Megatron
            divides the gradient of the auxiliary loss by the same number.
    """

    records: int = 0
    tokens: int = 0
    losses_per_record: float = 1.0


@dataclass(frozen=True, eq=False)
class PackContext:
    """All that a decoder's layers know of a pack besides its hidden states.

    ``GPTRewardModel`` makes one in each forward pass, and megatron-core hands it to every layer as
    ``packed_seq_params``. A layer passes it on as an argument, so a layer that is recomputed gets
    the context of its own pack, whatever ran meanwhile.

    Attributes:
        segments: the segments that attention sees.
        read_rows: ``[R]`` int64 rows that the head reads; the last layer computes only these
            behind its attention.
        balance: what routers count, in every layer but the last.
        balance_of_read_rows: what the last layer's router counts.
        dropout_keys: ``[T]`` int32 hash key of every token for LoRA's dropout; None without it.
        tables: of each of the model's rotary embeddings, cosines and sines at every token's
            position in its sequence.
        query_scale: ``[T, 1, 1]`` factors of queries after RoPE; None is 1.
        chunks: of linear attention; None for a model without.
        qkv_format: not ``thd``, for which megatron-core would split the pack to rotate each
            sequence; PackedAttention rotates by ``tables`` instead.
    """

    segments: PackedSegments
    read_rows: Tensor
    balance: Balance = Balance()
    balance_of_read_rows: Balance = Balance()
    dropout_keys: Tensor | None = None
    tables: tuple[Tables, ...] = ()
    query_scale: Tensor | None = None
    chunks: ChunkTree | None = None
    qkv_format: str = "packed"

    @cached_property
    def dropout_keys_of_read_rows(self) -> Tensor | None:
        """``[R]`` int32, the dropout keys of the rows that the head reads."""
        return None if self.dropout_keys is None else self.dropout_keys[self.read_rows]
