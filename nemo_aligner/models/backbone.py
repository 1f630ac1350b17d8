"""megatron-core's config and layer spec for the decoder that a ``ModelShape`` describes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
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
from megatron.core.transformer.transformer_layer import (
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor

from nemo_aligner.config.common import Precision
from nemo_aligner.config.dtypes import torch_dtype
from nemo_aligner.config.model import ContextExchange, Recompute
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.activations import ACTIVATIONS
from nemo_aligner.models.attention.packed import LastTokenAttention, PackedAttention
from nemo_aligner.models.decoder_layer import LastLayer, PackedLayer
from nemo_aligner.models.experts import MixtureOfExperts
from nemo_aligner.models.gemma4 import Gemma4Attention, Gemma4Experts, Gemma4Output
from nemo_aligner.models.internals import (
    add_weight_gradients_on_gpu,
    has_weight_gradient_kernel,
    mlp_spec,
)
from nemo_aligner.models.latent_attention import LatentAttention
from nemo_aligner.models.layers import (
    NORMS,
    BiaslessLayerNorm,
    ColumnLinear,
    NoNorm,
    RowLinear,
    SequenceParallelRMSNorm,
    learns,
    rows_now,
    sum_in_rank_order,
)
from nemo_aligner.models.linear_attention import GatedDeltaNet
from nemo_aligner.models.mamba import Mamba2
from nemo_aligner.models.pack_context import PackContext
from nemo_aligner.models.pointwise.eager import Shared, rms_norm
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.linear_attention import Mamba2Shape
from nemo_aligner.utils.errors import ConfigError


def transformer_config(
    shape: ModelShape,
    layout: ParallelLayout,
    precision: Precision,
    recompute: Recompute,
) -> TransformerConfig:
    """Build megatron-core's config for a model of ``shape`` that ``layout`` splits.

    Raises:
        ConfigError: the model does not support the layout.
    """
    shape.check_fits(layout.tp, layout.pp, layout.ep, layout.cp)
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
        # Packs differ in length, and megatron-core then requires this dispatcher, even without MoE.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # Gradients are summed over all micro-batches of a step, and divided once by the number
        # of losses on all ranks.
        calculate_per_token_loss=True,
        # Weights come from a checkpoint, so nothing is initialised. perform_initialization=False
        # would also skip the tensor_model_parallel attributes, by which the gradient norm tells
        # sharded weights from replicated ones.
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
        gradient_accumulation_fusion=can_accumulate_weight_gradients(shape, dtype),
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **_recompute_options(recompute),
    )


def check_recompute(
    shape: ModelShape, pp: int, recompute: Recompute, num_layers: int | None
) -> None:
    """Check that a model's activations can be recomputed as the settings say.

    Args:
        pp: number of pipeline stages, which divides the number of layers.
        num_layers: how many layers of each stage are recomputed; None is all.

    Raises:
        ConfigError: a stage has fewer layers than ``num_layers``, or full recomputation would lose
            gradients of the model.
    """
    layers_of_stage = shape.num_layers // pp
    if num_layers is not None and num_layers > layers_of_stage:
        raise ConfigError(
            f"model.activations_checkpoint_num_layers: got {num_layers}, wanted at most "
            f"{layers_of_stage}, the number of layers in a pipeline stage"
        )
    if recompute is Recompute.full and not shape.can_recompute_fully:
        raise ConfigError(
            "model.activations_checkpoint_granularity: got full, which is not supported for a "
            "model whose layers read an earlier layer's keys or inputs of their own, because "
            "recomputation would lose their gradients. Set it to selective."
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
        # The MLP calls the activation module of the layer spec. Despite its name this option needs
        # no TransformerEngine; megatron-core only checks that activation_func is supported.
        "use_te_activation_func": True,
        "activation_func": F.silu,
        "add_bias_linear": shape.linear_bias,
        "add_qkv_bias": shape.qkv_bias,
        # With this option Megatron sums the gradients of these norms over the TP ranks. Each rank
        # sees only its own heads.
        "qk_layernorm": shape.qk_layernorm,
        "attention_output_gate": shape.attention_output_gate,
        "activation_func_clamp_value": shape.experts and shape.experts.clamp_value,
        # Checkpoints then name each layer's tensors separately. By default megatron-core stacks the
        # layers' tensors, which then need equal shapes.
        "hetereogenous_dist_checkpoint": not shape.is_uniform,
    }


def can_accumulate_weight_gradients(shape: ModelShape, dtype: torch.dtype) -> bool:
    """Tell if weight GEMMs add their result directly to Megatron's gradient buffer (``main_grad``).

    If so, the model can be trained only inside Megatron's data parallel wrapper, which owns the
    buffer.
    """
    return use_transformer_engine(shape, dtype) or has_weight_gradient_kernel()


def _leave_as_is(weight: Tensor) -> Tensor:
    return weight


def _recompute_options(recompute: Recompute) -> dict[str, Any]:
    # For Recompute.full, ``GPTRewardModel.recompute_layers`` is called instead: megatron-core would
    # recompute a stage's first layers even if they are frozen and have no backward pass.
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


class BiasedRowLinear(RowLinear):
    """Row-parallel linear layer that adds a bias, once, to the sum over the TP ranks.

    megatron-core's config has one setting for the biases of all linear layers; only attention's
    output projection is built from this class.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "bias": True, "skip_bias_add": False})


