"""ModelFamily: translation of a family's config and tensors to Megatron's and back.

Also here: the parts of a ``config.json`` that families share, rules for tensors, query groups of
zeros, and GGUF's names.
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

# Settings that all families have. A key missing from ``config.json`` has transformers' default.


def decoder_to_nemo(config: Config, rotated: float | None = None, **family: Any) -> dict[str, Any]:
    """Translate a ``config.json`` to a NeMo config; ``family`` adds the family's own settings.

    Args:
        rotated: share of a head's channels that are rotated unless the config says otherwise; None
            for a family that rotates all.

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
    ModelShape.from_config(nemo)  # raises now for what a load would refuse
    return nemo


def decoder_to_hf(config: Config, model_type: str, **family: Any) -> dict[str, Any]:
    """Translate a NeMo config to the decoder's part of a ``config.json``; ``family`` overrides.

    Raises:
        CheckpointError: Hugging Face cannot express its rotary embedding.
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
    """Tell if a NeMo config ties the output layer to the embedding table."""
    return bool(config.get("share_embeddings_and_output_weights", True))


# Reading of a ``config.json`` key by key; every error names the key.

Config = Mapping[str, Any]
# Far above any model's: a config may imply a list of them before any weight is looked at.
_MOST_LAYERS = 10_000


class HfSettings:
    """Typed access to a ``config.json``; a null key counts as absent.

    Raises:
        CheckpointError: from every method, for an unsupported value; it names the key.
    """

    def __init__(self, config: Config) -> None:
        self.config = config

    def number(self, key: str, default: float | None = None) -> Any:
        """Read a number above 0."""
        value = self.config.get(key)
        wanted = f"a number above 0, from {LEAST_NUMBER} to {MOST_NUMBER}"
        return read_number(default if value is None else value, key, wanted)

    def count(self, key: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        """Read an integer."""
        value = self.config.get(key)
        wanted = f"a whole number from {least} on, at most {most}"
        return read_count(default if value is None else value, key, wanted, least, most)

    def flag(self, key: str, default: bool) -> bool:
        """Read a bool."""
        value = self.config.get(key)
        if not isinstance(value, bool | None):
            raise CheckpointError(f"{key}: got {shown(value)}, wanted true or false")
        return default if value is None else value

    def layers(self) -> int:
        """Read ``num_hidden_layers``."""
        return self.count("num_hidden_layers", most=_MOST_LAYERS)

    def window(self) -> int | None:
        """Read ``sliding_window``: null is none, and a missing key is 4096."""
        is_null = self.config.get("sliding_window", 4096) is None
        return None if is_null else self.count("sliding_window", 4096)

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse any value but ``allowed``, of which the first is the default."""
        value = self.config.get(key, allowed[0])
        if value not in allowed:
            wanted = " or ".join(repr(choice) for choice in allowed)
            raise CheckpointError(
                f"{key}: got {shown(value)}, which is not supported; wanted {wanted}"
            )


# Rules: how Hugging Face tensors are joined to a Megatron tensor, and split again.

Join = Callable[[Sequence[Tensor], Config], Tensor]
Split = Callable[[Tensor, Config], Sequence[Tensor]]


def _copy(tensors: Sequence[Tensor], config: Config) -> Tensor:
    (tensor,) = tensors
    return tensor


def _whole(tensor: Tensor, config: Config) -> Sequence[Tensor]:
    return (tensor,)


@dataclass(frozen=True)
class Rule:
    """A Megatron tensor, and the Hugging Face tensors that make it up, by ``join`` and ``split``.

    Both functions take the NeMo config without added query groups.
    """

    megatron: str
    hf: tuple[str, ...]
    join: Join = _copy
    split: Split = _whole


