"""Decoder layers that call megatron-core's modules more directly than its own layers do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from nemo_aligner.cpu import kernels
from nemo_aligner.cpu.matmuls import MOST_ROWS
from nemo_aligner.models.attention.packed import Norms, norm_joined
from nemo_aligner.models.experts import MixtureOfExperts
from nemo_aligner.models.layers import SequenceParallelRMSNorm, learns
from nemo_aligner.models.pack_context import Balance, PackContext
from nemo_aligner.models.pointwise.eager import by_whole_rows
from nemo_aligner.models.pointwise.operations import EAGER, PointwiseKernels


class PackedLayer(TransformerLayer):
    """Decoder layer ``[T, 1, hidden] -> [T, 1, hidden]``; sequence parallelism splits T over TP.

    It calls the modules of megatron-core's layer directly. megatron-core's own ``forward`` runs 330
    operations, and most of them take longer to launch than to compute. megatron-core passes the
    ``PackContext`` to every layer as ``packed_seq_params``, and the layer passes it on to the
    modules that need it.

    Args:
        residual_multiplier: factor of the outputs of attention and MLP before they are added.
        parallel_residual: the MLP reads the layer's normed input, not the sum with attention.
        one_norm: the layer has a single norm, whose output both attention and the MLP read.
        sizes: fields of megatron-core's config in which this layer differs from the others.
        output: builds a module, from the config and the layer's number, that computes the layer's
            output from the residual stream and ``PackContext.per_layer_inputs``; None for none.

    Attributes:
        pointwise: kernels of the operations between the matmuls, in training and on a GPU. Scoring
            on a CPU uses others.
        is_recomputed: in training, keep only the layer's input, and compute the layer again in the
            backward pass (``GPTRewardModel.recompute_layers``).
    """

    pointwise: PointwiseKernels = EAGER
    is_recomputed = False

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        residual_multiplier: float = 1.0,
        parallel_residual: bool = False,
        one_norm: bool = False,
        sizes: Mapping[str, int] | None = None,
        output: Callable[[TransformerConfig, int], Any] | None = None,
        **options: Any,
    ) -> None:
        if sizes is not None:
            config = copy(config)
            vars(config).update(sizes)
        super().__init__(config, *args, **options)
        self.layer_output = None if output is None else output(config, self.layer_number)
        self._multiplier = residual_multiplier
        self._is_parallel = parallel_residual
        self._has_one_norm = one_norm

    def forward(
        self,
        hidden_states: Tensor,
        *unused: Any,
        packed_seq_params: PackContext | None = None,
        **unused_options: Any,
    ) -> tuple[Tensor, None]:
        if packed_seq_params is None:
            raise ValueError(
                "a layer got no PackContext. Pass the pack's PackContext as packed_seq_params."
            )
        if not (self.is_recomputed and self.training and self._has_backward(hidden_states)):
            return self._compute(hidden_states, packed_seq_params), None
        if not hidden_states.requires_grad:
            # Reentrant checkpointing returns gradients only if an input requires one. After a
            # frozen embedding or layer none does.
            hidden_states = hidden_states.detach().requires_grad_()
        compute = partial(self._compute, context=packed_seq_params)
        return tensor_parallel.checkpoint(compute, False, hidden_states), None

    def _has_backward(self, hidden: Tensor) -> bool:
        """Tell if the layer's input ``hidden`` or one of its weights needs a gradient."""
        return hidden.requires_grad or any(weight.requires_grad for weight in self.parameters())

    def _compute(self, hidden: Tensor, context: PackContext) -> Tensor:
        """Compute ``forward``, which may run it twice (``is_recomputed``)."""
        if isinstance(self.input_layernorm, IdentityOp):
            compute = self._call_engine
        else:
            compute = self._learn if learns(self) else self._infer
        hidden = compute(hidden, context)
        if self.layer_output is not None:
            inputs = context.per_layer_inputs
            if inputs is not None:
                inputs = self._select_attended(inputs, context)
            hidden = self.layer_output(hidden, inputs)
        return hidden

    def _call_engine(self, hidden: Tensor, context: PackContext) -> Tensor:
        """Compute the layer by calling TransformerEngine's modules, which have the norms inside."""
        attended, _ = self.self_attention(
            self.input_layernorm(hidden), attention_mask=None, packed_seq_params=context
        )
        hidden = torch.add(self._select_rows(hidden, context), attended, alpha=self._multiplier)
        normed = self.pre_mlp_layernorm(hidden)
        if isinstance(self.mlp, MixtureOfExperts):
            added, _ = self.mlp(normed, self._balance(context))
        else:
            added, _ = self.mlp(normed)
        return torch.add(hidden, added, alpha=self._multiplier)

    def _learn(self, hidden: Tensor, context: PackContext) -> Tensor:
        """Compute the layer with gradients.

        It calls modules rather than their ``forward``, so that their hooks run. Megatron's hooks
        wait until a module's weights have been gathered from the data parallel ranks.
        """
        if not self._has_mixer:
            hidden = self._select_rows(hidden, context)
            added = self._mlp_in_training(self._mlp_norm(hidden), context)
            return torch.add(hidden, added, alpha=self._multiplier)
        attended = self._attend_in_training(self.input_layernorm(hidden), context)
        added, _ = self.self_attention.linear_proj(attended, context=context)
        hidden = self._select_rows(hidden, context)
        if not self._has_mlp:
            return torch.add(hidden, added, alpha=self._multiplier)
        if isinstance(self.mlp, MixtureOfExperts):
            # MoE layers do not use the fused kernels (sum and norm, split of heads): earlier
            # versions did not either, and a resumed run has to round as it did under them.
            hidden = torch.add(hidden, added, alpha=self._multiplier)
            normed = self._mlp_norm(hidden)
        else:
            hidden, normed = self._add_and_norm(hidden, added)
        return torch.add(hidden, self._mlp_in_training(normed, context), alpha=self._multiplier)

    def _mlp_in_training(self, normed: Tensor, context: PackContext) -> Tensor:
        """Compute the MLP, or the experts, of normed hidden states, with gradients."""
        if isinstance(self.mlp, MixtureOfExperts):
            added, _ = self.mlp(normed, self._balance(context))
            return added
        inner, _ = self.mlp.linear_fc1(normed, context=context)
        activated = self.mlp.activation_func(inner)
        added, _ = self.mlp.linear_fc2(activated, context=context)
        return added

    @property
    def _has_mixer(self) -> bool:
        """False for a layer of a hybrid model that is an MLP alone: ``x + mlp(norm(x))``."""
        return not isinstance(self.self_attention, IdentityOp)

    @property
    def _has_mlp(self) -> bool:
        """False for a layer of a hybrid model that is a mixer alone: ``x + mixer(norm(x))``."""
        return not isinstance(self.mlp, IdentityOp)

    @property
    def _mlp_norm(self) -> Any:
        """The norm of the MLP's input: the layer's input norm, if the layer has only one norm."""
        return self.input_layernorm if self._has_one_norm else self.pre_mlp_layernorm

    def _add_and_norm(self, hidden: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        """Add attention's output to the residual stream; return the sum, and the MLP's input."""
        if self._is_parallel:
            normed = self._mlp_norm(hidden)
            return torch.add(hidden, added, alpha=self._multiplier), normed
        if isinstance(self._mlp_norm, SequenceParallelRMSNorm):
            return self._mlp_norm(hidden, added, self._multiplier)
        hidden = torch.add(hidden, added, alpha=self._multiplier)
        return hidden, self._mlp_norm(hidden)

    def _attend_in_training(self, normed: Tensor, context: PackContext) -> Tensor:
        """Compute attention of normed hidden states, with gradients -> ``[T, 1, heads * c]``."""
        attention = self.self_attention
        mixed, _ = attention.linear_qkv(normed, context=context)
        if self._has_attend:
            return attention.attend(mixed, context)
        attended = self._attend_to_keys(mixed, context)
        if self.config.attention_output_gate:
            gate = self._split_groups(mixed)[1].flatten(2)
            attended = attended * self._select_attended(gate, context).sigmoid()
        return attended

    @property
    def _has_attend(self) -> bool:
        """True if the attention module's ``attend`` computes all between its two linear layers.

        Linear and latent attention have this method. For megatron-core's SelfAttention,
        ``PackedLayer`` itself computes what lies between ``linear_qkv`` and ``linear_proj``.
        """
        return hasattr(self.self_attention, "attend")

    def _attend_to_keys(self, mixed: Tensor, context: PackContext) -> Tensor:
        """Compute the attention of megatron-core's SelfAttention in training.

        Args:
            mixed: the output of linear_qkv. The caller applies its output gates, if any.
        """
        attention = self.self_attention
        core = attention.core_attention
        # Megatron's hooks, which wait until parameters have been gathered, run only when a module
        # is called. Sinks are parameters of ``core``, so ``core`` has to be called then.
        is_plain = core.softmax_offset is None and not isinstance(self.mlp, MixtureOfExperts)
        if self._splits_and_rotates and is_plain:
            heads = self._split_and_rotate(mixed, context)
            attend = partial(core.attend, context=context)
        else:
            heads = self._split_heads(mixed)
            attend = partial(core, packed_seq_params=context, norms=self._norms_after_rope)
        if attention.checkpoint_core_attention and self.training:
            return tensor_parallel.checkpoint(attend, False, *heads)
        return attend(*heads)

    def _split_heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split the output of linear_qkv into heads, as megatron-core's SelfAttention does.

        Args:
            mixed: the output of linear_qkv, in the layout that ``_split_groups`` describes.

        Returns:
            Queries ``[T, 1, heads, c]``, keys and values ``[T, 1, groups, c]``, before RoPE.
            Queries and keys are normed if the model norms them before RoPE.
        """
        attention = self.self_attention
        query, _, key, value = self._split_groups(mixed)
        query = query.reshape(*query.shape[:2], -1, attention.hidden_size_per_attention_head)
        if self._norms_before_rope:
            query, key = attention.q_layernorm(query), attention.k_layernorm(key)
        return query, key, value

    def _split_groups(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Split what linear_qkv returns into queries, output gates, keys and values.

        Args:
            mixed: ``[T, 1, groups * (repeats + 2) * c]``: for each group the channels of its query
                heads, of its key and of its value. With output gates the group has
                ``2 * repeats + 2`` heads: the gates come after the queries.

        Returns:
            Views ``[T, 1, groups, repeats * c]`` of queries and gates, and ``[T, 1, groups, c]`` of
            keys and values. In a model without output gates the view of gates is empty.
        """
        attention = self.self_attention
        channels = attention.hidden_size_per_attention_head
        grouped = mixed.view(*mixed.shape[:-1], attention.num_query_groups_per_partition, -1)
        width = grouped.size(-1) - 2 * channels
        gates = width // 2 if self.config.attention_output_gate else 0
        query, gate, key, value = grouped.split([width - gates, gates, channels, channels], dim=-1)
        return query, gate, key, value

    @property
    def _norms_before_rope(self) -> bool:
        """True if the model norms queries and keys before RoPE; False if after it or not at all."""
        after_rope = self.self_attention.core_attention.norms_after_rope
        return self.config.qk_layernorm and not after_rope

    @property
    def _norms_after_rope(self) -> Norms | None:
        """The norms of queries and keys that come after RoPE; None if the model has none there."""
        attention = self.self_attention
        if not attention.core_attention.norms_after_rope:
            return None
        return attention.q_layernorm, attention.k_layernorm

    @property
    def _splits_and_rotates(self) -> bool:
        """Tell if one fused kernel splits the output of linear_qkv into heads and applies RoPE.

        That kernel neither norms queries and keys, nor supports layers without RoPE.
        """
        has_rope = self.self_attention.core_attention.rotation is not None
        has_kernel = self.pointwise.split_and_rotate is not None
        is_plain = not (self.config.qk_layernorm or self.config.attention_output_gate)
        return has_kernel and has_rope and is_plain

    def _split_and_rotate(
        self, mixed: Tensor, context: PackContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        attention, split_and_rotate = self.self_attention, self.pointwise.split_and_rotate
        assert split_and_rotate is not None
        cos, sin = context.tables[attention.core_attention.rotation]
        groups = attention.num_query_groups_per_partition
        return split_and_rotate(mixed, cos, sin, groups, attention.hidden_size_per_attention_head)

    def _balance(self, context: PackContext) -> Balance:
        """Return which of the MLP's rows are real tokens, which this layer's router counts.

        The last layer overrides this method, because its MLP computes only the rows that the head
        reads.
        """
        return context.balance

    def _infer(self, hidden: Tensor, context: PackContext) -> Tensor:
        if not self._has_mixer:
            hidden = self._select_rows(hidden, context)
            return self._add_to_stream(self._mlp(self._mlp_norm.forward(hidden)), hidden)
        mixed = self.self_attention.linear_qkv.infer(self.input_layernorm.forward(hidden))
        attended = self._attend(mixed, context)
        hidden = self._select_rows(hidden, context)
        is_by_rows = not (self.config.sequence_parallel or isinstance(self.mlp, MixtureOfExperts))
        if hidden.is_cpu and is_by_rows and hidden.size(0) > MOST_ROWS:
            # On a CPU matmuls run in chunks of MOST_ROWS rows. Splitting the rows once, here, saves
            # joining the chunks after each matmul.
            parts = zip(attended.split(MOST_ROWS), hidden.split(MOST_ROWS), strict=True)
            return torch.cat([self._infer_behind_attention(*part) for part in parts])
        return self._infer_behind_attention(attended, hidden)

    def _infer_behind_attention(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """Compute the rest of the layer after attention, where every row is independent."""
        added = self.self_attention.linear_proj.infer(attended)
        if not self._has_mlp:
            return self._add_to_stream(added, hidden)
        norm = self._mlp_norm
        can_add = self._multiplier == 1 and kernels.can_add(hidden, added)
        if self._is_parallel:
            # Compute the norm before the sum, which may overwrite ``hidden``.
            normed = norm.forward(hidden)
            hidden = self._add_to_stream(added, hidden)
        elif can_add and isinstance(norm, SequenceParallelRMSNorm) and norm.uses_kernels:
            normed = norm.add(hidden, added)
        elif hidden.is_cuda:
            hidden, normed = self._add_and_norm(hidden, added)
        else:
            hidden = self._add_to_stream(added, hidden)
            normed = norm.forward(hidden)
        return self._add_to_stream(self._mlp(normed), hidden)

    def _mlp(self, normed: Tensor) -> Tensor:
        mlp = self.mlp
        if isinstance(mlp, MixtureOfExperts):
            return mlp.infer(normed)
        inner = mlp.linear_fc1.infer(normed)
        return mlp.linear_fc2.infer(mlp.activation_func.forward(inner))

    def _add_to_stream(self, added: Tensor, hidden: Tensor) -> Tensor:
        """Return ``hidden + multiplier * added``, the residual stream; may overwrite ``added``."""
        if self._multiplier == 1 and kernels.can_add(hidden, added):
            kernels.add(hidden, added)
            return hidden
        if self._multiplier != 1:
            # Round twice, after the multiplication and after the sum. In a single operation torch
            # would fuse the two for some elements and not for others, depending on their place in a
            # vector.
            added = added.to(hidden.dtype) * self._multiplier
        return added.add_(hidden) if added.dtype is hidden.dtype else hidden + added

    def _attend(self, mixed: Tensor, context: PackContext) -> Tensor:
        """Compute attention from linear_qkv's output, for inference -> ``[T, 1, heads * c]``.

        ``_split_groups`` describes that output.
        """
        attention = self.self_attention
        if self._has_attend:
            return attention.attend(mixed, context)
        core = attention.core_attention
        if mixed.is_cuda and self._splits_and_rotates:
            return core.attend(*self._split_and_rotate(mixed, context), context)
        groups = attention.num_query_groups_per_partition
        grouped = mixed.view(mixed.size(0), groups, -1, attention.hidden_size_per_attention_head)
        joined, value = grouped[:, :, :-1], grouped[:, :, -1]
        gate = None
        if self.config.attention_output_gate:
            repeats = joined.size(2) // 2
            gate = joined[:, :, repeats:-1]
            joined = torch.cat([joined[:, :, :repeats], joined[:, :, -1:]], dim=2)
        if self._norms_before_rope:
            joined = norm_joined(joined, (attention.q_layernorm, attention.k_layernorm))
        infer = core.infer_on_cpu if mixed.is_cpu else core.infer_on_gpu
        attended = infer(joined, value, context, self._norms_after_rope)
        if gate is not None:
            # Copy the view: otherwise its strides decide how torch splits the elements over
            # threads.
            gate = self._select_attended(gate, context).flatten(1).unsqueeze(1).contiguous()
            is_cpu = gate.is_cpu
            factors = (
                by_whole_rows(torch.sigmoid, gate, is_gated=False) if is_cpu else gate.sigmoid()
            )
            attended = attended * factors
        return attended

    def _select_attended(self, rows: Tensor, context: PackContext) -> Tensor:
        """Select the rows of ``[T, ...]`` that attention returns: all, except in ``LastLayer``."""
        return rows

    def _select_rows(self, hidden: Tensor, context: PackContext) -> Tensor:
        """Return the rows that the layer computes after attention: all, except in ``LastLayer``."""
        return hidden


class LastLayer(PackedLayer):
    """The last decoder layer, ``[T, 1, hidden] -> [R, 1, hidden]``.

    After attention, a ``LastTokenAttention``, it computes only the R rows that the reward head
    reads, because the MLP and the norms work row by row. Sequence parallelism splits T and R over
    the TP ranks.
    """

    def _balance(self, context: PackContext) -> Balance:
        return context.balance_of_read_rows

    def _select_attended(self, rows: Tensor, context: PackContext) -> Tensor:
        return rows[context.read_rows]

    def _select_rows(self, hidden: Tensor, context: PackContext) -> Tensor:
        rows = context.read_rows
        if not self.config.sequence_parallel:
            return hidden[rows]
        group = self.pg_collection.tp
        local = rows - group.rank() * hidden.size(0)
        is_local = (local >= 0) & (local < hidden.size(0))
        # Zero the rows of other ranks by a masked fill: NaN times 0 would stay NaN.
        read = hidden[local.clamp(0, hidden.size(0) - 1)].masked_fill(~is_local[:, None, None], 0.0)
        return tensor_parallel.reduce_scatter_to_sequence_parallel_region(read, group=group)
