"""Decoder: a ModelShape as megatron-core's config and layer spec, and the layers themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from nemo_aligner.config.common import Precision
from nemo_aligner.config.dtypes import torch_dtype
from nemo_aligner.config.model import ContextExchange, Recompute
from nemo_aligner.cpu import kernels
from nemo_aligner.cpu.products import MOST_ROWS
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.activations import ACTIVATIONS
from nemo_aligner.models.attention.packed import LastTokenAttention, PackedAttention
from nemo_aligner.models.experts import MixtureOfExperts
from nemo_aligner.models.internals import (
    add_weight_gradients_on_gpu,
    has_weight_gradient_kernel,
    mlp_spec,
)
from nemo_aligner.models.layers import (
    NORMS,
    ColumnLinear,
    NoNorm,
    RowLinear,
    SequenceParallelRMSNorm,
    learns,
    rows_now,
    sum_in_rank_order,
)
from nemo_aligner.models.pack_context import Balance, PackContext
from nemo_aligner.models.pointwise.eager import Shared, rms_norm
from nemo_aligner.models.pointwise.operations import EAGER, PointwiseKernels
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.utils.errors import ConfigError


def transformer_config(
    shape: ModelShape,
    layout: ParallelLayout,
    precision: Precision,
    recompute: Recompute,
    recompute_layers: int | None = None,
) -> TransformerConfig:
    """Build megatron-core's config of ``shape`` at ``layout``.

    Args:
        recompute_layers: how many of a pipeline stage's layers, from its first,
            ``Recompute.full`` recomputes; None is all.

    Raises:
        ConfigError: the layout does not divide heads, query groups or layers, or a stage has fewer
            layers than are to be recomputed.
    """
    shape.check_fits(layout.tp, layout.pp, layout.ep)
    dtype = torch_dtype(precision)
    add_weight_gradients_on_gpu()
    return TransformerConfig(
        **_shape_options(shape),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        sequence_parallel=layout.sequence_parallel,
        cp_comm_type=(ContextExchange.p2p if layout.ring else ContextExchange.all_gather).value,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=precision is Precision.bf16,
        fp16=precision is Precision.fp16,
        # Packs differ in length. megatron-core demands this dispatcher beside it, MoE or not.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # Gradients are summed over the step and divided once by the global count.
        calculate_per_token_loss=True,
        # Weights come from a checkpoint. perform_initialization=False would also skip the
        # tensor_model_parallel attributes, by which the gradient norm tells sharded weights from
        # replicated ones.
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
        gradient_accumulation_fusion=can_accumulate_weight_gradients(shape, dtype),
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **_recompute_options(recompute, recompute_layers, shape.num_layers // layout.pp),
    )


def _shape_options(shape: ModelShape) -> dict[str, Any]:
    is_rms = shape.normalization == "rmsnorm"
    return {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_query_groups": shape.num_query_groups,
        "kv_channels": shape.kv_channels,
        "normalization": "RMSNorm" if is_rms else "LayerNorm",
        "layernorm_zero_centered_gamma": shape.layernorm_zero_centered_gamma,
        "layernorm_epsilon": shape.layernorm_epsilon,
        "gated_linear_unit": shape.is_gated,
        # The MLP calls the activation of the layer spec. Despite its name the option needs no
        # TransformerEngine; activation_func is only checked to be a supported one.
        "use_te_activation_func": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": shape.qkv_bias,
        # Tells Megatron to sum the gradients of these norms over the TP ranks, each of which sees
        # only its own heads.
        "qk_layernorm": shape.qk_layernorm,
    }


def can_accumulate_weight_gradients(shape: ModelShape, dtype: torch.dtype) -> bool:
    """Tell if weight gradients are accumulated in Megatron's buffer by the GEMM itself.

    The model can then be trained only inside Megatron's data parallel wrapper, which owns the
    buffer (``main_grad``).
    """
    return use_transformer_engine(shape, dtype) or has_weight_gradient_kernel()


def _leave_as_is(weight: Tensor) -> Tensor:
    return weight


def _recompute_options(
    recompute: Recompute, num_layers: int | None, layers_of_stage: int
) -> dict[str, Any]:
    if num_layers is not None and num_layers > layers_of_stage:
        raise ConfigError(
            f"model.activations_checkpoint_num_layers: got {num_layers}, wanted at most "
            f"{layers_of_stage}, the layers of a pipeline stage"
        )
    if recompute is Recompute.full:
        return {
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": num_layers or layers_of_stage,
        }
    if recompute is Recompute.selective:
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {}


class NormedRowLinear(RowLinear):
    """Row-parallel linear layer followed by a norm of its output, as in Gemma 2."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any
    ) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        norm = NORMS[config.normalization]
        self.post_layernorm = norm(config, output_size, eps=config.layernorm_epsilon)

    def forward(
        self, x: Tensor, context: PackContext | None = None
    ) -> tuple[Tensor, Tensor | None]:
        if rows_now(self) is not None:
            return self.infer(x), None
        output, bias = super().forward(x, context)
        return self.post_layernorm(output), bias

    def infer(self, x: Tensor) -> Tensor:
        return self.post_layernorm.forward(super().infer(x))