def norm_rule(megatron: str, hf: str, *, hf_is_zero_centered: bool = False) -> Rule:
    """Rule for a norm's weight, which either side stores as gamma or as gamma - 1."""

    def shift(config: Config) -> int:
        return hf_is_zero_centered - bool(config.get("layernorm_zero_centered_gamma"))

    def join(tensors: Sequence[Tensor], config: Config) -> Tensor:
        return _copy(tensors, config) + shift(config)

    def split(tensor: Tensor, config: Config) -> Sequence[Tensor]:
        return (tensor - shift(config),)

    return Rule(megatron, (hf,), join, split)


def stacked_rule(megatron: str, *hf: str) -> Rule:
    """Rule for tensors of one size that are concatenated: an MLP's gate and up projections."""

    def join(tensors: Sequence[Tensor], config: Config) -> Tensor:
        return torch.cat(list(tensors))

    def split(tensor: Tensor, config: Config) -> Sequence[Tensor]:
        return tensor.chunk(len(hf))

    return Rule(megatron, hf, join, split)


def qkv_rule(megatron: str, query: str, key: str, value: str) -> Rule:
    """Rule for queries, keys and values, which Megatron interleaves by query group."""

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


# Rules for tensors that several families name alike.

FINAL_NORM = "decoder.final_layernorm.weight"
ATTENTION_NORM = "self_attention.linear_qkv.layer_norm_weight"
MLP_NORM = "mlp.linear_fc1.layer_norm_weight"

# The reward head of transformers' classes.
HF_HEAD = "score.weight"
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
    """Rules outside the layers: the embeddings and the final norm."""
    return (EMBEDDING, norm(FINAL_NORM, "model.norm.weight"))


def layer_rules_with(
    norm: Callable[[str, str], Rule], mlp: tuple[Rule, ...] = (GATED, DOWN)
) -> tuple[Rule, ...]:
    """Rules of a layer with a norm before attention and one before the MLP, named as in Llama."""
    return (
        norm(ATTENTION_NORM, "input_layernorm.weight"),
        QKV,
        PROJECTION,
        norm(MLP_NORM, "post_attention_layernorm.weight"),
        *mlp,
    )


MODEL, LAYER = model_rules_with(norm_rule), layer_rules_with(norm_rule)


# Rotary embedding.


def rope_to_nemo(config: Config, rotated: float | None) -> dict[str, Any]:
    """Translate to NeMo's keys from ``rope_parameters`` (transformers 5) or the older keys.

    Args:
        rotated: see ``decoder_to_nemo``.

    Raises:
        CheckpointError: the rotary embedding is not supported.
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
    """Translate to the keys of ``config.json`` for transformers 4 and 5.

    Raises:
        CheckpointError: Hugging Face cannot express its rotary embedding.
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


# Sliding windows.

SLIDING, FULL = "sliding_attention", "full_attention"


def window_to_nemo(config: Config, size: int | None, kinds: list[str]) -> dict[str, Any]:
    """Translate a window of ``size`` keys, in the layers that ``layer_types`` names.

    Args:
        kinds: default of ``layer_types``, one entry for each layer.

    Raises:
        CheckpointError: the layers with a window are not all, none, or every other one.
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
    """NeMo's keys for a window in every layer."""
    return {"window_size": size, "window_pattern": "all"}


def alternating_layers(layers: int) -> list[str]:
    """``layer_types`` of a model with windows in its odd layers, counted from 1."""
    return [FULL if layer % 2 else SLIDING for layer in range(layers)]


def layer_types(config: Config) -> list[str]:
    """``layer_types`` of a NeMo config."""
    shape = ModelShape.from_config(config)
    windows = [shape.window_of(layer + 1) for layer in range(shape.num_layers)]
    return [FULL if window is None else SLIDING for window in windows]


# Megatron's order of queries, keys and values, and added query groups of zeros.

# Axis of query groups by tensor.
_GROUP_AXES = {
    "self_attention.linear_qkv.weight": 0,
    "self_attention.linear_qkv.bias": 0,
    "self_attention.linear_proj.weight": 1,
}


def group_axis(name: str) -> int | None:
    """Axis of query groups in a Megatron tensor; None if it has none."""
    return _GROUP_AXES.get(name)


