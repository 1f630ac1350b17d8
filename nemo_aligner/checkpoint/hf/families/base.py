"""ModelFamily: translation of a family's config and tensors to Megatron's and back.

Also here: rules for tensors, query groups of zeros, and GGUF's names. ``settings.py`` has the parts
of a ``config.json`` that families share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.checkpoint.hf.families.settings import Config, is_tied
from nemo_aligner.models.layer_shape import EXPERT_COUNT
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.utils.errors import CheckpointError

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

    Attributes:
        is_by_group: the tensor has a part for each query group along its first axis, though its
            name does not say so.
    """

    megatron: str
    hf: tuple[str, ...]
    join: Join = _copy
    split: Split = _whole
    is_by_group: bool = False

    @property
    def group_axis(self) -> int | None:
        """Axis of query groups in the Megatron tensor; None if it has none."""
        return 0 if self.is_by_group else _GROUP_AXES.get(self.megatron)


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


def experts_rule(megatron: str, *hf: str) -> Rule:
    """Rule for the matrices of all experts, ``[E, ..., in]``; each has one of every ``hf``.

    Of several, which have one size, each is a part of the second axis: a gate and a projection. The
    place of an expert's number is EXPERT.
    """

    def join(tensors: Sequence[Tensor], config: Config) -> Tensor:
        # Names go expert by expert, and gate before projection within one.
        matrices = torch.stack(list(tensors))
        return matrices if len(hf) == 1 else matrices.unflatten(0, (-1, len(hf)))

    def split(tensor: Tensor, config: Config) -> Sequence[Tensor]:
        return (tensor if len(hf) == 1 else tensor.flatten(0, 1)).unbind()

    return Rule(megatron, hf, join, split)


# In a rule's names, stands for the number of an expert.
EXPERT = "{expert}"


