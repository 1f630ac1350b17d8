"""ModelFamily: how a family's config.json and tensors map to Megatron's, and the rules families
share.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.config.common import LEAST_NUMBER, MOST, MOST_NUMBER, read_count, read_number
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.utils.errors import CheckpointError, shown

# What all families write alike in ``config.json`` and in ``model_config.yaml``.
#
# What is absent from a ``config.json`` has the value that transformers gives it.


def decoder_to_nemo(config: Config, rotated: float | None = None, **family: Any) -> dict[str, Any]:
    """A ``config.json`` as a NeMo config; ``family`` says what else the decoder is made of.

    ``rotated`` is the part of a head's channels that a family rotates unless the config says
    otherwise; None is a family that rotates all.

    Raises:
        CheckpointError: it names a key whose value is not supported.
    """
    read = HfSettings(config)
    read.only("attention_bias", False, None)
    read.only("mlp_bias", False, None)
    read.only("quantization_config", None)
    read.only("is_causal", True, None)
    read.only("use_bidirectional_attention", None, False)
    heads, hidden = read.count("num_attention_heads"), read.count("hidden_size")
    nemo = {
        "num_layers": read.layers(),
        "hidden_size": hidden,
        "ffn_hidden_size": read.count("intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": read.count("num_key_value_heads", heads),
        "kv_channels": read.count("head_dim", hidden // heads),
        "encoder_seq_length": read.count("max_position_embeddings"),
        "max_position_embeddings": read.count("max_position_embeddings"),
        "normalization": "rmsnorm",
        "layernorm_epsilon": read.number("rms_norm_eps", 1e-6),
        "activation": "fast-swiglu",
        "bias": False,
        "qkv_bias": False,
        "qk_layernorm": False,
        **rope_to_nemo(config, rotated),
        "vocab_size": read.count("vocab_size"),
        "make_vocab_size_divisible_by": 128,
        "share_embeddings_and_output_weights": read.flag("tie_word_embeddings", False),
        **family,
    }
    ModelShape.from_config(nemo)  # or it would be refused when it is loaded
    return nemo


def decoder_to_hf(config: Config, model_type: str, **family: Any) -> dict[str, Any]:
    """A NeMo config as the decoder's part of a ``config.json``; ``family`` overrides and adds.

    Raises:
        CheckpointError: Hugging Face has no name for such a rotation.
    """
    shape = ModelShape.from_config(config)
    return {
        "model_type": model_type,
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_query_groups,
        "head_dim": shape.kv_channels,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_position_embeddings,
        "rms_norm_eps": shape.layernorm_epsilon,
        **rope_to_hf(shape),
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": is_tied(config),
        **family,
    }


def is_tied(config: Config) -> bool:
    """Whether the output layer is the embedding table, in a NeMo config."""
    return bool(config.get("share_embeddings_and_output_weights", True))


# A ``config.json`` of Hugging Face, read key by key; every error names the key.

Config = Mapping[str, Any]
# Far more than any model has: a config may ask for a list of them, before a weight is looked at.
_MOST_LAYERS = 10_000


class HfSettings:
    """Reads a ``config.json``; a key that is null counts as absent.

    Raises:
        CheckpointError: from every method: the value is not supported; it names the key.
    """

    def __init__(self, config: Config) -> None:
        self.config = config

    def number(self, key: str, default: float | None = None) -> Any:
        """A number above 0."""
        value = self.config.get(key)
        wanted = f"a number above 0, from {LEAST_NUMBER} to {MOST_NUMBER}"
        return read_number(default if value is None else value, key, wanted)

    def count(self, key: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        """A whole number."""
        value = self.config.get(key)
        wanted = f"a whole number from {least} on, at most {most}"
        return read_count(default if value is None else value, key, wanted, least, most)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.config.get(key)
        if not isinstance(value, bool | None):
            raise CheckpointError(f"{key}: got {shown(value)}, wanted true or false")
        return default if value is None else value

    def layers(self) -> int:
        """``num_hidden_layers``."""
        return self.count("num_hidden_layers", most=_MOST_LAYERS)

    def window(self) -> int | None:
        """``sliding_window``, whose null is none, and whose absence is 4096."""
        is_null = self.config.get("sliding_window", 4096) is None
        return None if is_null else self.count("sliding_window", 4096)

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse any value but ``allowed``; the first one is the default."""
        value = self.config.get(key, allowed[0])
        if value not in allowed:
            wanted = " or ".join(repr(choice) for choice in allowed)
            raise CheckpointError(
                f"{key}: got {shown(value)}, which is not supported; wanted {wanted}"
            )


