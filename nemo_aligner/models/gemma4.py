"""Gemma 4's decoder layers: attention, experts, inputs of each layer, and the layers' scalars.

The formulas are those of transformers' ``models/gemma4/modeling_gemma4.py``. ``Gemma4Shape``
describes the traits.
"""

from __future__ import annotations

from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_aligner.models.activations import ACTIVATIONS
from nemo_aligner.models.expert_rows import RowCounts
from nemo_aligner.models.experts import MixtureOfExperts
from nemo_aligner.models.layers import SequenceParallelRMSNorm, invariant_linear, rows_now
from nemo_aligner.models.rotary import rotate
from nemo_aligner.models.shapes.decoder import ModelShape

if TYPE_CHECKING:
    from nemo_aligner.models.pack_context import Balance, PackContext


class UnweightedRMSNorm(SequenceParallelRMSNorm):
    """RMSNorm without a weight: it multiplies by ones, which are neither trained nor stored."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config, hidden_size, eps)
        ones = torch.full_like(self.weight, 1.0 - self._offset, requires_grad=False)
        del self.weight
        self.register_buffer("weight", ones, persistent=False)


class Gemma4Attention(MegatronModule):
    """Attention of a Gemma 4: ``[T, 1, hidden] -> [T, 1, hidden]``.

    The decoder layer calls ``linear_qkv``, ``attend`` and ``linear_proj``. For each query group,
    ``linear_qkv`` computes the queries of its heads, its key and its value. If keys serve as
    values, there is no value; if the layer reads an earlier layer's keys, there is no key, either.

    Args:
        config: the layer's config, with its own number of query groups and channels of a head.
        shape: ``ModelShape.of_layer`` of the layer.
        linears: classes of column-parallel and of row-parallel linear layers.
        norm: class of the norms of queries and keys.
        core_attention: class of the attention to keys, which also selects the rows that the last
            layer returns.

    Attributes:
        why_not_graphed: why CUDA graphs do not capture this module.
    """

    why_not_graphed = "Gemma 4's attention has not been tested with CUDA graphs"

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
        assert shape.gemma4 is not None
        assert shape.gemma4.layer is not None
        self._traits, self._number = shape.gemma4.layer, layer_number
        group = parallel_state.get_tensor_model_parallel_group()
        self._groups = shape.num_query_groups // group.size()
        self._repeats = shape.num_attention_heads // shape.num_query_groups
        self._is_recomputed = config.recompute_granularity == "selective"
        column, row = linears
        width = shape.num_attention_heads * shape.kv_channels
        options = {"bias": False, "is_expert": False, "tp_group": group, "config": config}
        self.linear_qkv = column(
            config.hidden_size,
            width + shape.key_value_width,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **options,
        )
        self.linear_proj = row(
            width,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **options,
        )
        size = shape.kv_channels, config.layernorm_epsilon
        self.q_layernorm = norm(config, size[0], eps=size[1])
        self.k_layernorm = self.v_layernorm = None
        if self._traits.keys_from is None:
            self.k_layernorm = norm(config, size[0], eps=size[1])
            self.v_layernorm = UnweightedRMSNorm(config, *size)
        # A layer that reads an earlier layer's keys has the same window and RoPE. In the prefix
        # cache it reads the keys of that layer, too.
        self.core_attention = core_attention(
            config, self._traits.keys_from or layer_number, shape=shape
        )

    def attend(self, mixed: Tensor, context: PackContext) -> Tensor:
        """Compute ``[T, 1, heads * c]`` of this rank's heads from ``mixed``, linear_qkv's output.

        The last layer returns only the rows that the head reads. Selective recomputation keeps only
        queries, keys and values after RoPE.
        """
        tables = context.tables[self.core_attention.rotation]
        # [T, groups, repeats + keys and values, c]
        grouped = mixed.view(mixed.size(0), self._groups, -1, self.config.kv_channels)
        query = rotate(self.q_layernorm(grouped[:, :, : self._repeats]), *tables).flatten(1, 2)
        if self._traits.keys_from is None:
            key, value = self._keys_and_values(grouped[:, :, self._repeats :], tables)
        else:
            key, value = context.lent_keys[self._traits.keys_from]
        if self._traits.lends_keys:
            context.lent_keys[self._number] = key, value
        attend = partial(self.core_attention.attend, context=context)
        if self._is_recomputed and self.training:
            return tensor_parallel.checkpoint(attend, False, query, key, value)
        return attend(query, key, value)

    def _keys_and_values(
        self, grouped: Tensor, tables: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Norm ``grouped [T, groups, 1 or 2, c]``, and rotate keys.

        Returns:
            Keys and values, ``[T, groups, c]`` each.
        """
        assert self.k_layernorm is not None
        assert self.v_layernorm is not None
        key = rotate(self.k_layernorm(grouped[:, :, :1]), *tables).squeeze(2)
        return key, self.v_layernorm(grouped[:, :, -1])


