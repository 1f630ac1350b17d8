"""Decoder layers: megatron-core's, with a short way through them for inference."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from nemo_aligner.models.attention.segments import PackedSegments
from nemo_aligner.models.experts import RECORDS, MixtureOfExperts
from nemo_aligner.models.layers import learns


class PackedLayer(TransformerLayer):
    """``[T, 1, hidden] -> [T, 1, hidden]``; sequence parallelism splits T over TP.

    For inference the same modules are called one after the other: megatron-core's way through them
    is 330 operations, of which on a CPU most cost more than what they compute. TransformerEngine's
    modules keep that way.

    Args:
        residual_multiplier: factor of what is added to the residual stream.
    """

    def __init__(self, *args: Any, residual_multiplier: float = 1.0, **options: Any) -> None:
        super().__init__(*args, **options)
        self._multiplier = residual_multiplier

    def forward(
        self,
        hidden_states: Tensor,
        *args: Any,
        packed_seq_params: PackedSegments | None = None,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        if learns(self) or isinstance(self.input_layernorm, IdentityOp):
            options["packed_seq_params"] = packed_seq_params
            if isinstance(self.mlp, MixtureOfExperts) and packed_seq_params is not None:
                self.mlp.router.records = packed_seq_params.remembered(RECORDS, int)
            return super().forward(hidden_states, *args, **options)
        assert packed_seq_params is not None
        return self._infer(hidden_states, packed_seq_params), None

    def _infer(self, hidden: Tensor, segments: PackedSegments) -> Tensor:
        attention = self.self_attention
        mixed = attention.linear_qkv.infer(self.input_layernorm.forward(hidden))
        added = attention.linear_proj.infer(self._attend(mixed, segments))
        hidden = self._sum(added, self._read(hidden, segments))
        return self._sum(self._mlp(self.pre_mlp_layernorm.forward(hidden)), hidden)

    def _mlp(self, normed: Tensor) -> Tensor:
        mlp = self.mlp
        if isinstance(mlp, MixtureOfExperts):
            return mlp.infer(normed)
        inner = mlp.linear_fc1.infer(normed)
        return mlp.linear_fc2.infer(mlp.activation_func.forward(inner))

    def _sum(self, added: Tensor, hidden: Tensor) -> Tensor:
        """Add to the residual stream, in the memory of what a product has just made if it can."""
        if self._multiplier != 1:
            # By two roundings: one with a fused product depends on the place in a vector.
            added = added.to(hidden.dtype) * self._multiplier
        return added.add_(hidden) if added.dtype is hidden.dtype else hidden + added

    def _attend(self, mixed: Tensor, segments: PackedSegments) -> Tensor:
        """``[T, 1, groups * (repeats + 2) * c]``, of linear_qkv, -> ``[T, 1, heads * c]``."""
        attention = self.self_attention
        groups = attention.num_query_groups_per_partition
        grouped = mixed.view(mixed.size(0), groups, -1, attention.hidden_size_per_attention_head)
        turning, value = grouped[:, :, :-1], grouped[:, :, -1]
        if self.config.qk_layernorm:  # Without it a version has None there, another IdentityOp.
            query, key = turning[:, :, :-1], turning[:, :, -1:]
            normed = attention.q_layernorm(query), attention.k_layernorm(key)
            turning = torch.cat(normed, dim=2)
        if mixed.is_cpu:
            return attention.core_attention.infer_on_cpu(turning, value, segments)
        query, key = turning[:, :, :-1].flatten(1, 2), turning[:, :, -1]
        return attention.core_attention(
            *(each.unsqueeze(1) for each in (query, key, value)), packed_seq_params=segments
        )

    def _read(self, hidden: Tensor, segments: PackedSegments) -> Tensor:
        """The rows of the residual stream that the rest of the layer computes."""
        return hidden


class LastLayer(PackedLayer):
    """The layer before the head, ``[T, 1, hidden] -> [R, 1, hidden]``; TP splits T and R.

    Past attention, which is a ``LastTokenAttention``, it computes only the rows that the reward
    head reads: everything there works row by row.
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
        read = self._read(hidden_states, packed_seq_params)
        return torch.add(read, attended, alpha=self._multiplier), None

    def _read(self, hidden: Tensor, segments: PackedSegments) -> Tensor:
        rows = segments.last_token
        if not self.config.sequence_parallel:
            return hidden[rows]
        group = self.pg_collection.tp
        local = rows - group.rank() * hidden.size(0)
        mine = (local >= 0) & (local < hidden.size(0))
        # Masked fill rather than a product with 0, which would keep another record's NaN.
        found = hidden[local.clamp(0, hidden.size(0) - 1)].masked_fill(~mine[:, None, None], 0.0)
        return tensor_parallel.reduce_scatter_to_sequence_parallel_region(found, group=group)
