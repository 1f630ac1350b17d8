"""``ModelFamily``: translation of a family's settings and tensors to Megatron's, and back.

This module defines, in this order: rules that join and split tensors, rules that several families
share, GGUF's names, and ``ModelFamily``. ``settings.py`` has the parts of a ``config.json`` that
families share, ``query_groups.py`` the order of queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.checkpoint.hf.families.query_groups import pack_qkv, unpack_qkv
from nemo_aligner.checkpoint.hf.families.settings import Config, is_tied
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.experts import EXPERT_COUNT, SHARED_WIDTH
from nemo_aligner.utils.errors import CheckpointError

# Rules, which join Hugging Face tensors to a Megatron tensor, and split it again.

Join = Callable[[Sequence[Tensor], Config], Tensor]
Split = Callable[[Tensor, Config], Sequence[Tensor]]


def _copy(tensors: Sequence[Tensor], config: Config) -> Tensor:
    (tensor,) = tensors
    return tensor


def _keep_unsplit(tensor: Tensor, config: Config) -> Sequence[Tensor]:
    return (tensor,)


@dataclass(frozen=True)
class Rule:
    """Translation of a Megatron tensor to one or more Hugging Face tensors, and back.

    Attributes:
        megatron: name of the Megatron tensor, without prefixes.
        hf: names of the Hugging Face tensors.
        join: function that joins the Hugging Face tensors to the Megatron tensor. Its second
            argument is the NeMo config, in which added query groups of zeros do not count.
        split: function that splits the Megatron tensor into the Hugging Face tensors; same second
            argument as ``join``.
        is_by_group: True if the first axis of the tensor is divided into query groups. Tensors
            whose names are in ``_GROUP_AXES`` need no True. None means that the tensor has no query
            groups although its name is in ``_GROUP_AXES``.
        dtype: dtype that the tensor has in every checkpoint; None means the dtype of the model's
            other weights.
        is_in: function of the NeMo config that tells if the model has the tensor.
    """

    megatron: str
    hf: tuple[str, ...]
    join: Join = _copy
    split: Split = _keep_unsplit
    is_by_group: bool | None = False
    dtype: torch.dtype | None = None
    is_in: Callable[[Config], bool] = lambda config: True

    @property
    def group_axis(self) -> int | None:
        """Axis of the Megatron tensor that is divided into query groups; None if there is none."""
        if self.is_by_group is None:
            return None
        return 0 if self.is_by_group else _GROUP_AXES.get(self.megatron)


def norm_rule(megatron: str, hf: str, *, hf_is_zero_centered: bool = False) -> Rule:
    """Build the rule for the weight of a norm.

    The weight is gamma, or gamma - 1: in Hugging Face if ``hf_is_zero_centered``, in Megatron if
    the NeMo config sets ``layernorm_zero_centered_gamma``. If only one of them stores gamma - 1,
    the rule adds or subtracts 1.
    """

    def shift(config: Config) -> int:
        return hf_is_zero_centered - bool(config.get("layernorm_zero_centered_gamma"))

    def join(tensors: Sequence[Tensor], config: Config) -> Tensor:
        return _copy(tensors, config) + shift(config)

    def split(tensor: Tensor, config: Config) -> Sequence[Tensor]:
        return (tensor - shift(config),)

    return Rule(megatron, (hf,), join, split)


def stacked_rule(megatron: str, *hf: str) -> Rule:
    """Build the rule for tensors of equal size that Megatron concatenates along the first axis.

    Megatron stores, for example, the gate and up projections of an MLP in one tensor.
    """

    def join(tensors: Sequence[Tensor], config: Config) -> Tensor:
        return torch.cat(list(tensors))

    def split(tensor: Tensor, config: Config) -> Sequence[Tensor]:
        return tensor.chunk(len(hf))

    return Rule(megatron, hf, join, split)


def experts_rule(megatron: str, *hf: str) -> Rule:
    """Build the rule that stacks the matrices of all E experts into one tensor ``[E, ..., in]``.

    Args:
        hf: names of one expert's matrices, with EXPERT for its number. Several matrices, such as
            the gate and up projections, have equal sizes and form the second axis:
            ``[E, len(hf), out, in]``.
    """

    def join(tensors: Sequence[Tensor], config: Config) -> Tensor:
        # ``tensors`` has the matrices of the first expert, in the order of ``hf``, then those of
        # the second expert, and so on.
        matrices = torch.stack(list(tensors))
        return matrices if len(hf) == 1 else matrices.unflatten(0, (-1, len(hf)))

    def split(tensor: Tensor, config: Config) -> Sequence[Tensor]:
        return (tensor if len(hf) == 1 else tensor.flatten(0, 1)).unbind()

    return Rule(megatron, hf, join, split)


# Placeholder in a rule's tensor names for the number of an expert.
EXPERT = "{expert}"
# Value of ``ModelFamily.dropped`` for the layers that follow the decoder's last layer. They predict
# further tokens in training (DeepSeek-V3's multi-token prediction), and have the next layer
# numbers.
MTP_LAYERS = "model.layers.{mtp}."


def experts_rules(kind: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """Build the rules for the matrices of a layer's experts, or of its shared expert.

    Args:
        kind: ``experts`` or ``shared_experts``.
        gate, up, down: Hugging Face names of one expert's matrices.
    """
    return (
        experts_rule(f"mlp.{kind}.linear_fc1.weight", gate, up),
        experts_rule(f"mlp.{kind}.linear_fc2.weight", down),
    )


def qkv_rule(megatron: str, query: str, key: str, value: str) -> Rule:
    """Build the rule for queries, keys and values, which Megatron interleaves by query group.

    ``query``, ``key`` and ``value`` are the Hugging Face names of three separate tensors.
    """

    def join(tensors: Sequence[Tensor], config: Config) -> Tensor:
        heads, groups = config["num_attention_heads"], config["num_query_groups"]
        expected = [count * config["kv_channels"] for count in (heads, groups, groups)]
        rows = [tensor.shape[0] for tensor in tensors]
        if rows != expected:
            names = [name.split(".")[-2:][0] for name in (query, key, value)]
            raise CheckpointError(
                f"{names[0]}, {names[1]} and {names[2]}: got {rows} rows, but the config implies "
                f"{expected}"
            )
        queries, keys, values = tensors
        return pack_qkv(queries, keys, values, heads, groups)

    def split(tensor: Tensor, config: Config) -> Sequence[Tensor]:
        return unpack_qkv(tensor, config["num_attention_heads"], config["num_query_groups"])

    return Rule(megatron, (query, key, value), join, split)


def gated_qkv_rule(megatron: str, query: str, key: str, value: str) -> Rule:
    """Build the rule for queries with output gates, keys and values.

    Rows in Hugging Face's query tensor: for each head its query, then its gate. Rows in Megatron:
    for each query group its queries, its gates, its key and its value.
    """

    def counts(config: Config) -> tuple[int, int, int]:
        return config["num_attention_heads"], config["num_query_groups"], config["kv_channels"]

    def join(tensors: Sequence[Tensor], config: Config) -> Tensor:
        heads, groups, channels = counts(config)
        rows = tensors[0].shape[1:]
        by_head = tensors[0].reshape(groups, heads // groups, 2, channels, *rows)
        queries = by_head.transpose(1, 2).reshape(groups, -1, *rows)
        parts = (tensor.reshape(groups, -1, *rows) for tensor in tensors[1:])
        return torch.cat([queries, *parts], dim=1).reshape(-1, *rows)

    def split(tensor: Tensor, config: Config) -> Sequence[Tensor]:
        heads, groups, channels = counts(config)
        rows = tensor.shape[1:]
        width = 2 * heads // groups * channels
        grouped = tensor.reshape(groups, -1, *rows)
        queries, *parts = grouped.split([width, channels, channels], dim=1)
        by_head = queries.reshape(groups, 2, heads // groups, channels, *rows).transpose(1, 2)
        return (by_head.reshape(-1, *rows), *(part.reshape(-1, *rows) for part in parts))

    return Rule(megatron, (query, key, value), join, split)


def fused_qkv_rule(megatron: str, fused: str) -> Rule:
    """Build the rule for queries, keys and values that Hugging Face concatenates in one tensor."""

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
    """Change a rule for q, k and v for a family whose RoPE rotates pairs of neighbouring channels.

    Such a family rotates channel ``2 i`` of a head with channel ``2 i + 1``. The changed rule moves
    these to channels ``i`` and ``i + r``, which Megatron rotates together if RoPE is applied to
    ``2 r`` channels. Attention scores do not change, because they are sums over the channels.
    """

    def reorder(tensor: Tensor, config: Config, sizes: tuple[int, int]) -> Tensor:
        channels, row_shape = config["kv_channels"], tensor.shape[1:]
        rotated = int(channels * config["rotary_percentage"])
        heads = tensor.reshape(-1, channels, *row_shape)
        first = heads[:, :rotated].unflatten(1, sizes).transpose(1, 2).flatten(1, 2)
        return torch.cat([first, heads[:, rotated:]], dim=1).reshape(-1, *row_shape)

    def join(tensors: Sequence[Tensor], config: Config) -> Tensor:
        query, key, value = tensors
        query, key = (reorder(tensor, config, (-1, 2)) for tensor in (query, key))
        return rule.join((query, key, value), config)

    def split(tensor: Tensor, config: Config) -> Sequence[Tensor]:
        query, key, value = rule.split(tensor, config)
        query, key = (reorder(tensor, config, (2, -1)) for tensor in (query, key))
        return query, key, value

    return replace(rule, join=join, split=split)


# Names and rules of tensors that several families share.

FINAL_NORM = "decoder.final_layernorm.weight"
ATTENTION_NORM = "self_attention.linear_qkv.layer_norm_weight"
MLP_NORM = "mlp.linear_fc1.layer_norm_weight"

# Name of the reward head in transformers' reward-model classes.
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
    """Build the rules for the norms of queries and keys.

    ``norm`` builds the rule of one norm from its Megatron name and its Hugging Face name.
    """
    return (
        norm("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
        norm("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
    )


QUERY_KEY_NORMS = query_key_norms(norm_rule)
# Rules for norms that normalize the queries (or keys) of all heads together, not head by head.
ACROSS_HEADS_NORMS = tuple(replace(rule, is_by_group=True) for rule in QUERY_KEY_NORMS)


def model_rules_with(norm: Callable[[str, str], Rule]) -> tuple[Rule, ...]:
    """Build the rules outside the layers: embedding and final norm.

    ``norm`` builds the rule of one norm from its Megatron name and its Hugging Face name.
    """
    return (EMBEDDING, norm(FINAL_NORM, "model.norm.weight"))


def layer_rules_with(
    norm: Callable[[str, str], Rule] = norm_rule,
    mlp: tuple[Rule, ...] = (GATED, DOWN),
    attention: tuple[Rule, ...] = (QKV, PROJECTION),
    mlp_norm: str = MLP_NORM,
) -> tuple[Rule, ...]:
    """Build the rules of a layer with Llama's names and Llama's order of norms and blocks.

    Llama has one norm before attention and one before the MLP. Other families pass the parts in
    which they differ as arguments.

    Args:
        norm: builds the rule of one norm from its Megatron name and its Hugging Face name.
        mlp: rules of the MLP's matrices.
        attention: rules of the attention's matrices.
        mlp_norm: Megatron name of the norm before the MLP.
    """
    return (
        norm(ATTENTION_NORM, "input_layernorm.weight"),
        *attention,
        norm(mlp_norm, "post_attention_layernorm.weight"),
        *mlp,
    )


MODEL, LAYER = model_rules_with(norm_rule), layer_rules_with()
# Rules of Llama's MLP and of the norm before it, for layers without experts in mixture-of-experts
# models.
DENSE_MLP = (norm_rule(MLP_NORM, "post_attention_layernorm.weight"), GATED, DOWN)


# Axis that is divided into query groups, by the name of the Megatron tensor.
_GROUP_AXES = {
    "self_attention.linear_qkv.weight": 0,
    "self_attention.linear_qkv.bias": 0,
    "self_attention.linear_proj.weight": 1,
}


# llama.cpp's names for a family's fields and tensors in GGUF files, and how llama.cpp changes the
# tensors. See https://github.com/ggml-org/llama.cpp/blob/master/convert_hf_to_gguf.py.

# Maps from GGUF's tensor names to Hugging Face's, which most families share.
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
    """How GGUF files store the models of a family.

    All maps go from GGUF's names to Hugging Face's.

    Attributes:
        architecture: ``general.architecture`` of the files.
        layer: names of the tensors of a layer.
        model: names of the tensors outside the layers.
        epsilon: GGUF field of the norms' epsilon, and its key in ``config.json``.
        optional: GGUF fields that only some families have, and their keys in ``config.json``.
        derived: function that computes the settings for which GGUF has no field from the settings
            that were read. Its argument and its result have the keys of ``config.json``.
        is_permuted: the rows of q and k are ordered for a RoPE that rotates neighbouring channels,
            not the two halves of a head.
        norm_offset: number that llama.cpp's converter added to the weights of norms.
        is_partly_rotated: whether RoPE may be applied to only some of a head's channels.
        is_share_of_hidden: llama.cpp's converter computes the number of rotated channels from the
            hidden size divided by the number of heads. So the number is wrong if a head has another
            size.
        has_windows: there are fields for a sliding window and the layers that have it.
        marked_by: field that only this family's files have, if two families share an architecture.
            None for the second family, and for a family with an architecture of its own.
        has_classifier: llama.cpp supports a reward head for this family: the tensor
            ``cls.output.weight``, at the last token.
        may_have_biases: some models of the family have biases of queries, keys and values. There is
            no field for it, so the reader looks for the tensors.
        hf_family: name of the family whose tensors the file has; None for the family itself.
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