class Gemma4Experts(MixtureOfExperts):
    """Dense MLP and experts of a Gemma 4, from the residual stream: ``[T, 1, hidden]`` in and out.

    It computes ``norm(norm(dense(norm(x))) + norm(experts(norm(x))))``; each of the five norms has
    its own weight. ``shared_experts`` is the dense MLP.
    """

    def __init__(self, config: TransformerConfig, **unused: Any) -> None:
        super().__init__(config)
        size, epsilon = config.hidden_size, config.layernorm_epsilon
        norm = partial(SequenceParallelRMSNorm, config, size, epsilon)
        self.shared_experts_layernorm, self.shared_experts_post_layernorm = norm(), norm()
        self.experts_layernorm, self.experts_post_layernorm = norm(), norm()
        self.post_layernorm = norm()

    def _compute(self, tokens: Tensor, rows: int | None, balance: Balance | None) -> Tensor:
        assert self.shared_experts is not None
        chosen, weights = self.router(tokens, rows, balance)
        normed = self._share(self.experts_layernorm(tokens))
        routed = self._run_experts(normed, self._share(chosen), self._share(weights), rows)
        routed = self.experts_post_layernorm(self._sum(routed.to(normed.dtype), rows))
        normed = self._share(self.shared_experts_layernorm(tokens))
        dense = self.shared_experts(normed, RowCounts(None, [len(normed)]), rows)
        dense = self.shared_experts_post_layernorm(self._sum(dense, rows))
        output: Tensor = self.post_layernorm(dense + routed)
        return output