# Rules: which Hugging Face tensors make up a Megatron tensor, and how it comes apart again.

Join = Callable[[Sequence[Tensor], Config], Tensor]
Split = Callable[[Tensor, Config], Sequence[Tensor]]


def _copy(tensors: Sequence[Tensor], config: Config) -> Tensor:
    (tensor,) = tensors
    return tensor


def _whole(tensor: Tensor, config: Config) -> Sequence[Tensor]:
    return (tensor,)


@dataclass(frozen=True)
class Rule:
    """One Megatron tensor, the Hugging Face tensors that ``join`` makes it of, and the way back.

    Both take the NeMo config as it is without added query groups.
    """

    megatron: str
    hf: tuple[str, ...]
    join: Join = _copy
    split: Split = _whole


def norm_rule(megatron: str, hf: str, *, hf_is_zero_centered: bool = False) -> Rule:
    """A norm's weight, which either side has as gamma or as gamma - 1."""

    def shift(config: Config) -> int:
        return hf_is_zero_centered - bool(config.get("layernorm_zero_centered_gamma"))

    def join(tensors: Sequence[Tensor], config: Config) -> Tensor:
        return _copy(tensors, config) + shift(config)

    def split(tensor: Tensor, config: Config) -> Sequence[Tensor]:
        return (tensor - shift(config),)

    return Rule(megatron, (hf,), join, split)


def stacked_rule(megatron: str, *hf: str) -> Rule:
    """Tensors of one size, one above the other: the gate of an MLP, and what it lets pass."""

    def join(tensors: Sequence[Tensor], config: Config) -> Tensor:
        return torch.cat(list(tensors))

    def split(tensor: Tensor, config: Config) -> Sequence[Tensor]:
        return tensor.chunk(len(hf))

    return Rule(megatron, hf, join, split)


def qkv_rule(megatron: str, query: str, key: str, value: str) -> Rule:
    """Queries, keys and values, in Megatron's order by query group."""

    def join(tensors: Sequence[Tensor], config: Config) -> Tensor:
        heads, groups = config["num_attention_heads"], config["num_query_groups"]
        wanted = [count * config["kv_channels"] for count in (heads, groups, groups)]
        got = [tensor.shape[0] for tensor in tensors]
        if got != wanted:
            names = [name.split(".")[-2:][0] for name in (query, key, value)]
            raise CheckpointError(
                f"{names[0]}, {names[1]} and {names[2]}: got {got} rows, wanted {wanted}, as the "
                "config says"
            )
        queries, keys, values = tensors
        return pack_qkv(queries, keys, values, heads, groups)

    def split(tensor: Tensor, config: Config) -> Sequence[Tensor]:
        return unpack_qkv(tensor, config["num_attention_heads"], config["num_query_groups"])

    return Rule(megatron, (query, key, value), join, split)


# Rules of tensors that several families have under the same names.

FINAL_NORM = "decoder.final_layernorm.weight"
ATTENTION_NORM = "self_attention.linear_qkv.layer_norm_weight"
MLP_NORM = "mlp.linear_fc1.layer_norm_weight"

EMBEDDING = Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",))
OUTPUT = Rule("output_layer.weight", ("lm_head.weight",))
PROJECTION = Rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",))
GATED = stacked_rule("mlp.linear_fc1.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight")
DOWN = Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",))


def _qkv(kind: str) -> Rule:
    query, key, value = (f"self_attn.{part}_proj.{kind}" for part in "qkv")
    return qkv_rule(f"self_attention.linear_qkv.{kind}", query, key, value)


QKV, QKV_BIAS = _qkv("weight"), _qkv("bias")


