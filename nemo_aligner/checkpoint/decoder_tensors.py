"""Megatron's names, and the unsharded shapes, of a decoder's tensors.

Converters and loaders compare checkpoints with these tables. The module also checks the names
that a user gives to the outputs of a reward model.
"""

from __future__ import annotations

from collections.abc import Sequence

from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.latent_attention import LatentAttentionShape
from nemo_aligner.models.shapes.linear_attention import LinearAttentionShape, Mamba2Shape
from nemo_aligner.utils.errors import ConfigError

# Names of tensors as Megatron writes them, without the prefix ``model.`` that archives add.

EMBEDDING = "embedding.word_embeddings.weight"
# The language-model head. In a reward model, a reward head (HEAD) takes its place.
OUTPUT_LAYER = "output_layer.weight"
HEAD, HEAD_BIAS = "rm_head.weight", "rm_head.bias"
# Prefix of all tensors of a reward head.
HEAD_PREFIX = "rm_head."
# Name of the scalars that some losses learn in addition to the reward head. A run's checkpoints
# store them; a finished reward model does not.
LEARNED_BY_OBJECTIVE = "rm_head.learned"
LAYERS = "decoder.layers."
# Table of the embeddings that every layer of a Gemma 4 may have, and the projection that goes with
# it.
PER_LAYER_TABLE = "per_layer_embedding.table.weight"
PER_LAYER_PROJECTION = "per_layer_embedding.projection.weight"
PER_LAYER_NORM = "per_layer_embedding.norm.weight"
# Tensors with a row for each token of the vocabulary, which may be padded.
VOCABULARY_TENSORS = (EMBEDDING, OUTPUT_LAYER, PER_LAYER_TABLE)
# Attention sinks, by megatron-core's name of the parameter.
SINKS = "self_attention.core_attention.softmax_offset"
# Norms of the inputs and outputs of the two branches of an MLP with experts, in a Gemma 4.
_BRANCH_NORMS = (
    "shared_experts_layernorm",
    "shared_experts_post_layernorm",
    "experts_layernorm",
    "experts_post_layernorm",
)
# Prefix of tensor names in archives of this package and of NeMo 1.
PREFIX = "model."

Shapes = dict[str, tuple[int, ...]]


def model_tensors(shape: ModelShape) -> Shapes:
    """Return the shapes, by name, of the weights outside the layers: embedding and final norm.

    The embedding has no vocabulary padding. The output layer is not included.
    """
    tensors = {
        EMBEDDING: (shape.vocab_size, shape.hidden_size),
        **_norm(shape, "decoder.final_layernorm."),
    }
    width = None if shape.gemma4 is None else shape.gemma4.per_layer_width
    if width is not None:
        tensors[PER_LAYER_TABLE] = (shape.vocab_size, shape.num_layers * width)
        tensors[PER_LAYER_PROJECTION] = (shape.num_layers * width, shape.hidden_size)
        tensors[PER_LAYER_NORM] = (width,)
    return tensors


def numbered_tensors(shape: ModelShape) -> Shapes:
    """Return the shapes of all layers' weights, by names with the layer's number.

    These are the names of a checkpoint that does not stack the layers.
    """
    return {
        f"{LAYERS}{layer}.{name}": size
        for layer in range(shape.num_layers)
        for name, size in layer_tensors(shape.of_layer(layer + 1)).items()
    }


def layer_tensors(shape: ModelShape) -> Shapes:
    """Return the shapes of one layer's weights, by name without ``decoder.layers.<number>.``

    The names omit this prefix, because they are the same in every layer.

    A LoRA model's adapters are included.

    Args:
        shape: ``ModelShape.of_layer`` of the layer.
    """
    tensors = {
        **(_mixer(shape) if shape.has_mixer else {}),
        **(_mlp(shape) if shape.has_mlp else {}),
    }
    if shape.pre_layernorms:
        if shape.has_mixer:
            tensors |= _norm(shape, "self_attention.linear_qkv.layer_norm_")
        # Megatron fuses a norm into the linear layer that follows it. In a mixture-of-experts layer
        # the router follows the norm, so the norm is a separate module.
        mlp_norm = "mlp.linear_fc1.layer_norm_" if shape.experts is None else "pre_mlp_layernorm."
        has_norm = shape.has_mlp and not (shape.experts and shape.experts.branch_norms)
        if has_norm and not shape.one_norm_per_layer:
            tensors |= _norm(shape, mlp_norm)
    if shape.post_layernorms:
        tensors |= _norm(shape, "self_attention.linear_proj.post_layernorm.")
        if shape.experts is None:
            tensors |= _norm(shape, "mlp.linear_fc2.post_layernorm.")
    if shape.gemma4 is not None:
        tensors["layer_output.scalar"] = (1,)
        width, hidden = shape.gemma4.per_layer_width, shape.hidden_size
        if width is not None:
            tensors["layer_output.gate.weight"] = (width, hidden)
            tensors["layer_output.projection.weight"] = (hidden, width)
            tensors |= _norm(shape, "layer_output.projection.post_layernorm.")
    if shape.lora is not None:
        tensors |= shape.lora.tensors(tensors)
    return tensors