class Gemma4Output(MegatronModule):
    """Computes a layer's output from the residual stream: ``[T, 1, hidden] -> [T, 1, hidden]``.

    It computes ``scalar * (x + norm(W (gelu(V x) * input)))``, or ``scalar * x`` in a model without
    per-layer inputs. Tensor parallelism splits the channels of the input.

    Args:
        shape: ``ModelShape.of_layer`` of the layer.
        linears: classes of column-parallel and of row-parallel linear layers.

    Attributes:
        scalar: ``[1]``, a stored factor that is not trained.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        shape: ModelShape,
        linears: tuple[Any, Any],
    ) -> None:
        super().__init__(config)
        kind = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.register_buffer("scalar", torch.ones(1, **kind))
        self._index = layer_number - 1
        width = None if shape.gemma4 is None else shape.gemma4.per_layer_width
        self.gate = None
        if width is None:
            return
        group = parallel_state.get_tensor_model_parallel_group()
        column, row = linears
        options = {"bias": False, "is_expert": False, "tp_group": group, "config": config}
        self.gate = column(
            config.hidden_size,
            width,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            **options,
        )
        self.activation_func = ACTIVATIONS["geglu"](config=config)
        self.projection = row(
            width,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            **options,
        )

    def forward(self, hidden: Tensor, inputs: Tensor | None) -> Tensor:
        """Compute the layer's output.

        Args:
            inputs: ``[T, 1, L, w]``: for each layer of the model this rank's channels of its input;
                None in a model without per-layer inputs.
        """
        if self.gate is not None:
            assert inputs is not None
            gate, _ = self.gate(hidden.to(self.config.params_dtype))
            gated = self.activation_func(torch.cat([gate, inputs[:, :, self._index]], dim=-1))
            hidden = hidden + self.projection(gated)[0]
        return hidden * self.scalar


class PerLayerEmbedding(MegatronModule):
    """Computes the per-layer inputs of all layers from a pack's tokens and their embeddings.

    A layer's input has w channels: ``(norm(P e / sqrt(hidden)) + sqrt(w) t) / sqrt(2)``, where e is
    the token's embedding, ``P [w, hidden]`` the layer's part of the matrix ``projection``, and
    ``t [w]`` the layer's part of the token's row in ``table``. The norm is over the w channels.
    Tensor parallelism splits the rows of ``table``. All ranks compute ``P e`` and the norm.

    Attributes:
        invariant_rows: fixed number of rows of a matmul in evaluation mode; None means no fixed
            number.
    """

    invariant_rows: int | None = None

    def __init__(self, config: TransformerConfig, shape: ModelShape, rows: int) -> None:
        super().__init__(config)
        assert shape.gemma4 is not None
        assert shape.gemma4.per_layer_width is not None
        self._width, self._group = (
            shape.gemma4.per_layer_width,
            parallel_state.get_tensor_model_parallel_group(),
        )
        width = shape.num_layers * self._width
        self.table = VocabParallelEmbedding(
            rows, width, init_method=config.init_method, config=config, tp_group=self._group
        )
        # Padding rows of the vocabulary are neither read nor loaded.
        torch.nn.init.zeros_(self.table.weight)
        kind = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.projection = torch.nn.Linear(shape.hidden_size, width, bias=False, **kind)
        # Every rank has all tokens here, and so the whole gradient of the norm's weight, which must
        # not be summed over the ranks, as Megatron does under sequence parallelism.
        inner = copy(config)
        inner.sequence_parallel = False
        self.norm = SequenceParallelRMSNorm(inner, self._width, eps=config.layernorm_epsilon)

    def forward(self, tokens: Tensor, embedded: Tensor) -> Tensor:
        """Compute ``[T, 1, L, w / ranks]``, this rank's channels of the inputs of L layers.

        Args:
            tokens: ``[T]`` int64 token ids.
            embedded: ``[T, 1, hidden]`` embeddings; sequence parallelism splits T.
        """
        embedded = embedded.to(self.config.params_dtype)
        if self.config.sequence_parallel:
            embedded = tensor_parallel.gather_from_sequence_parallel_region(
                embedded, tensor_parallel_output_grad=False, group=self._group
            )
        looked_up = self.table(tokens)[:, None] * self._width**0.5
        projected = self._project(embedded) * self.config.hidden_size**-0.5
        projected, looked_up = (x.unflatten(-1, (-1, self._width)) for x in (projected, looked_up))
        inputs = (self.norm(projected) + looked_up) * 2.0**-0.5
        ranks = self._group.size()
        if ranks == 1:
            return inputs
        # This call changes nothing in the forward pass. Its backward pass sums gradients over the
        # TP ranks, each of which reads some of the channels.
        inputs = tensor_parallel.copy_to_tensor_model_parallel_region(inputs, self._group)
        return inputs.chunk(ranks, dim=-1)[self._group.rank()]

    def _project(self, embedded: Tensor) -> Tensor:
        rows = rows_now(self)
        if rows is None:
            # Call the module: its hooks wait for weights that Megatron is still gathering.
            projected: Tensor = self.projection(embedded)
            return projected
        return invariant_linear(embedded, self.projection.weight, None, rows)