def model_rules_with(norm: Callable[[str, str], Rule]) -> tuple[Rule, ...]:
    """Outside the layers: the embeddings, and the last norm."""
    return (EMBEDDING, norm(FINAL_NORM, "model.norm.weight"))


def layer_rules_with(
    norm: Callable[[str, str], Rule], mlp: tuple[Rule, ...] = (GATED, DOWN)
) -> tuple[Rule, ...]:
    """A layer with a norm before attention, and one before the MLP, as Llama calls them."""
    return (
        norm(ATTENTION_NORM, "input_layernorm.weight"),
        QKV,
        PROJECTION,
        norm(MLP_NORM, "post_attention_layernorm.weight"),
        *mlp,
    )


MODEL, LAYER = model_rules_with(norm_rule), layer_rules_with(norm_rule)


# Rotary positions, as ``config.json`` and as ``model_config.yaml`` describe them.


def rope_to_nemo(config: Config, rotated: float | None) -> dict[str, Any]:
    """NeMo's keys; transformers 5 writes ``rope_parameters``, older ones several keys.

    ``rotated`` is the part of a head's channels that a family rotates unless the config says
    otherwise; None is a family that rotates all.

    Raises:
        CheckpointError: it is rotated in a way that is not supported.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise CheckpointError(f"rope_parameters: got {shown(rope)}, wanted keys and values")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    beside = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    inside = {key: value for key, value in rope.items() if value is not None}
    scaling = HfSettings({**beside, **inside})
    if rotated is None:
        scaling.only("partial_rotary_factor", None, 1.0)
    rotary = {
        "position_embedding_type": "rope",
        "rotary_base": scaling.number("rope_theta", 10000.0),
        "rotary_percentage": scaling.number("partial_rotary_factor", rotated or 1.0),
        "scale_positional_embedding": kind == "llama3",
    }
    if kind == "default":
        return rotary
    if kind == "linear":
        return {**rotary, "seq_len_interpolation_factor": scaling.number("factor")}
    if kind == "llama3":
        return {
            **rotary,
            "scale_factor": scaling.number("factor"),
            "low_freq_factor": scaling.number("low_freq_factor"),
            "high_freq_factor": scaling.number("high_freq_factor"),
            "old_context_len": scaling.number("original_max_position_embeddings"),
        }
    raise CheckpointError(
        f"rope_type: got {shown(kind)}, which is not supported; wanted 'default' or 'linear' or "
        "'llama3'"
    )


def rope_to_hf(shape: ModelShape) -> dict[str, Any]:
    """The keys of ``config.json``, for transformers 4 and 5.

    Raises:
        CheckpointError: Hugging Face has no name for such a rotation.
    """
    rope: dict[str, Any] = {"rope_theta": shape.rotary_base, "rope_type": "default"}
    linear, llama3 = shape.seq_len_interpolation_factor, shape.rope_scaling
    if linear is not None and llama3 is not None:
        raise CheckpointError(
            f"model_config.yaml: got seq_len_interpolation_factor={linear} and "
            "scale_positional_embedding=True, wanted one of them: Hugging Face has no name for both"
        )
    if linear is not None:
        rope |= {"rope_type": "linear", "factor": linear}
    if llama3 is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": llama3.factor,
            "low_freq_factor": llama3.low_freq_factor,
            "high_freq_factor": llama3.high_freq_factor,
            "original_max_position_embeddings": llama3.old_context_len,
        }
    # transformers 5 reads the first, 4 the other two.
    scaling = None if rope["rope_type"] == "default" else rope
    return {"rope_parameters": rope, "rope_theta": shape.rotary_base, "rope_scaling": scaling}


# Sliding windows, as ``config.json`` and as ``model_config.yaml`` describe them.

SLIDING, FULL = "sliding_attention", "full_attention"


def window_to_nemo(config: Config, size: int | None, kinds: list[str]) -> dict[str, Any]:
    """NeMo's keys of a window of ``size`` keys, in the layers that ``layer_types`` names.

    ``kinds``, one for each layer, are ``layer_types`` where the config has none.

    Raises:
        CheckpointError: the layers that have it are not all, none, or every other one.
    """
    count, kinds = len(kinds), config.get("layer_types") or kinds
    if kinds == [FULL] * count:
        return {}
    if size is not None and kinds == [SLIDING] * count:
        return window_everywhere(size)
    if size is not None and kinds == alternating_layers(count):
        return {"window_size": size, "window_pattern": "alternate"}
    raise CheckpointError(
        f"layer_types: got {shown(kinds)}, a window of {size} and {count} layers, which is not "
        "supported; wanted a window in all layers, in none, or in the first, the third, and so on"
    )


def window_everywhere(size: int) -> dict[str, Any]:
    """NeMo's keys of a window in every layer."""
    return {"window_size": size, "window_pattern": "all"}