def experts_rules(kind: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Rules for the matrices of a layer's experts, or of its shared one."""
    return (
        experts_rule(f"mlp.{kind}.linear_fc1.weight", gate, up),
        experts_rule(f"mlp.{kind}.linear_fc2.weight", down),
    )


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


def fused_qkv_rule(megatron: str, fused: str) -> Rule:
    """Rule for queries, keys and values that lie in one tensor, one after the other."""

    def join(tensors: Sequence[Tensor], config: Config) -> Tensor:
        heads, groups = config["num_attention_heads"], config["num_query_groups"]
        size = config["kv_channels"]
        query, key, value = tensors[0].split([heads * size, groups * size, groups * size])
        return pack_qkv(query, key, value, heads, groups)

    def split(tensor: Tensor, config: Config) -> Sequence[Tensor]:
        parts = unpack_qkv(tensor, config["num_attention_heads"], config["num_query_groups"])
        return (torch.cat(parts),)

    return Rule(megatron, (fused,), join, split)


def interleaved(rule: Rule) -> Rule:
    """Change a ``qkv_rule`` for a family that rotates pairs of neighbouring channels.

    Channel ``2 i`` of a head, which they rotate with ``2 i + 1``, is channel ``i`` here, rotated
    with ``i + r``. Scores are sums over channels, whose order is free.
    """

    def reorder(tensor: Tensor, config: Config, sizes: tuple[int, int]) -> Tensor:
        channels, rest = config["kv_channels"], tensor.shape[1:]
        turned = int(channels * config["rotary_percentage"])
        heads = tensor.reshape(-1, channels, *rest)
        first = heads[:, :turned].unflatten(1, sizes).transpose(1, 2).flatten(1, 2)
        return torch.cat([first, heads[:, turned:]], dim=1).reshape(-1, *rest)

    def join(tensors: Sequence[Tensor], config: Config) -> Tensor:
        query, key, value = tensors
        query, key = (reorder(each, config, (-1, 2)) for each in (query, key))
        return rule.join((query, key, value), config)

    def split(tensor: Tensor, config: Config) -> Sequence[Tensor]:
        query, key, value = rule.split(tensor, config)
        query, key = (reorder(each, config, (2, -1)) for each in (query, key))
        return query, key, value

    return replace(rule, join=join, split=split)


# Rules for tensors that several families name alike.

FINAL_NORM = "decoder.final_layernorm.weight"
ATTENTION_NORM = "self_attention.linear_qkv.layer_norm_weight"
MLP_NORM = "mlp.linear_fc1.layer_norm_weight"

# The reward head of transformers' classes.
HF_HEAD = "score.weight"
EMBEDDING = Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",))
OUTPUT = Rule("output_layer.weight", ("lm_head.weight",))
PROJECTION = Rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",))
FUSED_GATED = Rule("mlp.linear_fc1.weight", ("mlp.gate_up_proj.weight",))
GATED = stacked_rule("mlp.linear_fc1.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight")
UNGATED = Rule("mlp.linear_fc1.weight", ("mlp.up_proj.weight",))
DOWN = Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",))
EXPERTS_NORM = "pre_mlp_layernorm.weight"


def _qkv(kind: str) -> Rule:
    query, key, value = (f"self_attn.{part}_proj.{kind}" for part in "qkv")
    return qkv_rule(f"self_attention.linear_qkv.{kind}", query, key, value)


QKV, QKV_BIAS = _qkv("weight"), _qkv("bias")
POST_ATTENTION_NORM = "self_attention.linear_proj.post_layernorm.weight"
POST_MLP_NORM = "mlp.linear_fc2.post_layernorm.weight"


def query_key_norms(norm: Callable[[str, str], Rule]) -> tuple[Rule, ...]:
    """Rules for norms of queries and keys."""
    return (
        norm("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
        norm("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
    )


QUERY_KEY_NORMS = query_key_norms(norm_rule)
# Over all heads together.
ACROSS_HEADS_NORMS = tuple(replace(rule, is_by_group=True) for rule in QUERY_KEY_NORMS)


def model_rules_with(norm: Callable[[str, str], Rule]) -> tuple[Rule, ...]:
    """Rules outside the layers: the embeddings and the final norm."""
    return (EMBEDDING, norm(FINAL_NORM, "model.norm.weight"))


def layer_rules_with(
    norm: Callable[[str, str], Rule] = norm_rule,
    mlp: tuple[Rule, ...] = (GATED, DOWN),
    attention: tuple[Rule, ...] = (QKV, PROJECTION),
    mlp_norm: str = MLP_NORM,
) -> tuple[Rule, ...]:
    """Rules of a layer with a norm before attention and one before the MLP, named as in Llama."""
    return (
        norm(ATTENTION_NORM, "input_layernorm.weight"),
        *attention,
        norm(mlp_norm, "post_attention_layernorm.weight"),
        *mlp,
    )


MODEL, LAYER = model_rules_with(norm_rule), layer_rules_with()


# Megatron's order of queries, keys and values, and added query groups of zeros.

# Axis of query groups by tensor.
_GROUP_AXES = {
    "self_attention.linear_qkv.weight": 0,
    "self_attention.linear_qkv.bias": 0,
    "self_attention.linear_proj.weight": 1,
}


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
    # Channels of a head, for a weight as for a bias.
    size = packed.shape[0] // (heads + 2 * groups)
    grouped = packed.reshape(groups, -1, *rest)
    query, key, value = grouped.split([heads // groups * size, size, size], dim=1)
    return (query.reshape(-1, *rest), key.reshape(-1, *rest), value.reshape(-1, *rest))


def add_zero_groups(axis: int | None, tensor: Tensor, groups: int, wanted: int) -> Tensor:
    """Pad a Megatron tensor of ``groups`` query groups with groups of zeros up to ``wanted``.

    Their values are zero and so are their columns of the output projection: they add nothing, their
    gradients are exactly zero, and so they stay zero.

    Args:
        axis: of query groups, by ``Rule.group_axis``.
    """
    if axis is None:
        return tensor
    shape = list(tensor.shape)
    shape[axis] = shape[axis] // groups * (wanted - groups)
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=axis)


def remove_zero_groups(axis: int | None, tensor: Tensor, groups: int, kept: int) -> Tensor:
    """Invert ``add_zero_groups``: keep the first ``kept`` of ``groups`` query groups."""
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
QUERY_KEY_NORM_NAMES = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
LLAMA_NAMES = {**ATTENTION_NAMES, **MLP_NORM_NAMES, **GATED_MLP_NAMES}
POST_NORM_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


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
        is_share_of_hidden: the count of rotated channels is one of the hidden size per head, which
            says nothing of heads of another size.
        has_windows: a window, and the layers that have it, are fields.
        marked_by: field that only this family's files have, of two families with this architecture;
            None for the other, or for one alone.
        has_classifier: llama.cpp reads ``cls.output.weight`` at the last token of such a model.
        may_have_biases: queries, keys and values have biases in some models of the family, which
            the tensors tell and no field.
        hf_family: name of the family whose tensors the file has; None is the family itself.
    """

    architecture: str
    layer: Mapping[str, str] = field(default_factory=lambda: LLAMA_NAMES)
    model: Mapping[str, str] = field(default_factory=lambda: MODEL_NAMES)
    epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    optional: Mapping[str, str] = field(default_factory=dict)
    derived: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}
    is_permuted: bool = False
    norm_offset: int = 0
    is_partly_rotated: bool = False
    is_share_of_hidden: bool = False
    has_windows: bool = False
    marked_by: str | None = None
    has_classifier: bool = False
    may_have_biases: bool = False
    hf_family: str | None = None


# The family itself.

# Properties of a decoder, with Llama's values.
PLAIN: Mapping[str, Any] = {
    "activation": "swiglu",
    "normalization": "rmsnorm",
    "qkv_bias": False,
    "qk_layernorm": False,
    "qk_layernorm_across_heads": False,
    "pre_layernorms": True,
    "post_layernorms": False,
    "apply_embedding_scaling": False,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "rotary_percentage": 1.0,
    "rotary_base_local": None,
    "query_scaling": None,
    "no_rope_freq": None,
    "window_size": None,
    "window_pattern": "all",
    "window_attn_skip_freq": None,
    "attn_logit_softcapping": None,
    "query_pre_attn_scalar": None,
    "experts": None,
}
ANY = object()
ANY_WINDOW: Mapping[str, Any] = dict.fromkeys(
    ("window_size", "window_pattern", "window_attn_skip_freq"), ANY
)


@dataclass(frozen=True)
class ModelFamily:
    """A family: its config, its tensors and its GGUF files; tensors are Llama's by default.

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
            values; ``ANY`` is every value, and a function tells if one is of the family.
        gguf: its form in GGUF files; None if llama.cpp has no name for it.
        layer_prefix: prefix of a layer's tensor names, before its number.
        unused: suffixes of stored tensors that are no weights.
    """

    name: str
    to_nemo: Callable[[Config], dict[str, Any]]
    to_hf: Callable[[Config], dict[str, Any]]
    model: tuple[Rule, ...] = MODEL
    layer: tuple[Rule, ...] = LAYER
    untied: Rule = OUTPUT
    made_of: Mapping[str, Any] = field(default_factory=dict)
    gguf: GgufFormat | None = None
    layer_prefix: str = "model.layers."
    unused: tuple[str, ...] = ("rotary_emb.inv_freq",)

    def rules(self, config: Config) -> list[tuple[Rule, int | None]]:
        """List every rule with its layer's index and full Hugging Face names, in model order.

        ``config`` is the NeMo one.
        """
        return [
            *((rule, None) for rule in self.model),
            *(
                (self._in_layer(rule, layer, config), layer)
                for layer in range(config["num_layers"])
                for rule in self.layer
                # A family may have biases or not; its rules list them always.
                if rule.megatron != QKV_BIAS.megatron or config["qkv_bias"]
            ),
            *(() if is_tied(config) else ((self.untied, None),)),
        ]

    def _in_layer(self, rule: Rule, layer: int, config: Config) -> Rule:
        names: Iterable[str] = rule.hf
        if EXPERT in rule.hf[0]:
            experts = range(config[EXPERT_COUNT])
            names = [name.replace(EXPERT, str(each)) for each in experts for name in rule.hf]
        return replace(rule, hf=tuple(f"{self.layer_prefix}{layer}.{name}" for name in names))

    def has(self, shape: ModelShape) -> bool:
        """Tell if a decoder of this shape belongs to the family."""
        wanted = {**PLAIN, **self.made_of}
        return all(_fits(getattr(shape, key), value) for key, value in wanted.items())


def _fits(found: Any, wanted: Any) -> bool:
    if callable(wanted):
        return wanted(found)
    return wanted is ANY or found == wanted


def beside_llama(shape: ModelShape) -> str:
    """Describe how a decoder differs from Llama's, for an error."""
    found = {key: getattr(shape, key) for key in PLAIN}
    return ", ".join(f"{key}={value}" for key, value in found.items() if value != PLAIN[key])
