"""Multi-head latent attention (MLA), as a module for megatron-core's layers.

See section 2.1 of DeepSeek-V2, arXiv:2405.04434. megatron-core's own module is not used, because it
does not support shared prefixes, and its up projections cannot run in chunks of a fixed number of
rows.
"""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_aligner.cpu import kernels
from nemo_aligner.models.layers import learns
from nemo_aligner.models.rotary import rotate
from nemo_aligner.models.shapes.decoder import ModelShape

if TYPE_CHECKING:
    from nemo_aligner.models.pack_context import PackContext


class LatentAttention(MegatronModule):
    """Replaces a layer's attention: ``[T, 1, hidden] -> [T, 1, hidden]``.

    The decoder layer calls ``linear_qkv``, ``attend`` and ``linear_proj``. The outputs of
    ``linear_qkv`` are the query latent, the key-value latent, and the key with RoPE that all heads
    share. Without a query latent they are ordered by head instead: the query of a head, then a
    ``1 / heads`` part of the channels of key-value latent and shared key.

    Tensor parallelism splits the outputs of ``linear_qkv``. The latents have few channels, so all
    ranks gather and norm them. Each rank computes queries, keys and values only for its heads.

    Args:
        linears: classes of column-parallel and of row-parallel linear layers.
        norm: class of the norms of the latents.
        core_attention: class of the attention to all heads' keys, which also selects the rows that
            the last layer returns.

    Attributes:
        why_not_graphed: why CUDA graphs do not capture this module.
    """

    why_not_graphed = "latent attention has not been tested with CUDA graphs"

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        shape: ModelShape,
        linears: tuple[Any, Any],
        norm: Any,
        core_attention: Any,
        **unused: Any,
    ) -> None:
        super().__init__(config)
        latent = shape.latent_attention
        assert latent is not None
        self._latent, self._group = latent, parallel_state.get_tensor_model_parallel_group()
        self._heads = latent.heads // self._group.size()
        self._is_recomputed = config.recompute_granularity == "selective"
        column, row = linears
        options = {"bias": False, "is_expert": False, "tp_group": self._group}
        options_of_column = {
            "init_method": config.init_method,
            "gather_output": False,
            "skip_bias_add": False,
            **options,
        }
        self.linear_qkv = column(
            config.hidden_size, latent.projection_width, config=config, **options_of_column
        )
        self.linear_proj = row(
            latent.value_width,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **options,
        )
        # linear_qkv gathers all tokens, so sequence parallelism ends there: every rank has the
        # latents of all tokens, and the whole gradients of the norms' weights, which must not be
        # summed over the ranks.
        inner = copy(config)
        inner.sequence_parallel = False
        self.q_latent_layernorm = self.linear_q_up_proj = None
        if latent.q_lora_rank is not None:
            self.q_latent_layernorm = norm(inner, latent.q_lora_rank, eps=latent.norm_epsilon)
            self.linear_q_up_proj = column(
                latent.q_lora_rank, latent.query_width, config=inner, **options_of_column
            )
        self.kv_latent_layernorm = norm(inner, latent.kv_lora_rank, eps=latent.norm_epsilon)
        self.linear_kv_up_proj = column(
            latent.kv_lora_rank, latent.key_value_width, config=inner, **options_of_column
        )
        self.core_attention = core_attention(config, layer_number, shape=shape)

    def attend(self, mixed: Tensor, context: PackContext) -> Tensor:
        """Compute ``[T, 1, heads * v]`` of this rank's heads from ``mixed``, linear_qkv's output.

        The last layer returns only the rows that the head reads. Selective recomputation keeps only
        ``mixed`` and the output, and computes queries, keys and values again in the backward pass.
        """
        if not learns(self):
            return self._infer(mixed, context)
        module: Any = self  # mypy does not see torch's __call__ behind Megatron's classes
        if self._is_recomputed and self.training:
            return tensor_parallel.checkpoint(partial(module, context=context), False, mixed)
        return module(mixed, context)

    def forward(self, mixed: Tensor, context: PackContext) -> Tensor:
        """Compute the result of ``attend`` with gradients.

        ``attend`` calls the module rather than this method, because the module's hooks wait for
        weights that Megatron is still gathering.
        """
        query, latent, rotary_key = self._split(mixed)
        if self.q_latent_layernorm is not None and self.linear_q_up_proj is not None:
            query = self.linear_q_up_proj(self.q_latent_layernorm(query))[0]
        expanded, _ = self.linear_kv_up_proj(self.kv_latent_layernorm(latent))
        if self._group.size() > 1:
            # This call changes nothing in the forward pass. Its backward pass sums the gradient
            # over the ranks, because each rank has only some of the heads. The up projections do
            # the same for the latents.
            rotary_key = tensor_parallel.copy_to_tensor_model_parallel_region(
                rotary_key, self._group
            )
        tables = context.tables[self.core_attention.rotation]
        query = rotate(query.unflatten(-1, (self._heads, -1)), *tables)
        rotary_key = rotate(rotary_key.unsqueeze(2), *tables)
        plain_key, value = self._split_keys(expanded)
        key = torch.cat([rotary_key.expand(-1, -1, self._heads, -1), plain_key], dim=-1)
        heads = (tensor.squeeze(1) for tensor in (query, key, self._pad(value)))
        return self._cut(self.core_attention.attend(*heads, context))

    @torch.no_grad()
    def _infer(self, mixed: Tensor, context: PackContext) -> Tensor:
        query, latent, rotary_key = self._split(mixed)
        if self.q_latent_layernorm is not None and self.linear_q_up_proj is not None:
            normed = self.q_latent_layernorm.forward(query.contiguous())
            query = self.linear_q_up_proj.infer(normed)
        query = self._rotate(query.unflatten(-1, (self._heads, -1)), context).squeeze(1)
        rotary_key = self._rotate(rotary_key.unsqueeze(2), context).squeeze(2)
        normed = self.kv_latent_layernorm.forward(latent.contiguous())
        latents, core = torch.cat([normed, rotary_key], dim=-1), self.core_attention
        # The ring passes on the keys of this rank's tokens. In all other cases latents are gathered
        # and cached, which are far smaller than the keys and values of all heads.
        has_all_keys = not core.uses_ring(context.segments)
        if has_all_keys:
            gathered = context.segments.gather(latents)
            (latents,) = context.segments.with_cached(core.layer_number, *gathered)
        key, value = self._expand(latents)
        return self._cut(core.attend(query, key, value, context, has_all_keys))

    def _rotate(self, heads: Tensor, context: PackContext) -> Tensor:
        """Apply RoPE to ``heads [T, 1, heads, c]`` without gradients; may overwrite ``heads``."""
        tables = context.tables[self.core_attention.rotation]
        # ``kernels.c`` needs tables of the heads' dtype.
        is_by_c_file = kernels.supports(heads, multiple=1) and tables[0].dtype is heads.dtype
        return (kernels.rotate if is_by_c_file else rotate)(heads, *tables)

    def _expand(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the keys and values ``[n, heads, c]`` of this rank's heads, for scoring.

        Every row is bit-identical whichever rows are computed with it, so a cached token has the
        keys and values that it had in its own pack.

        Args:
            latents: ``[n, 1, kv_lora_rank + r]``: normed latents and shared keys after RoPE.
        """
        rank = self._latent.kv_lora_rank
        expanded = self.linear_kv_up_proj.infer(latents[..., :rank].contiguous()).squeeze(1)
        plain_key, value = self._split_keys(expanded)
        rotary_key = latents[..., rank:].expand(-1, self._heads, -1)
        return torch.cat([rotary_key, plain_key], dim=-1), self._pad(value)

    def _split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split ``mixed [T, 1, projection / ranks]``, and gather the latents of all ranks.

        Returns:
            The query latent ``[T, 1, q_lora_rank]``, or the queries of this rank's heads ``[T, 1,
            heads * c]`` if there is no such latent; the key-value latent ``[T, 1, kv_lora_rank]``;
            and the shared key ``[T, 1, r]``, before RoPE.
        """
        latent = self._latent
        sizes = [latent.kv_lora_rank, latent.qk_rope_head_dim]
        if latent.q_lora_rank is not None:
            query, keys, rotary_key = self._gather(mixed).split([latent.q_lora_rank, *sizes], -1)
            return query, keys, rotary_key
        by_head = mixed.unflatten(-1, (self._heads, -1))
        query, part = by_head.tensor_split([latent.key_channels], -1)
        # After the latent come the zeros of heads that were added for tensor parallelism.
        gathered = self._gather(part.flatten(2))[..., : latent.latent_width]
        keys, rotary_key = gathered.split(sizes, -1)
        return query.flatten(2), keys, rotary_key

    def _gather(self, part: Tensor) -> Tensor:
        """Gather channels from the TP ranks; a rank's gradient is that of its own channels."""
        if self._group.size() == 1:
            return part
        return tensor_parallel.gather_from_tensor_model_parallel_region(part, self._group)

    def _split_keys(self, expanded: Tensor) -> tuple[Tensor, Tensor]:
        """Split the up projection's output into keys without RoPE, and values.

        The output is ``[..., heads * (n + v)]``, the keys are ``[..., heads, n]``, and the values
        ``[..., heads, v]``.
        """
        by_head = expanded.unflatten(-1, (self._heads, -1))
        plain_key, value = by_head.tensor_split([self._latent.qk_nope_head_dim], -1)
        return plain_key, value

    def _pad(self, value: Tensor) -> Tensor:
        """Pad values ``[..., v]`` with zeros to the channels of keys.

        FlashAttention 2 and the C file require values as wide as the keys. ``_cut`` removes the
        zeros from the output.
        """
        return F.pad(value, (0, self._latent.key_channels - value.size(-1)))

    def _cut(self, attended: Tensor) -> Tensor:
        """Invert ``_pad`` for all heads: ``[T, 1, heads * c] -> [T, 1, heads * v]``."""
        by_head = attended.unflatten(-1, (self._heads, -1))
        return by_head[..., : self._latent.v_head_dim].flatten(2)