def alternating_layers(layers: int) -> list[str]:
    """``layer_types`` of a model whose first, third, ... layers have the window."""
    return [FULL if layer % 2 else SLIDING for layer in range(layers)]


def layer_types(config: Config) -> list[str]:
    """``layer_types`` of a NeMo config."""
    shape = ModelShape.from_config(config)
    windows = [shape.window_of(layer + 1) for layer in range(shape.num_layers)]
    return [FULL if window is None else SLIDING for window in windows]


# Queries, keys and values in Megatron's order, and query groups of zeros beside a model's own.

# The axis of query groups in the tensors that have one.
_GROUP_AXES = {
    "self_attention.linear_qkv.weight": 0,
    "self_attention.linear_qkv.bias": 0,
    "self_attention.linear_proj.weight": 1,
}


def group_axis(name: str) -> int | None:
    """The axis of query groups in a Megatron tensor, None where it has none."""
    return _GROUP_AXES.get(name)


def pack_qkv(query: Tensor, key: Tensor, value: Tensor, heads: int, groups: int) -> Tensor:
    """q ``[heads * d, ...]``, k and v ``[groups * d, ...]`` in Megatron's order.

    Per group of query heads: its queries, its key, its value; ``[(heads + 2 * groups) * d, ...]``.
    """
    rest = query.shape[1:]
    parts = [tensor.reshape(groups, -1, *rest) for tensor in (query, key, value)]
    return torch.cat(parts, dim=1).reshape(-1, *rest)


