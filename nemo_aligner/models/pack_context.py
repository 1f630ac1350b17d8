"""PackContext: all that a decoder's layers know about a pack, except for its hidden states.

It also defines ``Balance``, the part of the context that routers of MoE layers read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from nemo_aligner.models.attention.segments import PackedSegments
from nemo_aligner.models.chunk_tree import ChunkTree
from nemo_aligner.models.rotary import Tables


@dataclass(frozen=True)
class Balance:
    """The facts about a pack with which a router counts its load and weights its auxiliary loss.

    Attributes:
        records: number of the pack's records, each of which the auxiliary loss counts once.
        tokens: how many rows of the layer's MLP are real tokens, over all tensor parallel ranks.
            They come first, and filler after them. 0 for an empty pack, which is added so that all
            expert parallel ranks have equally many packs.
        losses_per_record: how many losses of each record the step's mean counts. Megatron divides
            the gradient of the auxiliary loss by the same count, so the router scales it up by this
            number.
    """

    records: int = 0
    tokens: int = 0
    losses_per_record: float = 1.0


@dataclass(frozen=True, eq=False)
class PackContext:
    """All that a decoder's layers know about a pack, except for its hidden states.

    ``GPTRewardModel`` makes one in each forward pass, and megatron-core hands it to every layer as
    ``packed_seq_params``. A layer passes it on as an argument, so a layer that is recomputed gets
    the context of its own pack, whichever pack ran in between.

    Attributes:
        segments: the segments that attention sees.
        read_rows: ``[R]`` int64 rows that the head reads; the last layer computes only these after
            its attention.
        balance: which tokens routers count, in every layer but the last.
        balance_of_read_rows: which tokens the last layer's router counts.
        dropout_keys: ``[T]`` int32 hash key of every token for LoRA's dropout; None without it.
        tables: cosines and sines of every token, by its position in its sequence; one pair of
            tables for each of the model's rotary embeddings.
        query_scale: ``[T, 1, 1]`` factors that multiply queries after RoPE; None is 1.
        chunks: chunks of 64 tokens for linear attention (``models/chunk_tree.py``); None for a
            model without linear attention.
        qkv_format: must not be ``thd``, for which megatron-core would split the pack to apply RoPE
            to each sequence. ``PackedAttention`` applies RoPE by ``tables`` instead.
        per_layer_inputs: ``[T, 1, L, w]``, this rank's channels of the inputs that each of L layers
            adds to its output (Gemma 4); None for other models.
        lent_keys: keys and values ``[T, groups, c]`` that later layers read (Gemma 4), by the
            number of the layer that computed them and put them here.
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
    per_layer_inputs: Tensor | None = None
    lent_keys: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @cached_property
    def dropout_keys_of_read_rows(self) -> Tensor | None:
        """Dropout keys ``[R]`` int32 of the rows that the head reads."""
        return None if self.dropout_keys is None else self.dropout_keys[self.read_rows]
