"""Which tensors a model has, by its two names, and of what shapes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nemo_aligner.checkpoint.decoder_tensors import (
    EMBEDDING,
    HEAD,
    LAYERS,
    OUTPUT_LAYER,
    PREFIX,
    layer_tensors,
    model_tensors,
)
from nemo_aligner.checkpoint.hf.families.family import ModelFamily
from nemo_aligner.checkpoint.hf.families.rules import Rule
from nemo_aligner.checkpoint.hf.families.settings import Config
from nemo_aligner.checkpoint.weights.stream import UnreadTensor
from nemo_aligner.errors import CheckpointError, short
from nemo_aligner.models.shape import ModelShape

HEAD_KEY = PREFIX + HEAD
HF_HEAD = "score.weight"
REWARD_SUFFIX = "ForSequenceClassification"


def model_rules(
    family: ModelFamily, config: Config, is_reward_model: bool
) -> list[tuple[Rule, int | None]]:
    """Every rule with its layer number; where the reward head is, there is no output layer."""
    return [
        (rule, layer)
        for rule, layer in family.rules(config)
        if not (is_reward_model and rule is family.untied)
    ]


def megatron_key(rule: Rule, layer: int | None) -> str:
    """The key of a rule's tensor in a distributed checkpoint; all layers have the same one."""
    return PREFIX + ("" if layer is None else LAYERS) + rule.megatron


def hf_shapes(rules: list[tuple[Rule, int | None]], config: Config) -> dict[str, tuple[int, ...]]:
    """The shape of every Hugging Face tensor by its name; ``config`` has no added query groups."""
    decoder = ModelShape.from_config(config)
    of_model, of_layer = model_tensors(decoder), layer_tensors(decoder)
    of_model[OUTPUT_LAYER] = of_model[EMBEDDING]
    shapes = {}
    for rule, layer in rules:
        size = (of_model if layer is None else of_layer)[rule.megatron]
        try:
            parts = rule.split(torch.empty(size, device="meta"), config)
        except (RuntimeError, TypeError) as error:  # more numbers than torch can count
            raise CheckpointError(
                f"config.json: it asks for a {rule.megatron} of {size}"
            ) from error
        for name, part in zip(rule.hf, parts, strict=True):
            shapes[name] = tuple(part.shape)
    return shapes


def check_tensors(
    family: ModelFamily,
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
    ignored = (*family.unused, *(family.untied.hf if tied else ()))
    unknown = sorted(name for name in tensors.keys() - wanted.keys() if not name.endswith(ignored))
    if unknown:
        raise CheckpointError(
            f"{len(unknown)} tensors have no place in a {family.name} model, "
            f"the first is {short(unknown[0])}"
        )
    for name, shape in wanted.items():
        if tensors[name].shape != shape:
            raise CheckpointError(
                f"tensor {name}: got shape {list(tensors[name].shape)}, wanted {list(shape)}"
            )