class AcrossHeadsRMSNorm(SequenceParallelRMSNorm):
    """RMSNorm of queries or keys ``[T, ..., c]`` over all heads together; TP splits the heads.

    Every rank has the full weight, because Megatron sums the gradients of such norms over the TP
    ranks. In inference the ranks' sums of squares are added in rank order.

    Attributes:
        heads: number of heads over all ranks. Like ``zero_heads`` it is set on the class, because
            megatron-core's constructor call does not pass it.
        zero_heads: how many of the heads are all zeros, added for TP; the mean excludes them.
    """

    heads: int
    zero_heads: int

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any
    ) -> None:
        super().__init__(config, self.heads * hidden_size, eps)
        self._group = parallel_state.get_tensor_model_parallel_group()
        self._is_plain = self._group.size() == 1 and self.zero_heads == 0
        self._shared = Shared((self.heads - self.zero_heads) * hidden_size, self._sum_over_ranks)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        rows = x.flatten(1)
        if self._is_plain:
            return super().forward(rows).view(x.shape)
        width = rows.size(-1)
        weight = self.weight.narrow(0, self._group.rank() * width, width)
        if self._offset:
            weight = weight.float() + self._offset
        return rms_norm(rows, weight, self._eps, self._dtype, self._shared).view(x.shape)

    def _sum_over_ranks(self, partial: Tensor) -> Tensor:
        if self._group.size() > 2 and not learns(self):
            return sum_in_rank_order(partial, self._group, is_scattered=False)
        dist.all_reduce(partial, group=self._group)
        return partial


@dataclass(frozen=True)
class _Parts:
    """The classes from which a layer is built, either torch's or TransformerEngine's.

    TransformerEngine fuses a norm with the linear layer after it. Then ``norm`` is an identity, and
    ``norm_linear`` includes the norm.

    Attributes:
        norm: norm before a linear layer.
        other_norm: norm anywhere else.
        norm_linear: column-parallel linear layer after a norm.
        row_linear: row-parallel linear layer.
        key_map: maps the name prefix of each norm's module to the prefix that checkpoints use.
        proj_linear: row-parallel output projection of attention; None means ``row_linear``.
    """

    norm: Any
    other_norm: Any
    norm_linear: Any
    row_linear: Any
    key_map: dict[str, str]
    proj_linear: Any = None

    def mlp_norm(self, shape: ModelShape) -> tuple[Any, dict[str, str]]:
        """Return the class of the norm before the MLP, and the ``key_map`` of the whole layer.

        A mixture-of-experts layer has no linear layer right after that norm, so nothing is fused,
        and the norm keeps its own name in checkpoints.
        """
        if shape.one_norm_per_layer:
            return IdentityOp, self.key_map
        if shape.experts is None:
            return self.norm, self.key_map
        names = {name: key for name, key in self.key_map.items() if name != _MLP_NORM}
        if shape.experts.branch_norms:  # a Gemma 4, whose experts read the residual stream
            return IdentityOp, names
        return (self.other_norm if shape.pre_layernorms else NoNorm), names


