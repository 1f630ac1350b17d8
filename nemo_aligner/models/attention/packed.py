"""Core attention of a layer over packed sequences, as a module for megatron-core's layers.

It applies RoPE to queries and keys, and hands a layer's heads to one of the backends in
``backends.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from nemo_aligner.config.kernels import AttentionChoice
from nemo_aligner.config.model import ContextExchange
from nemo_aligner.cpu import kernels
from nemo_aligner.models.attention.backends import (
    Case,
    Heads,
    choose_backend,
    rotates_by_c_file,
    scores_of,
    why_gathered,
)
from nemo_aligner.models.attention.segments import PackedSegments
from nemo_aligner.models.layers import learns
from nemo_aligner.models.rotary import rotate, rotation_of
from nemo_aligner.models.shapes.decoder import ModelShape

if TYPE_CHECKING:
    from nemo_aligner.models.pack_context import PackContext

Norms = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]
"""The norms of queries and of keys, over the last axis or over all heads."""


def norm_joined(joined: Tensor, norms: Norms) -> Tensor:
    """Apply the norms of queries and keys to a tensor that holds the heads of both.

    Args:
        joined: ``[T, groups, repeats + 1, c]``: for each group its query heads, then its key.
    """
    norm_queries, norm_keys = norms
    return torch.cat([norm_queries(joined[:, :, :-1]), norm_keys(joined[:, :, -1:])], dim=2)


class PackedAttention(MegatronModule):
    """Core attention of ``query [T, 1, heads, c]`` to ``key`` and ``value [T, 1, groups, c]``.

    It applies RoPE to queries and keys, if the layer has RoPE. Then each segment attends causally
    to itself and to all its prefixes. It returns ``[T, 1, heads * c]``.

    Attributes:
        norms_after_rope: queries and keys are normed after RoPE, so the decoder layer passes the
            two norms to ``forward``.
        library: the library of attention kernels on a GPU (``use_attention_kernels``).
        softmax_offset: logits ``[heads]`` of the attention sinks of this rank's query heads, by
            megatron-core's name; None if the model has none.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, *, shape: ModelShape, **unused: Any
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.scores = scores_of(shape, layer_number)
        self.rotation = rotation_of(shape, layer_number)
        self.norms_after_rope = shape.qk_layernorm and shape.qk_norm_after_rope
        is_ring = config.cp_comm_type == ContextExchange.p2p.value
        self.is_ring = is_ring and why_gathered(shape, config.params_dtype) is None
        self.library = AttentionChoice.torch
        self._group = parallel_state.get_tensor_model_parallel_group()
        self.register_parameter("softmax_offset", None)
        if shape.attention_sinks:
            kind = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
            heads = shape.num_attention_heads // self._group.size()
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, **kind))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    @property
    def has_kernel(self) -> bool:
        """True if this machine has a GPU kernel that takes whole packs of this layer."""
        config = self.config
        heads = config.num_attention_heads, config.num_query_groups
        kind = "cuda", config.params_dtype, *heads, config.kv_channels
        case = Case(*kind, self.scores, learns=False, library=self.library)
        return choose_backend(case).takes_packs

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        packed_seq_params: PackContext | None = None,
        norms: Norms | None = None,
        **unused: Any,
    ) -> Tensor:
        if packed_seq_params is None:
            raise ValueError(
                "attention got no PackContext. Pass the pack's PackContext as packed_seq_params."
            )
        if self.rotation is not None:
            tables = packed_seq_params.tables[self.rotation]
            query, key = (rotate(heads, *tables) for heads in (query, key))
        if norms is not None:
            query, key = norms[0](query), norms[1](key)
        query, key, value = (heads.squeeze(1) for heads in (query, key, value))
        return self.attend(query, key, value, packed_seq_params)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: PackContext,
        has_all_keys: bool = False,
    ) -> Tensor:
        """Attend ``query [T, heads, c]`` to ``key`` and ``value [T, groups, c]``.

        The caller has already applied RoPE and norms to queries and keys. The result is
        ``[T, 1, heads * c]``.

        Args:
            has_all_keys: see ``Case``; ``key`` and ``value`` then include the cached tokens.
        """
        if context.query_scale is not None:
            query = query * context.query_scale
        case = self._case(query, query.size(1), key.size(1), context.segments)
        if has_all_keys:
            case = replace(case, has_all_keys=True)
        return self._attend((query, key), value, context, case)

    def uses_ring(self, segments: PackedSegments) -> bool:
        """Tell if keys and values of this pack travel around the context parallel ranks.

        With a prefix cache no ring is used, because every rank stores whole sequences in the cache.
        """
        return self.is_ring and segments.share is not None and segments.cached is None

    def infer_on_cpu(
        self, joined: Tensor, value: Tensor, context: PackContext, norms: Norms | None = None
    ) -> Tensor:
        """Attend without gradients; a token's output is bit-identical in every pack.

        Args:
            joined: ``[T, groups, repeats + 1, c]``: for each group its query heads, then its key,
                before RoPE. The tensor may be overwritten.
            value: ``[T, groups, c]``.
            norms: norms of queries and keys, if they come after RoPE.
        """
        groups, width = joined.shape[1:3]
        case = self._case(joined, groups * (width - 1), groups, context.segments)
        if self.rotation is not None:
            tables = context.tables[self.rotation]
            # ``kernels.c`` rotates in place, by tables of the heads' dtype. It does so exactly in
            # the cases whose attention it can compute.
            is_by_c_file = rotates_by_c_file(case) and tables[0].dtype is joined.dtype
            joined = (kernels.rotate if is_by_c_file else rotate)(joined, *tables)
        if norms is not None:
            joined = norm_joined(joined, norms)
        if context.query_scale is not None:
            joined[:, :, :-1] *= context.query_scale[..., None]
        return self._attend(joined, value, context, case)

    def infer_on_gpu(
        self, joined: Tensor, value: Tensor, context: PackContext, norms: Norms | None = None
    ) -> Tensor:
        """Attend without gradients on a GPU; arguments and result are those of ``infer_on_cpu``.

        Queries are copied, but keys stay views of ``joined``, because GPU kernels read strided
        keys.
        """
        if self.rotation is not None:
            joined = rotate(joined, *context.tables[self.rotation])
        if norms is not None:
            joined = norm_joined(joined, norms)
        query, key = joined[:, :, :-1].flatten(1, 2), joined[:, :, -1]
        return self.attend(query, key, value, context)

    def _case(
        self, heads: Tensor, query_heads: int, key_heads: int, segments: PackedSegments
    ) -> Case:
        scores, is_learning = self.scores, learns(self)
        # Drop a window that has no effect, but only in training: in scoring the backend must not
        # depend on the pack.
        if is_learning and scores.window is not None and scores.window >= segments.max_kv_length:
            scores = replace(scores, window=None)
        kind = heads.device.type, heads.dtype, query_heads, key_heads, heads.size(-1)
        return Case(*kind, scores, is_learning, self.uses_ring(segments), library=self.library)

    def _attend(
        self,
        rotated: tuple[Tensor, Tensor] | Tensor,
        value: Tensor,
        context: PackContext,
        case: Case,
    ) -> Tensor:
        sinks: Tensor | None = self.softmax_offset
        if sinks is not None:
            sinks = sinks.to(torch.promote_types(sinks.dtype, torch.float32))
        heads = Heads(self.layer_number, rotated, value, sinks)
        return self._select_rows(
            choose_backend(case).attend(heads, context.segments, case), context
        )

    def _select_rows(self, attended: Tensor, context: PackContext) -> Tensor:
        """Reshape ``[T, heads, c]`` to ``[T, 1, heads * c]``.

        ``LastTokenAttention`` overrides this method to return only the rows that the head reads.
        """
        return attended.flatten(1).unsqueeze(1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        entries = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.softmax_offset is None:
            return entries
        return entries | make_sharded_tensors_for_checkpoint(
            {"softmax_offset": self.softmax_offset},
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self._group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )


class LastTokenAttention(PackedAttention):
    """PackedAttention that returns only the rows ``[R, 1, heads * c]`` that the reward head reads.

    ``context.read_rows`` has their indices. Only the last decoder layer uses this class, because
    every other layer's output is read in full by the next layer.
    """

    def _select_rows(self, attended: Tensor, context: PackContext) -> Tensor:
        return super()._select_rows(attended[context.read_rows], context)
