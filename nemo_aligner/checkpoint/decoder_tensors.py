"""Names and shapes of a decoder's tensors in Megatron, and names of a reward model's outputs."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_aligner.models.shape import ModelShape
from nemo_aligner.utils.errors import ConfigError

# Megatron's names, without a prefix. Shapes are unsharded.

EMBEDDING = "embedding.word_embeddings.weight"
# A reward model has a head instead.
OUTPUT_LAYER = "output_layer.weight"
HEAD, HEAD_BIAS = "rm_head.weight", "rm_head.bias"
# Prefix of all tensors of a reward head.
HEAD_PREFIX = "rm_head."
# Scalars that a loss learns beside the reward; kept in runs, left out of reward models.
LEARNED_BY_OBJECTIVE = "rm_head.learned"
LAYERS = "decoder.layers."
# Prefix of tensor names in archives of this package and of NeMo 1.
PREFIX = "model."

Shapes = dict[str, tuple[int, ...]]


def model_tensors(shape: ModelShape) -> Shapes:
    """Weights outside the layers, except an output layer, without vocabulary padding."""
    return {
        EMBEDDING: (shape.vocab_size, shape.hidden_size),
        **_norm(shape, "decoder.final_layernorm."),
    }


def layer_tensors(shape: ModelShape) -> Shapes:
    """Weights of a layer by their names after ``decoder.layers.<number>.``"""
    hidden, channels = shape.hidden_size, shape.kv_channels
    heads = shape.num_attention_heads * channels
    # Queries of all heads, and a key and a value of each query group.
    rows = heads + 2 * shape.num_query_groups * channels
    tensors: Shapes = {
        "self_attention.linear_qkv.weight": (rows, hidden),
        "self_attention.linear_proj.weight": (hidden, heads),
        **_mlp(shape),
    }
    if shape.qkv_bias:
        tensors["self_attention.linear_qkv.bias"] = (rows,)
    if shape.qk_layernorm:
        query, key = shape.qk_norm_widths()
        tensors |= _norm(shape, "self_attention.q_layernorm.", query)
        tensors |= _norm(shape, "self_attention.k_layernorm.", key)
    if shape.pre_layernorms:
        tensors |= _norm(shape, "self_attention.linear_qkv.layer_norm_")
        # Megatron fuses a norm into the linear layer behind it; a router has none to fuse into.
        of_mlp = "mlp.linear_fc1.layer_norm_" if shape.experts is None else "pre_mlp_layernorm."
        tensors |= _norm(shape, of_mlp)
    if shape.post_layernorms:
        tensors |= _norm(shape, "self_attention.linear_proj.post_layernorm.")
        tensors |= _norm(shape, "mlp.linear_fc2.post_layernorm.")
    if shape.lora is not None:
        tensors |= shape.lora.tensors(tensors)
    return tensors


def _mlp(shape: ModelShape) -> Shapes:
    """Matrices of an MLP, or of all experts: a gate and a projection to ffn channels, and back."""
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
    # [E, 2, f, h]: gate and projection of each expert are apart, not stacked as in a dense MLP.
    for name, (count, width) in sizes.items():
        tensors[f"mlp.{name}.linear_fc1.weight"] = (count, 2, width, hidden)
        tensors[f"mlp.{name}.linear_fc2.weight"] = (count, hidden, width)
    return tensors


def _norm(shape: ModelShape, name: str, width: int | None = None) -> Shapes:
    kinds = ("weight", "bias") if shape.normalization == "layernorm1p" else ("weight",)
    return {name + kind: (width or shape.hidden_size,) for kind in kinds}


def attribute_names(given: Sequence[str], count: int) -> tuple[str, ...]:
    """Check the names given for ``count`` outputs, and strip them."""
    names = tuple(name.strip() for name in given)
    if len(names) != count or len(set(names)) != count or not all(names):
        raise ConfigError(f"attributes: got {list(names)}, wanted {count} different names")
    return names