def _mixer(shape: ModelShape) -> Shapes:
    """Return the shapes of the weights of attention, of whichever kind the layer has."""
    hidden, channels = shape.hidden_size, shape.kv_channels
    linear = shape.linear_attention
    if linear is not None:
        return _linear_attention(linear, hidden)
    if shape.latent_attention is not None:
        return _latent_attention(shape.latent_attention, hidden)
    heads = shape.num_attention_heads * channels
    # The fused projection has rows for the queries of all heads, for their output gates if there
    # are any, and for one key and one value of each query group.
    rows = (1 + shape.attention_output_gate) * heads + shape.key_value_width
    tensors: Shapes = {
        "self_attention.linear_qkv.weight": (rows, hidden),
        "self_attention.linear_proj.weight": (hidden, heads),
    }
    if shape.qkv_bias:
        tensors["self_attention.linear_qkv.bias"] = (rows,)
    if shape.proj_bias or shape.linear_bias:
        tensors["self_attention.linear_proj.bias"] = (hidden,)
    if shape.attention_sinks:
        tensors[SINKS] = (shape.num_attention_heads,)
    if shape.qk_layernorm:
        query, key = shape.qk_norm_widths()
        tensors |= _norm(shape, "self_attention.q_layernorm.", query)
        if shape.has_keys:
            tensors |= _norm(shape, "self_attention.k_layernorm.", key)
    return tensors


def _linear_attention(linear: LinearAttentionShape, hidden: int) -> Shapes:
    tensors: Shapes = {
        "self_attention.linear_qkv.weight": (linear.projection_width, hidden),
        "self_attention.linear_proj.weight": (hidden, linear.value_width),
        "self_attention.conv_weight": (linear.conv_width, linear.conv_kernel),
        "self_attention.a_log": (linear.num_value_heads,),
        "self_attention.dt_bias": (linear.num_value_heads,),
        "self_attention.norm_weight": (linear.value_head_dim,),
    }
    if isinstance(linear, Mamba2Shape):
        tensors["self_attention.skip"] = (linear.num_value_heads,)
        tensors["self_attention.norm_weight"] = (linear.value_width,)
        if linear.conv_bias:
            tensors["self_attention.conv_bias"] = (linear.conv_width,)
    return tensors


def _latent_attention(latent: LatentAttentionShape, hidden: int) -> Shapes:
    tensors: Shapes = {
        "self_attention.linear_qkv.weight": (latent.projection_width, hidden),
        "self_attention.linear_proj.weight": (hidden, latent.value_width),
        "self_attention.kv_latent_layernorm.weight": (latent.kv_lora_rank,),
        "self_attention.linear_kv_up_proj.weight": (latent.key_value_width, latent.kv_lora_rank),
    }
    if latent.q_lora_rank is not None:
        tensors["self_attention.q_latent_layernorm.weight"] = (latent.q_lora_rank,)
        up = (latent.query_width, latent.q_lora_rank)
        tensors["self_attention.linear_q_up_proj.weight"] = up
    return tensors


def _mlp(shape: ModelShape) -> Shapes:
    """Return the shapes of one layer's MLP matrices by name; for MoE, of router and all experts."""
    hidden, experts = shape.hidden_size, shape.experts
    if experts is None:
        return _dense_mlp(shape)
    tensors: Shapes = {"mlp.router.weight": (experts.count, hidden)}
    if experts.shared_gate:
        tensors["mlp.router.shared_gate"] = (1, hidden)
    if experts.expert_bias:
        tensors["mlp.router.expert_bias"] = (experts.count,)
    sizes = {"experts": (experts.count, experts.width)}
    if experts.shared_width is not None:
        sizes["shared_experts"] = (1, experts.shared_width)
    # [E, 2, f, h]: axis 1 separates an expert's gate and up projections. In a dense MLP the rows of
    # both are stacked on axis 0. Without a gate it is [E, f, h].
    for name, (count, width) in sizes.items():
        gate = (2,) if shape.is_gated else ()
        tensors[f"mlp.{name}.linear_fc1.weight"] = (count, *gate, width, hidden)
        tensors[f"mlp.{name}.linear_fc2.weight"] = (count, hidden, width)
    if experts.router_bias:
        tensors["mlp.router.bias"] = (experts.count,)
    if experts.branch_norms:
        tensors["mlp.router.expert_scale"] = (experts.count,)
        for name in ("router.norm", "post_layernorm", *_BRANCH_NORMS):
            tensors |= _norm(shape, f"mlp.{name}.")
    if experts.has_biases:
        tensors["mlp.experts.linear_fc1.bias"] = (experts.count, 2, experts.width)
        tensors["mlp.experts.linear_fc2.bias"] = (experts.count, hidden)
    return tensors


def _dense_mlp(shape: ModelShape) -> Shapes:
    hidden, rows = shape.hidden_size, (1 + shape.is_gated) * shape.ffn_hidden_size
    tensors: Shapes = {
        "mlp.linear_fc1.weight": (rows, hidden),
        "mlp.linear_fc2.weight": (hidden, shape.ffn_hidden_size),
    }
    if shape.linear_bias:
        tensors |= {"mlp.linear_fc1.bias": (rows,), "mlp.linear_fc2.bias": (hidden,)}
    if shape.activation == "xielu":
        tensors |= {f"mlp.activation_func.{name}": (2,) for name in ("alpha", "constants")}
    return tensors


def _norm(shape: ModelShape, name: str, width: int | None = None) -> Shapes:
    kinds = ("weight", "bias") if shape.norms_have_biases else ("weight",)
    return {name + kind: (width or shape.hidden_size,) for kind in kinds}


def attribute_names(names: Sequence[str], count: int) -> tuple[str, ...]:
    """Check the names that a user chose for ``count`` outputs; return them without outer spaces.

    Raises:
        ConfigError: there are not ``count`` different, non-empty names.
    """
    stripped = tuple(name.strip() for name in names)
    if len(stripped) != count or len(set(stripped)) != count or not all(stripped):
        raise ConfigError(f"attributes: got {list(stripped)}, wanted {count} different names")
    return stripped
