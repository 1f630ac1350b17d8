"""Which tensors a model has, by its two names, and of what shapes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nemo_aligner.checkpoint.hf_names import Config, Family, Rule, hf_layer_name
from nemo_aligner.checkpoint.streaming import UnreadTensor
from nemo_aligner.errors import CheckpointError

PREFIX = "model."
HEAD = PREFIX + "rm_head.weight"
HF_HEAD = "score.weight"
REWARD_SUFFIX = "ForSequenceClassification"


def model_rules(
    family: Family, config: Config, is_reward_model: bool
) -> list[tuple[Rule, int | None]]:
    """Every rule with its layer number; where the reward head is, there is no output layer."""
    return [
        (rule, layer)
        for rule, layer in family.rules(config)
        if not (is_reward_model and rule is family.untied)
    ]


def megatron_key(rule: Rule, layer: int | None) -> str:
    """The key of a rule's tensor in a distributed checkpoint; all layers share one."""
    return PREFIX + ("" if layer is None else "decoder.layers.") + rule.megatron


def megatron_shape(rule: Rule, config: Config) -> tuple[int, ...]:
    """The shape of a rule's Megatron tensor, without vocabulary padding or added query groups."""
    hidden, channels = config["hidden_size"], config["kv_channels"]
    *_, module, kind = rule.megatron.split(".")
    if "norm" in rule.megatron:
        of_a_head = module in ("q_layernorm", "k_layernorm")
        return (channels if of_a_head else hidden,)
    heads, groups = config["num_attention_heads"], config["num_query_groups"]
    rows, columns = {
        "word_embeddings": (config["vocab_size"], hidden),
        "output_layer": (config["vocab_size"], hidden),
        "linear_qkv": ((heads + 2 * groups) * channels, hidden),
        "linear_proj": (hidden, heads * channels),
        # A gated activation has two matrices, one on the other.
        "linear_fc1": (config["ffn_hidden_size"] * len(rule.hf), hidden),
        "linear_fc2": (hidden, config["ffn_hidden_size"]),
    }[module]
    return (rows, columns) if kind == "weight" else (rows,)


def hf_shapes(rules: list[tuple[Rule, int | None]], config: Config) -> dict[str, tuple[int, ...]]:
    """The shape of every Hugging Face tensor by its name."""
    shapes = {}
    for rule, layer in rules:
        whole = torch.empty(megatron_shape(rule, config), device="meta")
        for name, part in zip(rule.hf, rule.split(whole, config), strict=True):
            shapes[hf_layer_name(name, layer)] = tuple(part.shape)
    return shapes


def check_tensors(
    family: Family,
    config: Config,
    wanted: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, UnreadTensor],
) -> None:
    """Refuse a Hugging Face checkpoint that has not exactly the tensors that it should have.

    Raises:
        CheckpointError: it names the first tensor that is missing, unknown, or of another shape.
    """
    missing = sorted(wanted.keys() - tensors.keys())
    if missing:
        raise CheckpointError(f"{len(missing)} tensors are missing, the first is {missing[0]}")
    tied = config["share_embeddings_and_output_weights"]
    ignored = (*family.unused, *(("lm_head.weight",) if tied else ()))
    unknown = sorted(name for name in tensors.keys() - wanted.keys() if not name.endswith(ignored))
    if unknown:
        raise CheckpointError(
            f"{len(unknown)} tensors have no place in a {family.name} model, "
            f"the first is {unknown[0]}"
        )
    for name, shape in wanted.items():
        if tensors[name].shape != shape:
            raise CheckpointError(
                f"tensor {name}: got shape {list(tensors[name].shape)}, wanted {list(shape)}"
            )