class AcrossHeadsRMSNorm(SequenceParallelRMSNorm):
    """RMSNorm of all heads of ``[T, ..., c]`` together, which tensor parallelism splits.

    The weight is whole on every rank, as Megatron sums the gradients of the weights of such norms
    over the TP ranks. In inference the ranks' sums are added in rank order.

    Attributes:
        heads: of all ranks; ``zero_heads`` of them are zeros, which are no part of the mean. Of the
            class, because megatron-core calls a constructor without them.
    """

    heads: int
    zero_heads: int

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any
    ) -> None:
        super().__init__(config, self.heads * hidden_size, eps)
        self._group = parallel_state.get_tensor_model_parallel_group()
        self._is_plain = self._group.size() == 1 and self.zero_heads == 0
        self._shared = Shared((self.heads - self.zero_heads) * hidden_size, self._total)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        rows = x.flatten(1)
        if self._is_plain:
            return super().forward(rows).view(x.shape)
        width = rows.size(-1)
        weight = self.weight.narrow(0, self._group.rank() * width, width)
        if self._offset:
            weight = weight.float() + self._offset
        return rms_norm(rows, weight, self._eps, self._dtype, self._shared).view(x.shape)

    def _total(self, partial: Tensor) -> Tensor:
        if self._group.size() > 2 and not learns(self):
            return sum_in_rank_order(partial, self._group, is_scattered=False)
        dist.all_reduce(partial, group=self._group)
        return partial


@dataclass(frozen=True)
class _Parts:
    """Modules of a layer; TransformerEngine fuses a norm with the linear layer behind it."""

    norm: Any
    other_norm: Any
    norm_linear: Any
    row_linear: Any
    key_map: dict[str, str]

    def mlp_norm(self, shape: ModelShape) -> tuple[Any, dict[str, str]]:
        """The norm before the MLP, and how checkpoints name a layer's norms.

        No linear layer is behind the norm before a mixture of experts.
        """
        if shape.experts is None:
            return self.norm, self.key_map
        names = {name: key for name, key in self.key_map.items() if name != _MLP_NORM}
        return (self.other_norm if shape.pre_layernorms else NoNorm), names


_MLP_NORM = "pre_mlp_layernorm."


def _torch_parts(config: TransformerConfig, shape: ModelShape) -> _Parts:
    norm = NORMS[config.normalization]
    return _Parts(
        norm=norm if shape.pre_layernorms else NoNorm,
        other_norm=norm,
        norm_linear=ColumnLinear,
        row_linear=NormedRowLinear if shape.post_layernorms else RowLinear,
        # Checkpoints name a norm after the linear layer it feeds, as TransformerEngine does.
        key_map={
            "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
            _MLP_NORM: "mlp.linear_fc1.layer_norm_",
        },
    )


def _transformer_engine_parts() -> _Parts:
    from megatron.core.extensions.transformer_engine import (
        TELayerNormColumnParallelLinear,
        TENorm,
        TERowParallelLinear,
    )

    return _Parts(
        norm=IdentityOp,
        other_norm=TENorm,
        norm_linear=TELayerNormColumnParallelLinear,
        row_linear=TERowParallelLinear,
        key_map={},
    )


def use_transformer_engine(shape: ModelShape, dtype: torch.dtype) -> bool:
    """Tell if layers are built from TransformerEngine: on a GPU, where it is installed.

    Not for models with a norm behind a linear layer or without one before it, or with LoRA, which
    its fused layers lack, nor in fp32, which it rounds to TF32 whatever torch's precision setting.
    """
    has_parts = torch.cuda.is_available() and find_spec("transformer_engine") is not None
    has_its_norms = shape.pre_layernorms and not shape.post_layernorms
    is_made_of_them = has_its_norms and shape.lora is None
    return has_parts and is_made_of_them and dtype is not torch.float32