_MLP_NORM = "pre_mlp_layernorm."


def _torch_parts(config: TransformerConfig, shape: ModelShape) -> _Parts:
    norm = NORMS[config.normalization]
    if shape.normalization == "layernorm_without_bias":
        norm = BiaslessLayerNorm
    return _Parts(
        norm=norm if shape.pre_layernorms else NoNorm,
        other_norm=norm,
        norm_linear=ColumnLinear,
        row_linear=NormedRowLinear if shape.post_layernorms else RowLinear,
        proj_linear=BiasedRowLinear if shape.proj_bias else None,
        # As with TransformerEngine, checkpoints name a norm after the linear layer that follows it.
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
    """Tell if layers are built from TransformerEngine: if it is installed and supports the model.

    Its fused layers support neither norms after linear layers, nor linear layers without a norm
    before them, nor LoRA, nor linear or latent attention, nor hybrid models, nor output gates, nor
    norms of queries and keys after RoPE, nor the traits of a Gemma 4. The code path that calls them
    supports neither biases of all linear layers, nor one of the output projection alone, nor a
    parallel residual. In fp32 TransformerEngine rounds to TF32 whatever torch's precision setting
    is, so it is not used for fp32.
    """
    has_parts = torch.cuda.is_available() and find_spec("transformer_engine") is not None
    has_its_norms = shape.pre_layernorms and not shape.post_layernorms
    replacements = (
        shape.linear_attention,
        shape.latent_attention,
        shape.hybrid_pattern,
        shape.gemma4,
    )
    is_replaced = any(replacement is not None for replacement in replacements)
    has_other_parts = shape.attention_output_gate or shape.qk_norm_after_rope
    has_plain_attention = not (is_replaced or has_other_parts)
    has_its_norms &= shape.normalization != "layernorm_without_bias"
    has_biases = shape.linear_bias or shape.proj_bias
    has_plain_layers = not (has_biases or shape.parallel_residual)
    is_plain = has_plain_attention and has_plain_layers and shape.lora is None
    is_made_of_them = has_its_norms and is_plain
    return has_parts and is_made_of_them and dtype is not torch.float32


def layer_spec(
    config: TransformerConfig, shape: ModelShape, is_last_stage: bool
) -> TransformerBlockSubmodules:
    """Make the spec of the decoder layers of this rank's pipeline stage."""
    has_engine = use_transformer_engine(shape, config.params_dtype)
    parts = _transformer_engine_parts() if has_engine else _torch_parts(config, shape)
    first, count = get_transformer_layer_offset(config), get_num_layers_to_build(config)
    shapes = [shape.of_layer(first + index + 1) for index in range(count)]
    modules = {of_layer: _layer_module(parts, of_layer) for of_layer in dict.fromkeys(shapes)}
    specs = [modules[of_layer] for of_layer in shapes]
    if is_last_stage:
        specs[-1] = _layer_module(parts, shapes[-1], is_last=True)
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=parts.other_norm)


