"""Names, as in Megatron, and unsharded shapes of a decoder's tensors.

Converters and loaders compare checkpoints with these tables. The module also checks the names
that a user gives to the outputs of a reward model.
"""

from __future__ import annotations

from collections.abc import Sequence

from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.utils.errors import ConfigError

# Names of tensors as Megatron writes them, without the prefix ``model.`` that archives add.

EMBEDDING = "embedding.word_embeddings.weight"
# The language-model head. A reward model has a reward head instead.
OUTPUT_LAYER = "output_layer.weight"
HEAD, HEAD_BIAS = "rm_head.weight", "rm_head.bias"
# Prefix of all tensors of a reward head.
HEAD_PREFIX = "rm_head."
# Name of the scalars that a loss learns in addition to the reward head. The checkpoints of a run
# store them; a finished reward model does not.
LEARNED_BY_OBJECTIVE = "rm_head.learned"
LAYERS = "decoder.layers."
# Attention sinks, by megatron-core's name of the parameter.
SINKS = "self_attention.core_attention.softmax_offset"
# Prefix of tensor names in archives of this package and of NeMo 1.
PREFIX = "model."

Shapes = dict[str, tuple[int, ...]]


def model_tensors(shape: ModelShape) -> Shapes:
    """Return the shapes, by name, of the weights outside the layers: embedding and final norm.

    The embedding has no vocabulary padding. The output layer is not included.
    """
    return {
        EMBEDDING: (shape.vocab_size, shape.hidden_size),
        **_norm(shape, "decoder.final_layernorm."),
    }


def numbered_tensors(shape: ModelShape) -> Shapes:
    """Return the shapes of the weights of all layers, if each has names of its own."""
    return {
        f"{LAYERS}{layer}.{name}": size
        for layer in range(shape.num_layers)
        for name, size in layer_tensors(shape.of_layer(layer + 1)).items()
    }


def layer_tensors(shape: ModelShape) -> Shapes:
    """Return the shapes of one layer's weights, by their names after ``decoder.layers.<number>.``

    A LoRA model's adapters are included.

    Args:
        shape: ``ModelShape.of_layer`` of the layer.
    """
    tensors = {**_mixer(shape), **_mlp(shape)}
    if shape.pre_layernorms:
        tensors |= _norm(shape, "self_attention.linear_qkv.layer_norm_")
        # Megatron fuses a norm into the linear layer that follows it. In a mixture-of-experts layer
        # the norm is followed by the router, so it is a module of its own.
        mlp_norm = "mlp.linear_fc1.layer_norm_" if shape.experts is None else "pre_mlp_layernorm."
        tensors |= _norm(shape, mlp_norm)
    if shape.post_layernorms:
        tensors |= _norm(shape, "self_attention.linear_proj.post_layernorm.")
        tensors |= _norm(shape, "mlp.linear_fc2.post_layernorm.")
    if shape.lora is not None:
        tensors |= shape.lora.tensors(tensors)
    return tensors


def _mixer(shape: ModelShape) -> Shapes:
    """Return the shapes of the weights of attention, or of linear attention."""
    hidden, channels = shape.hidden_size, shape.kv_channels
    linear = shape.linear_attention
    if linear is not None:
        return {
            "self_attention.linear_qkv.weight": (linear.projection_width, hidden),
            "self_attention.linear_proj.weight": (hidden, linear.value_width),
            "self_attention.conv_weight": (linear.conv_width, linear.conv_kernel),
            "self_attention.a_log": (linear.num_value_heads,),
            "self_attention.dt_bias": (linear.num_value_heads,),
            "self_attention.norm_weight": (linear.value_head_dim,),
        }
    heads = shape.num_attention_heads * channels
    # The fused projection computes the queries of all heads, their output gates if there are any,
    # and one key and one value for each query group.
    rows = (1 + shape.attention_output_gate) * heads + 2 * shape.num_query_groups * channels
    tensors: Shapes = {
        "self_attention.linear_qkv.weight": (rows, hidden),
        "self_attention.linear_proj.weight": (hidden, heads),
    }
    if shape.qkv_bias:
        tensors["self_attention.linear_qkv.bias"] = (rows,)
    if shape.proj_bias:
        tensors["self_attention.linear_proj.bias"] = (hidden,)
    if shape.attention_sinks:
        tensors[SINKS] = (shape.num_attention_heads,)
    if shape.qk_layernorm:
        query, key = shape.qk_norm_widths()
        tensors |= _norm(shape, "self_attention.q_layernorm.", query)
        tensors |= _norm(shape, "self_attention.k_layernorm.", key)
    return tensors


def _mlp(shape: ModelShape) -> Shapes:
    """Return the shapes of one layer's MLP matrices by name; for MoE, of router and all experts."""
    hidden, experts = shape.hidden_size, shape.experts
    if experts is None:
        return {
            "mlp.linear_fc1.weight": ((1 + shape.is_gated) * shape.ffn_hidden_size, hidden),
            "mlp.linear_fc2.weight": (hidden, shape.ffn_hidden_size),
        }
    tensors: Shapes = {"mlp.router.weight": (experts.count, hidden)}
    if experts.shared_gate:
        tensors["mlp.router.shared_gate"] = (1, hidden)
    sizes = {"experts": (experts.count, experts.width)}
    if experts.shared_width is not None:
        sizes["shared_experts"] = (1, experts.shared_width)
    # [E, 2, f, h]: axis 1 separates an expert's gate and up projections. In a dense MLP the rows of
    # both are stacked on axis 0.
    for name, (count, width) in sizes.items():
        tensors[f"mlp.{name}.linear_fc1.weight"] = (count, 2, width, hidden)
        tensors[f"mlp.{name}.linear_fc2.weight"] = (count, hidden, width)
    if experts.router_bias:
        tensors["mlp.router.bias"] = (experts.count,)
    if experts.has_biases:
        tensors["mlp.experts.linear_fc1.bias"] = (experts.count, 2, experts.width)
        tensors["mlp.experts.linear_fc2.bias"] = (experts.count, hidden)
    return tensors


def _norm(shape: ModelShape, name: str, width: int | None = None) -> Shapes:
    kinds = ("weight", "bias") if shape.normalization == "layernorm1p" else ("weight",)
    return {name + kind: (width or shape.hidden_size,) for kind in kinds}


def attribute_names(names: Sequence[str], count: int) -> tuple[str, ...]:
    """Strip spaces from the names that a user chose for ``count`` outputs, and check the names.

    Raises:
        ConfigError: there are not ``count`` different, non-empty names.
    """
    stripped = tuple(name.strip() for name in names)
    if len(stripped) != count or len(set(stripped)) != count or not all(stripped):
        raise ConfigError(f"attributes: got {list(stripped)}, wanted {count} different names")
    return stripped