def pack_qkv(query: Tensor, key: Tensor, value: Tensor, heads: int, groups: int) -> Tensor:
    """Interleave q ``[heads * d, ...]``, k and v ``[groups * d, ...]`` in Megatron's order.

    For each group its queries, its key and its value: ``[(heads + 2 * groups) * d, ...]``.
    """
    rest = query.shape[1:]
    parts = [tensor.reshape(groups, -1, *rest) for tensor in (query, key, value)]
    return torch.cat(parts, dim=1).reshape(-1, *rest)


def unpack_qkv(packed: Tensor, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Invert ``pack_qkv``."""
    rest = packed.shape[1:]
    size = packed.shape[0] // (heads + 2 * groups)
    grouped = packed.reshape(groups, -1, *rest)
    query, key, value = grouped.split([heads // groups * size, size, size], dim=1)
    return (query.reshape(-1, *rest), key.reshape(-1, *rest), value.reshape(-1, *rest))


def add_zero_groups(name: str, tensor: Tensor, groups: int, wanted: int) -> Tensor:
    """Pad a Megatron tensor of ``groups`` query groups with groups of zeros up to ``wanted``.

    Their values are zero and so are their columns of the output projection: they add nothing, their
    gradients are exactly zero, and so they stay zero.
    """
    axis = group_axis(name)
    if axis is None:
        return tensor
    shape = list(tensor.shape)
    shape[axis] = shape[axis] // groups * (wanted - groups)
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=axis)


def remove_zero_groups(name: str, tensor: Tensor, groups: int, kept: int) -> Tensor:
    """Invert ``add_zero_groups``: keep the first ``kept`` of ``groups`` query groups."""
    axis = group_axis(name)
    if axis is None:
        return tensor
    return tensor.narrow(axis, 0, tensor.size(axis) // groups * kept)


# GGUF: llama.cpp's names for a family's fields and tensors, and its changes to them.
# See https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py.

# GGUF's tensor names, then Hugging Face's, as in most families.
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
    """A family's form in GGUF files.

    Names are GGUF's, then Hugging Face's.

    Attributes:
        architecture: ``general.architecture`` of its files.
        layer: tensors of a layer.
        model: tensors outside the layers.
        epsilon: field of its norms' epsilon.
        optional: fields that only this family has.
        derived: computes keys of ``config.json`` that have no field, from those that do.
        is_permuted: the rows of q and k are in rotary pairs, not halves.
        norm_offset: number that was added to the weights of norms.
        is_partly_rotated: some of a head's channels may not be rotated.
        has_classifier: llama.cpp reads ``cls.output.weight`` at the last token of such a model.
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
    has_classifier: bool = False


# The family itself.

# Properties of a decoder, with Llama's values.
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
        to_nemo: translates a ``config.json`` to a NeMo config. Raises CheckpointError for what it
            cannot carry over.
        to_hf: translates a NeMo config to the decoder's part of a ``config.json``, ``model_type``
            first.
        model: rules for tensors outside the layers.
        layer: rules for tensors of a layer, whose Hugging Face names lack ``layer_prefix`` and the
            layer's number.
        untied: rule for the output layer, where it is not the embeddings.
        made_of: fields of ``ModelShape`` in which its decoders differ from Llama's, with their
            values; ``ANY`` is every value.
        gguf: its form in GGUF files; None if llama.cpp has no name for it.
        layer_prefix: prefix of a layer's tensor names, before its number.
        unused: suffixes of stored tensors that are no weights.
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
        """List every rule with its layer's index and full Hugging Face names, in model order.

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
        """Tell if a decoder of this shape belongs to the family."""
        wanted = {**PLAIN, **self.made_of}
        return all(value is ANY or getattr(shape, key) == value for key, value in wanted.items())


def beside_llama(shape: ModelShape) -> str:
    """Describe how a decoder differs from Llama's, for an error."""
    found = {key: getattr(shape, key) for key in PLAIN}
    return ", ".join(f"{key}={value}" for key, value in found.items() if value != PLAIN[key])