def unpack_qkv(packed: Tensor, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of ``pack_qkv``."""
    rest = packed.shape[1:]
    size = packed.shape[0] // (heads + 2 * groups)
    grouped = packed.reshape(groups, -1, *rest)
    query, key, value = grouped.split([heads // groups * size, size, size], dim=1)
    return (query.reshape(-1, *rest), key.reshape(-1, *rest), value.reshape(-1, *rest))


def add_zero_groups(name: str, tensor: Tensor, groups: int, wanted: int) -> Tensor:
    """A Megatron tensor of ``groups`` query groups, with groups of zeros up to ``wanted``.

    Their values are zeros and so are their columns of the projection: they add nothing to the
    output, their gradients are exactly zero, and so they stay.
    """
    axis = group_axis(name)
    if axis is None:
        return tensor
    shape = list(tensor.shape)
    shape[axis] = shape[axis] // groups * (wanted - groups)
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=axis)


def remove_zero_groups(name: str, tensor: Tensor, groups: int, kept: int) -> Tensor:
    """The inverse of ``add_zero_groups``: of ``groups`` query groups the first ``kept``."""
    axis = group_axis(name)
    if axis is None:
        return tensor
    return tensor.narrow(axis, 0, tensor.size(axis) // groups * kept)


# GgufFormat: what llama.cpp's converter calls a family's fields and tensors, and what it changes.
#
# The converter: https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py.

# GGUF's names of tensors, then Hugging Face's, as most families have them.
MODEL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
ATTENTION_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
MLP_NAMES = {"ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
GATED_MLP_NAMES = {**MLP_NAMES, "ffn_gate": "mlp.gate_proj"}
MLP_NORM_NAMES = {"ffn_norm": "post_attention_layernorm"}


def _nothing(config: Mapping[str, Any]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class GgufFormat:
    """How a family is written.

    Names are GGUF's, then Hugging Face's.

    Attributes:
        architecture: ``general.architecture`` of its files.
        layer: a layer's tensors.
        model: the tensors outside the layers.
        epsilon: the field of its norms' epsilon.
        optional: fields that only this family has.
        derived: gives keys of ``config.json`` that no field has, of those that a field has.
        is_permuted: the rows of q and k are in rotary pairs, not halves.
        norm_offset: what was added to the weights of norms.
        is_partly_rotated: a part of a head's channels may not be rotated.
    """

    architecture: str
    layer: Mapping[str, str] = field(
        default_factory=lambda: {**ATTENTION_NAMES, **MLP_NORM_NAMES, **GATED_MLP_NAMES}
    )
    model: Mapping[str, str] = field(default_factory=lambda: MODEL_NAMES)
    epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    optional: Mapping[str, str] = field(default_factory=dict)
    derived: Callable[[Mapping[str, Any]], dict[str, Any]] = _nothing
    is_permuted: bool = False
    norm_offset: int = 0
    is_partly_rotated: bool = False


# ModelFamily: all that a family of models is to this package, in one value.

# What a decoder may be made of: the values are Llama's.
PLAIN: Mapping[str, Any] = {
    "activation": "swiglu",
    "normalization": "rmsnorm",
    "qkv_bias": False,
    "qk_layernorm": False,
    "post_layernorms": False,
    "apply_embedding_scaling": False,
    "rotary_percentage": 1.0,
    "window_size": None,
    "window_pattern": "all",
    "attn_logit_softcapping": None,
    "query_pre_attn_scalar": None,
}
ANY = object()
ANY_WINDOW: Mapping[str, Any] = {"window_size": ANY, "window_pattern": ANY}


@dataclass(frozen=True)
class ModelFamily:
    """A family: its config, its tensors and its GGUF files.

    Attributes:
        name: ``model_type`` in ``config.json``.
        to_nemo: a ``config.json`` as a NeMo config. Raises CheckpointError for what it cannot
            carry over.
        to_hf: a NeMo config as the decoder's part of a ``config.json``, ``model_type`` first.
        model: the rules of tensors outside the layers.
        layer: the rules of tensors inside each layer; their Hugging Face names lack what
            ``layer_prefix`` and the layer's number say.
        untied: the output layer, where it is not the embeddings.
        made_of: what its decoders have that Llama's do not, by fields of ``ModelShape``; ``ANY`` is
            every value.
        gguf: how llama.cpp writes it; None where that has no name for it.
        layer_prefix: what the names of a layer's tensors begin with, before its number.
        unused: endings of the names of stored tensors that are no weights.
    """

    name: str
    to_nemo: Callable[[Config], dict[str, Any]]
    to_hf: Callable[[Config], dict[str, Any]]
    model: tuple[Rule, ...]
    layer: tuple[Rule, ...]
    untied: Rule
    made_of: Mapping[str, Any] = field(default_factory=dict)
    gguf: GgufFormat | None = None
    layer_prefix: str = "model.layers."
    unused: tuple[str, ...] = ()

    def rules(self, config: Config) -> list[tuple[Rule, int | None]]:
        """Every rule with its layer's index and whole Hugging Face names, in the model's order.

        ``config`` is the NeMo one.
        """
        return [
            *((rule, None) for rule in self.model),
            *(
                (self._in_layer(rule, layer), layer)
                for layer in range(config["num_layers"])
                for rule in self.layer
            ),
            *(() if is_tied(config) else ((self.untied, None),)),
        ]

    def _in_layer(self, rule: Rule, layer: int) -> Rule:
        return replace(rule, hf=tuple(f"{self.layer_prefix}{layer}.{name}" for name in rule.hf))

    def has(self, shape: ModelShape) -> bool:
        """Whether a decoder of this shape is one of the family's."""
        wanted = {**PLAIN, **self.made_of}
        return all(value is ANY or getattr(shape, key) == value for key, value in wanted.items())


def beside_llama(shape: ModelShape) -> str:
    """What a decoder has that Llama's do not, in words for an error."""
    found = {key: getattr(shape, key) for key in PLAIN}
    return ", ".join(f"{key}={value}" for key, value in found.items() if value != PLAIN[key])