def _residual_add(multiplier: float) -> Callable[[bool, bool], Callable[..., Tensor]]:
    """Make the function with which megatron-core adds a module's output to the residual stream.

    It adds ``multiplier * output``. megatron-core's own function also adds a bias and applies
    dropout, which these models lack. Before 0.19 it would round an fp32 residual stream to the
    dtype of ``output``.
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
        {"heads": per_group * groups, "zero_heads": per_group * zeros}
        for per_group in (shape.num_attention_heads // groups, 1)
    )
    across = (AcrossHeadsRMSNorm,)
    return type("QueryNorm", across, query), type("KeyNorm", across, key)


def _layer_module(parts: _Parts, shape: ModelShape, *, is_last: bool = False) -> ModuleSpec:
    core_attention = LastTokenAttention if is_last else PackedAttention
    add = _residual_add(shape.residual_multiplier)
    mlp = MLPSubmodules(
        linear_fc1=parts.norm_linear,
        linear_fc2=parts.row_linear,
        activation_func=ACTIVATIONS[shape.activation],
    )
    mlp_norm, key_map = parts.mlp_norm(shape)
    submodules = TransformerLayerSubmodules(
        input_layernorm=parts.norm,
        self_attention=_attention_module(parts, shape, core_attention),
        self_attn_bda=add,
        pre_mlp_layernorm=mlp_norm,
        mlp=mlp_spec(mlp) if shape.experts is None else _expert_mlp(shape),
        mlp_bda=add,
        sharded_state_dict_keys_map=key_map,
    )
    if not shape.has_mixer:
        submodules.input_layernorm, submodules.self_attention = NoNorm, IdentityOp
    if not shape.has_mlp:
        submodules.pre_mlp_layernorm, submodules.mlp = NoNorm, IdentityOp
    options: dict[str, Any] = {
        "residual_multiplier": shape.residual_multiplier,
        "parallel_residual": shape.parallel_residual,
        "one_norm": shape.one_norm_per_layer,
    }
    if shape.gemma4 is not None:
        names = ("kv_channels", "num_query_groups", "ffn_hidden_size")
        options["sizes"] = {name: getattr(shape, name) for name in names}
        linears = parts.norm_linear, parts.row_linear
        options["output"] = partial(Gemma4Output, shape=shape, linears=linears)
    layer = LastLayer if is_last else PackedLayer
    return ModuleSpec(module=layer, params=options, submodules=submodules)


def _attention_module(parts: _Parts, shape: ModelShape, core_attention: type) -> ModuleSpec:
    if shape.linear_attention is not None:
        options = {
            "shape": shape.linear_attention,
            "linears": (parts.norm_linear, parts.row_linear),
            "reads_rows": core_attention is LastTokenAttention,
        }
        is_mamba = isinstance(shape.linear_attention, Mamba2Shape)
        return ModuleSpec(module=Mamba2 if is_mamba else GatedDeltaNet, params=options)
    if shape.latent_attention is not None or shape.gemma4 is not None:
        options = {
            "shape": shape,
            "linears": (parts.norm_linear, parts.row_linear),
            "norm": parts.other_norm,
            "core_attention": core_attention,
        }
        is_latent = shape.latent_attention is not None
        return ModuleSpec(module=LatentAttention if is_latent else Gemma4Attention, params=options)
    query_norm, key_norm = _query_key_norms(parts, shape)
    submodules = SelfAttentionSubmodules(
        linear_qkv=parts.norm_linear,
        core_attention=partial(core_attention, shape=shape),
        linear_proj=parts.proj_linear or parts.row_linear,
        q_layernorm=query_norm,
        k_layernorm=key_norm,
    )
    options = {"attn_mask_type": AttnMaskType.causal}
    return ModuleSpec(module=SelfAttention, params=options, submodules=submodules)


def _expert_mlp(shape: ModelShape) -> type:
    assert shape.experts is not None
    options = {"shape": shape.experts, "activation": ACTIVATIONS[shape.activation]}
    base = Gemma4Experts if shape.experts.branch_norms else MixtureOfExperts
    return type("Experts", (base,), options)