# The class ``ModelFamily``, and the settings in which families differ.

# Fields of ``ModelShape`` in which families differ, with Llama's values.
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
    "attention_output_gate": False,
    "experts": None,
    "linear_attention": None,
    "qk_norm_after_rope": False,
    "linear_bias": False,
    "parallel_residual": False,
    "one_norm_per_layer": False,
    "moe_layer_freq": None,
    "latent_attention": None,
    "attention_sinks": False,
    "proj_bias": False,
    "hybrid_pattern": None,
    "gemma4": None,
    "rope_fp32": None,
}
ANY = object()
ANY_WINDOW: Mapping[str, Any] = dict.fromkeys(
    ("window_size", "window_pattern", "window_attn_skip_freq"), ANY
)


@dataclass(frozen=True)
class ModelFamily:
    """A model family: how its settings, tensors and GGUF files are translated.

    The defaults are Llama's.

    Attributes:
        name: ``model_type`` in ``config.json``.
        to_nemo: translates a ``config.json`` to a NeMo config. Raises CheckpointError for settings
            that it cannot translate.
        to_hf: translates a NeMo config to the decoder's part of a ``config.json``, which begins
            with ``model_type``.
        model: rules for the tensors outside the layers.
        layer: rules for the tensors of a layer. Their Hugging Face names lack ``layer_prefix`` and
            the layer's number.
        linear_layer: rules for the tensors of a layer with linear attention, with names as in
            ``layer``.
        untied: rule for the output layer (LM head). A model has no such tensor if the output layer
            uses the embedding's weights.
        made_of: fields of ``ModelShape`` in which the family's decoders differ from Llama's, with
            the values that the family has. ``ANY`` stands for any value. A function tells if the
            family supports a value.
        gguf: how GGUF files store the family; None if llama.cpp does not support it.
        layer_prefix: prefix of a layer's tensor names, before its number.
        unused: suffixes of tensor names that a conversion skips, because they are buffers, not
            weights.
        dropped: prefix of the names of tensors that a conversion drops and counts, because a reward
            model does not need them; "" if there are none. ``MTP_LAYERS`` stands for the layers
            that follow the decoder's last one. A function returns the prefixes for a
            ``config.json``.
        dense_mlp: rules for the MLP, and the norm before it, of the layers without experts in a
            mixture-of-experts model. They replace the rules of experts, router and norm in
            ``layer`` or ``linear_layer``.
        prefixes: prefixes of tensor names that transformers has in memory, and writes for some
            classes, with the published prefixes.
        rules_of: function that returns the rules of a layer from ``ModelShape.of_layer`` of it, for
            families whose layers differ in the sizes of heads; None means ``layer``.
    """

    name: str
    to_nemo: Callable[[Config], dict[str, Any]]
    to_hf: Callable[[Config], dict[str, Any]]
    model: tuple[Rule, ...] = MODEL
    layer: tuple[Rule, ...] = LAYER
    linear_layer: tuple[Rule, ...] = ()
    untied: Rule = OUTPUT
    made_of: Mapping[str, Any] = field(default_factory=dict)
    gguf: GgufFormat | None = None
    layer_prefix: str = "model.layers."
    unused: tuple[str, ...] = ("rotary_emb.inv_freq",)
    dropped: str | Callable[[Config], list[str]] = ""
    dense_mlp: tuple[Rule, ...] = DENSE_MLP
    rules_of: Callable[[ModelShape], tuple[Rule, ...]] | None = None
    prefixes: Mapping[str, str] = field(default_factory=dict)

    def published_name(self, name: str) -> str:
        """Replace a prefix of a tensor's name that is in ``prefixes`` by the published one."""
        return _with_prefix(name, self.prefixes.items())

    def name_in_memory(self, name: str) -> str:
        """Invert ``published_name``: a model of transformers has these names, once loaded."""
        return _with_prefix(name, [(value, key) for key, value in self.prefixes.items()])

    def rules(self, config: Config) -> list[tuple[Rule, int | None]]:
        """List all rules, with complete Hugging Face names and their layers, in the model's order.

        Args:
            config: NeMo config of the model.

        Returns:
            Pairs of a rule and its layer, from 0 on; None outside the layers.
        """
        shape = ModelShape.from_config(config)
        return [
            *((rule, None) for rule in self.model if rule.is_in(config)),
            *(
                (self._in_layer(rule, layer, config), layer)
                for layer in range(config["num_layers"])
                for rule in self._layer_rules(shape, layer)
                # Skip the rules of tensors that this model does not have: a family's rules include,
                # for example, the biases of queries and keys that only some of its models have.
                if config.get(_OPTIONAL_RULES.get(rule.megatron, "num_layers"))
                if rule.is_in(config)
            ),
            *(() if is_tied(config) else ((self.untied, None),)),
        ]

    def _layer_rules(self, shape: ModelShape, layer: int) -> tuple[Rule, ...]:
        """Return the rules of a layer, which depend on its attention and MLP; counted from 0."""
        of_layer = shape.of_layer(layer + 1)
        if self.rules_of is not None:
            return self.rules_of(of_layer)
        rules = self.layer if of_layer.linear_attention is None else self.linear_layer
        mixer = [rule for rule in rules if not rule.megatron.startswith(("mlp.", EXPERTS_NORM))]
        if not of_layer.has_mlp:
            return tuple(mixer)
        has_experts = any(rule.megatron.startswith("mlp.experts.") for rule in rules)
        if of_layer.experts is None and has_experts:
            rules = (*mixer, *self.dense_mlp)
        return rules if of_layer.has_mixer else tuple(rule for rule in rules if rule not in mixer)

    def _in_layer(self, rule: Rule, layer: int, config: Config) -> Rule:
        names: Iterable[str] = rule.hf
        if EXPERT in rule.hf[0]:
            experts = range(config[EXPERT_COUNT])
            names = [name.replace(EXPERT, str(expert)) for expert in experts for name in rule.hf]
        return replace(rule, hf=tuple(f"{self.layer_prefix}{layer}.{name}" for name in names))

    def has(self, shape: ModelShape) -> bool:
        """Tell if a decoder of this shape belongs to the family."""
        expected = {**PLAIN, **self.made_of}
        return all(_is_match(getattr(shape, key), value) for key, value in expected.items())


# Tensors that only some models of a family have, each with the key of a NeMo config that tells if a
# model has it.
_OPTIONAL_RULES = {
    QKV_BIAS.megatron: "qkv_bias",
    **{rule.megatron: "qk_layernorm" for rule in QUERY_KEY_NORMS},
    **{f"mlp.shared_experts.linear_fc{part}.weight": SHARED_WIDTH for part in (1, 2)},
}


def _with_prefix(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    """Replace a prefix of ``name``, the first of a pair, by the second."""
    for prefix, replacement in pairs:
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name


def _is_match(value: Any, expected: Any) -> bool:
    if callable(expected):
        return expected(value)
    return expected is ANY or value == expected


def describe_differences_from_llama(shape: ModelShape) -> str:
    """List the settings in which a decoder differs from Llama's as text for an error."""
    values = {key: getattr(shape, key) for key in PLAIN}
    return ", ".join(f"{key}={value}" for key, value in values.items() if value != PLAIN[key])
