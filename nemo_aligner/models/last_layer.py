"""The last layer computes, past attention, only the rows that the reward head reads."""

from __future__ import annotations

from typing import Any

from megatron.core import tensor_parallel
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from nemo_aligner.models.attention.packed import PackedAttention
from nemo_aligner.models.attention.segments import PackedSegments


class LastTokenAttention(PackedAttention):
    """PackedAttention's rows ``[R, 1, heads * c]`` at ``PackedSegments.last_token``."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSegments | None = None,
        **unused: Any,
    ) -> Tensor:
        every = super().forward(query, key, value, attention_mask, packed_seq_params)
        assert packed_seq_params is not None  # or the line above had refused
        return every[packed_seq_params.last_token]


class LastLayer(TransformerLayer):
    """``[T, 1, hidden] -> [R, 1, hidden]``; under sequence parallelism, T and R are split by TP.

    Its attention is a ``LastTokenAttention``. All that comes after works row by row.
    """

    def _forward_attention(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackedSegments | None = None,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        assert packed_seq_params is not None
        attended, _ = self.self_attention(
            self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            packed_seq_params=packed_seq_params,
        )
        return attended + self._rows(hidden_states, packed_seq_params.last_token), None

    def _rows(self, hidden: Tensor, rows: Tensor) -> Tensor:
        if not self.config.sequence_parallel:
            return hidden[rows]
        group = self.pg_collection.tp
        local = rows - group.rank() * hidden.size(0)
        mine = (local >= 0) & (local < hidden.size(0))
        # Filled, not multiplied by 0: another record's NaN would stay a NaN.
        found = hidden[local.clamp(0, hidden.size(0) - 1)].masked_fill(~mine[:, None, None], 0.0)
        return tensor_parallel.reduce_scatter_to_sequence_parallel_region(found, group=group)