def layer_spec(
    config: TransformerConfig, shape: ModelShape, is_last_stage: bool
) -> TransformerBlockSubmodules:
    """Spec of the decoder layers of this rank's pipeline stage."""
    has_engine = use_transformer_engine(shape, config.params_dtype)
    parts = _transformer_engine_parts() if has_engine else _torch_parts(config, shape)
    spec = _layer(parts, shape, PackedLayer, PackedAttention)
    specs = [spec] * get_num_layers_to_build(config)
    if is_last_stage:
        specs[-1] = _layer(parts, shape, LastLayer, LastTokenAttention)
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=parts.other_norm)


def _residual_add(multiplier: float) -> Callable[[bool, bool], Callable[..., Tensor]]:
    """Plain residual addition for megatron-core's bias-dropout-add: there is no bias or dropout.

    Before 0.19 megatron-core's own would round an fp32 residual stream to the dtype of ``output``.
    """

    def add(output_and_bias: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
        output, _ = output_and_bias
        return torch.add(residual, output, alpha=multiplier)

    def choose(training: bool, fused: bool) -> Callable[..., Tensor]:
        return add

    return choose


def _query_key_norms(parts: _Parts, shape: ModelShape) -> tuple[Any, Any]:
    if not shape.qk_layernorm:
        return IdentityOp, IdentityOp
    if not shape.qk_layernorm_across_heads:
        return parts.other_norm, parts.other_norm
    groups, zeros = shape.num_query_groups, shape.zero_query_groups
    query, key = (
        {"heads": each * groups, "zero_heads": each * zeros}
        for each in (shape.num_attention_heads // groups, 1)
    )
    across = (AcrossHeadsRMSNorm,)
    return type("QueryNorm", across, query), type("KeyNorm", across, key)


def _layer(parts: _Parts, shape: ModelShape, layer: type, core_attention: type) -> ModuleSpec:
    query_norm, key_norm = _query_key_norms(parts, shape)
    add = _residual_add(shape.residual_multiplier)
    attention = SelfAttentionSubmodules(
        linear_qkv=parts.norm_linear,
        core_attention=partial(core_attention, shape=shape),
        linear_proj=parts.row_linear,
        q_layernorm=query_norm,
        k_layernorm=key_norm,
    )
    mlp = MLPSubmodules(
        linear_fc1=parts.norm_linear,
        linear_fc2=parts.row_linear,
        activation_func=ACTIVATIONS[shape.activation],
    )
    mlp_norm, key_map = parts.mlp_norm(shape)
    submodules = TransformerLayerSubmodules(
        input_layernorm=parts.norm,
        self_attention=ModuleSpec(
            module=SelfAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=attention,
        ),
        self_attn_bda=add,
        pre_mlp_layernorm=mlp_norm,
        mlp=mlp_spec(mlp) if shape.experts is None else _mixture(shape),
        mlp_bda=add,
        sharded_state_dict_keys_map=key_map,
    )
    options = {"residual_multiplier": shape.residual_multiplier}
    return ModuleSpec(module=layer, params=options, submodules=submodules)


def _mixture(shape: ModelShape) -> type:
    options = {"shape": shape.experts, "activation": ACTIVATIONS[shape.activation]}
    return type("Experts", (MixtureOfExperts,), options)


# Decoder layers: megatron-core's, with shorter code paths through them.


class PackedLayer(TransformerLayer):
    """``[T, 1, hidden] -> [T, 1, hidden]``; sequence parallelism splits T over TP.

    It calls megatron-core's modules one after the other, without the rest of megatron-core's layer,
    which has 330 operations, most of which take longer to launch than to compute. What a module
    needs to know of the pack it gets as an argument, from the ``PackContext`` that megatron-core
    hands to every layer as ``packed_seq_params``.

    Args:
        residual_multiplier: factor of what is added to the residual stream.

    Attributes:
        pointwise: the kernels between the matmuls, except for scoring on a CPU.
    """

    pointwise: PointwiseKernels = EAGER

    def __init__(self, *args: Any, residual_multiplier: float = 1.0, **options: Any) -> None:
        super().__init__(*args, **options)
        self._multiplier = residual_multiplier

    def forward(
        self,
        hidden_states: Tensor,
        *unused: Any,
        packed_seq_params: PackContext | None = None,
        **unused_options: Any,
    ) -> tuple[Tensor, None]:
        if packed_seq_params is None:
            raise ValueError("a layer needs the PackContext of its pack as packed_seq_params")
        if isinstance(self.input_layernorm, IdentityOp):
            compute = self._call_engine
        else:
            compute = self._learn if learns(self) else self._infer
        return compute(hidden_states, packed_seq_params), None

    def _call_engine(self, hidden: Tensor, context: PackContext) -> Tensor:
        """Compute the layer by TransformerEngine's modules, which fuse the norms."""
        attended, _ = self.self_attention(
            self.input_layernorm(hidden), attention_mask=None, packed_seq_params=context
        )
        hidden = torch.add(self._read(hidden, context), attended, alpha=self._multiplier)
        normed = self.pre_mlp_layernorm(hidden)
        if isinstance(self.mlp, MixtureOfExperts):
            added, _ = self.mlp(normed, self._balance(context))
        else:
            added, _ = self.mlp(normed)
        return torch.add(hidden, added, alpha=self._multiplier)

    def _learn(self, hidden: Tensor, context: PackContext) -> Tensor:
        """Compute the layer with gradients.

        Modules are called, not their ``forward``: their hooks wait for weights that Megatron is
        still gathering.
        """
        attended = self._attend_in_training(self.input_layernorm(hidden), context)
        added, _ = self.self_attention.linear_proj(attended, context=context)
        hidden = self._read(hidden, context)
        if isinstance(self.mlp, MixtureOfExperts):
            # Not fused, like the split of heads: both have always rounded twice in such layers.
            hidden = torch.add(hidden, added, alpha=self._multiplier)
            added, _ = self.mlp(self.pre_mlp_layernorm(hidden), self._balance(context))
        else:
            hidden, normed = self._add_and_norm(hidden, added)
            inner, _ = self.mlp.linear_fc1(normed, context=context)
            activated = self.mlp.activation_func(inner)
            added, _ = self.mlp.linear_fc2(activated, context=context)
        return torch.add(hidden, added, alpha=self._multiplier)

    def _add_and_norm(self, hidden: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(self.pre_mlp_layernorm, SequenceParallelRMSNorm):
            return self.pre_mlp_layernorm(hidden, added, self._multiplier)
        hidden = torch.add(hidden, added, alpha=self._multiplier)
        return hidden, self.pre_mlp_layernorm(hidden)

    def _attend_in_training(self, normed: Tensor, context: PackContext) -> Tensor:
        """Compute attention of the normed ``[T, 1, hidden]`` -> ``[T, 1, heads * c]``."""
        attention = self.self_attention
        core = attention.core_attention
        mixed, _ = attention.linear_qkv(normed, context=context)
        if self._splits_and_rotates and not isinstance(self.mlp, MixtureOfExperts):
            heads = self._split_and_rotate(mixed, context)
            attend = partial(core.attend, context=context)
        else:
            heads = self._split(mixed)
            attend = partial(core, packed_seq_params=context)
        if attention.checkpoint_core_attention and self.training:
            return tensor_parallel.checkpoint(attend, False, *heads)
        return attend(*heads)

    def _split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split what linear_qkv returns as megatron-core's SelfAttention does.

        Args:
            mixed: ``[T, 1, groups * (repeats + 2) * c]``: for each group the channels of its query
                heads, of its key and of its value.

        Returns:
            Queries ``[T, 1, heads, c]``, keys and values ``[T, 1, groups, c]``, normed if the model
            norms queries and keys, and not rotated yet.
        """
        attention = self.self_attention
        channels = attention.hidden_size_per_attention_head
        grouped = mixed.view(*mixed.shape[:-1], attention.num_query_groups_per_partition, -1)
        widths = [grouped.size(-1) - 2 * channels, channels, channels]
        query, key, value = torch.split(grouped, widths, dim=-1)
        query = query.reshape(*query.shape[:2], -1, channels)
        if self.config.qk_layernorm:  # else megatron-core has None there, or an IdentityOp
            query, key = attention.q_layernorm(query), attention.k_layernorm(key)
        return query, key, value

    @property
    def _splits_and_rotates(self) -> bool:
        """Tell if a kernel makes heads of what linear_qkv returns.

        It does not norm queries and keys, and is not for layers without RoPE.
        """
        has_rope = self.self_attention.core_attention.rotation is not None
        has_kernel = self.pointwise.split_and_rotate is not None
        return has_kernel and has_rope and not self.config.qk_layernorm

    def _split_and_rotate(
        self, mixed: Tensor, context: PackContext
    ) -> tuple[Tensor, Tensor, Tensor]:
        attention, split_and_rotate = self.self_attention, self.pointwise.split_and_rotate
        assert split_and_rotate is not None
        cos, sin = context.tables[attention.core_attention.rotation]
        groups = attention.num_query_groups_per_partition
        return split_and_rotate(mixed, cos, sin, groups, attention.hidden_size_per_attention_head)

    def _balance(self, context: PackContext) -> Balance:
        """What the router of this layer counts."""
        return context.balance

    def _infer(self, hidden: Tensor, context: PackContext) -> Tensor:
        mixed = self.self_attention.linear_qkv.infer(self.input_layernorm.forward(hidden))
        attended = self._attend(mixed, context)
        hidden = self._read(hidden, context)
        is_by_rows = not (self.config.sequence_parallel or isinstance(self.mlp, MixtureOfExperts))
        if hidden.is_cpu and is_by_rows and hidden.size(0) > MOST_ROWS:
            # Matmuls are cut into such chunks anyway; here what lies between them is not joined.
            parts = zip(attended.split(MOST_ROWS), hidden.split(MOST_ROWS), strict=True)
            return torch.cat([self._finish(*part) for part in parts])
        return self._finish(attended, hidden)

    def _finish(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """What comes behind attention, of any rows."""
        added = self.self_attention.linear_proj.infer(attended)
        norm = self.pre_mlp_layernorm
        can_add = self._multiplier == 1 and kernels.can_add(hidden, added)
        if can_add and isinstance(norm, SequenceParallelRMSNorm) and norm.is_kernels:
            normed = norm.add(hidden, added)
        elif hidden.is_cuda:
            hidden, normed = self._add_and_norm(hidden, added)
        else:
            hidden = self._sum(added, hidden)
            normed = norm.forward(hidden)
        return self._sum(self._mlp(normed), hidden)

    def _mlp(self, normed: Tensor) -> Tensor:
        mlp = self.mlp
        if isinstance(mlp, MixtureOfExperts):
            return mlp.infer(normed)
        inner = mlp.linear_fc1.infer(normed)
        return mlp.linear_fc2.infer(mlp.activation_func.forward(inner))

    def _sum(self, added: Tensor, hidden: Tensor) -> Tensor:
        """Add to the residual stream, in its memory or that of what a product has just made."""
        if self._multiplier == 1 and kernels.can_add(hidden, added):
            kernels.add(hidden, added)
            return hidden
        if self._multiplier != 1:
            # By two roundings: one with a fused product depends on the place in a vector.
            added = added.to(hidden.dtype) * self._multiplier
        return added.add_(hidden) if added.dtype is hidden.dtype else hidden + added

    def _attend(self, mixed: Tensor, context: PackContext) -> Tensor:
        """``[T, 1, groups * (repeats + 2) * c]``, of linear_qkv, -> ``[T, 1, heads * c]``."""
        attention = self.self_attention
        core = attention.core_attention
        if mixed.is_cuda and self._splits_and_rotates:
            return core.attend(*self._split_and_rotate(mixed, context), context)
        groups = attention.num_query_groups_per_partition
        grouped = mixed.view(mixed.size(0), groups, -1, attention.hidden_size_per_attention_head)
        joined, value = grouped[:, :, :-1], grouped[:, :, -1]
        if self.config.qk_layernorm:  # else megatron-core has None there, or an IdentityOp
            query, key = joined[:, :, :-1], joined[:, :, -1:]
            normed = attention.q_layernorm(query), attention.k_layernorm(key)
            joined = torch.cat(normed, dim=2)
        infer = core.infer_on_cpu if mixed.is_cpu else core.infer_on_gpu
        return infer(joined, value, context)

    def _read(self, hidden: Tensor, context: PackContext) -> Tensor:
        """The rows of the residual stream that the rest of the layer computes."""
        return hidden


class LastLayer(PackedLayer):
    """The layer before the head, ``[T, 1, hidden] -> [R, 1, hidden]``; TP splits T and R.

    Behind its attention, which is a ``LastTokenAttention``, it computes only the rows that the
    reward head reads: everything there works row by row.
    """

    def _balance(self, context: PackContext) -> Balance:
        return context.balance_of_read_rows

    def _read(self, hidden: Tensor, context: PackContext) -> Tensor:
        rows = context.read_rows
        if not self.config.sequence_parallel:
            return hidden[rows]
        group = self.pg_collection.tp
        local = rows - group.rank() * hidden.size(0)
        is_local = (local >= 0) & (local < hidden.size(0))
        # Masked fill rather than multiplying by 0, which would keep another record's NaN.
        read = hidden[local.clamp(0, hidden.size(0) - 1)].masked_fill(~is_local[:, None, None], 0.0)
        return tensor_parallel.reduce_scatter_to_sequence_parallel_region(read, group=group)
