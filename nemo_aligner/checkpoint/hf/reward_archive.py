"""A reward model's archive in the terms of Hugging Face: its tensors by their names there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_aligner.checkpoint.decoder_tensors import EMBEDDING, HEAD, LAYERS, PREFIX
from nemo_aligner.checkpoint.hf.families import family_of
from nemo_aligner.checkpoint.hf.families.family import ModelFamily
from nemo_aligner.checkpoint.hf.families.query_groups import (
    add_zero_groups,
    group_axis,
    remove_zero_groups,
)
from nemo_aligner.checkpoint.hf.families.rules import Rule
from nemo_aligner.checkpoint.hf.tensors import HEAD_KEY, megatron_key, model_rules
from nemo_aligner.checkpoint.nemo.folders import NemoFolder
from nemo_aligner.checkpoint.weights.tensor_store import TensorStore
from nemo_aligner.errors import CheckpointError
from nemo_aligner.models.adapters import folded
from nemo_aligner.models.head_shape import check_is_linear
from nemo_aligner.models.lora import LORA_A, LORA_B, LoraShape, is_of_adapter
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.text.contract import ScoringContract
from nemo_aligner.text.one_reward import check_plain_reading

# What a config may leave out.
_WITH_DEFAULTS = ("kv_channels", "max_position_embeddings", "layernorm_epsilon", "rotary_base")


def check_head(folder: NemoFolder, contract: ScoringContract) -> None:
    """Refuse a head that no reward model of Hugging Face has a place for.

    Raises:
        CheckpointError: it is not one matrix over the last token, with an output for an attribute.
    """
    where, who = str(folder.source), "a reward model of Hugging Face"
    check_plain_reading(contract, where, who)
    check_is_linear(ModelShape.from_config(folder.config).head, where, who)


@dataclass(frozen=True)
class RewardArchive:
    """A reward model's archive; ``config`` is without added query groups.

    LoRA is folded into the weights, but for ``adapters``.
    """

    store: TensorStore
    embedding_dtype: torch.dtype
    family: ModelFamily
    config: dict[str, Any]
    num_query_groups: int
    rules: list[tuple[Rule, int | None]]
    lora: LoraShape | None

    @classmethod
    def of(cls, folder: NemoFolder) -> RewardArchive:
        """Raises CheckpointError where a tensor has no place in the family's model."""
        shape = ModelShape.from_config(folder.config)
        groups = shape.num_query_groups
        kept = groups - int(folder.config.get("zero_query_groups") or 0)
        config = {
            "share_embeddings_and_output_weights": True,  # NeMo's default
            **folder.config,
            **{name: getattr(shape, name) for name in _WITH_DEFAULTS},
            "num_attention_heads": shape.num_attention_heads // groups * kept,
            "num_query_groups": kept,
        }
        family = family_of(config)
        rules = model_rules(family, config, is_reward_model=True)
        known = {HEAD_KEY, *(megatron_key(rule, layer) for rule, layer in rules)}
        stored = folder.store.tensors
        unknown = sorted(key for key in stored.keys() - known if not is_of_adapter(key))
        if unknown:
            raise CheckpointError(
                f"{folder.source}: {unknown[0]}: a {family.name} reward model of Hugging Face has "
                "no place for it"
            )
        dtype = stored[PREFIX + EMBEDDING][1]
        return cls(folder.store, dtype, family, config, groups, rules, shape.lora)

    def split(self, rule: Rule, data: Tensor) -> Sequence[Tensor]:
        """A whole Megatron tensor in Hugging Face's parts, without what was added to it."""
        if rule.megatron == EMBEDDING:
            data = data[: self.config["vocab_size"]]
        kept = self.config["num_query_groups"]
        data = remove_zero_groups(rule.megatron, data, self.num_query_groups, kept)
        return rule.split(data, self.config)

    def join(self, rule: Rule, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of ``split``, but for vocabulary padding."""
        data = rule.join(parts, self.config)
        kept = self.config["num_query_groups"]
        return add_zero_groups(rule.megatron, data, kept, self.num_query_groups)

    def read(self, rule: Rule, layer: int | None) -> Tensor:
        """A whole Megatron tensor."""
        data = self.store.read(megatron_key(rule, layer), layer)
        matrices = self._matrices(rule, layer)
        if matrices is None or self.lora is None:
            return data
        high, low = matrices
        return folded(data, low, high, self.lora.scale)

    def _matrices(self, rule: Rule, layer: int | None) -> tuple[Tensor, Tensor] | None:
        """LoRA's B and A beside a tensor, if it has them there."""
        linear = rule.megatron.removesuffix(".weight")
        if self.lora is None or linear not in self.lora.linears:
            return None
        high, low = (
            self.store.read(f"{PREFIX}{LAYERS}{linear}.{name}", layer) for name in (LORA_B, LORA_A)
        )
        return high, low

    def adapters(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Hugging Face's name of every weight that LoRA is beside, its A and its B.

        Weights that are one of Megatron's have the same A.
        """
        kept = self.config["num_query_groups"]
        for rule, layer in self.rules:
            matrices = self._matrices(rule, layer)
            if matrices is None:
                continue
            pair, axis = list(matrices), group_axis(rule.megatron)
            if axis is not None:
                pair[axis] = remove_zero_groups(
                    rule.megatron, pair[axis], self.num_query_groups, kept
                )
            for name, part in zip(rule.hf, rule.split(pair[0], self.config), strict=True):
                yield name, pair[1], part

    def read_as_exported(self, name: str, layer: int | None, dtype: torch.dtype | None) -> Tensor:
        """A Megatron tensor with the numbers that the folder has: its parts are rounded there."""
        if name == HEAD:
            return self.store.read(HEAD_KEY)
        (rule,) = (rule for rule, at in self.rules if (rule.megatron, at) == (name, layer))
        parts = self.split(rule, self.read(rule, layer))
        return self.join(rule, [part.to(dtype or part.dtype).float() for part in parts])

    def tensors(self, vocab_size: int, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the decoder by its Hugging Face name; ``dtype`` None is as stored.

        The embeddings get rows of zeros up to ``vocab_size``: a pad token may be new.
        """
        for rule, layer in self.rules:
            data = self.read(rule, layer)
            for name, part in zip(rule.hf, self.split(rule, data), strict=True):
                part = part.to(dtype or part.dtype)
                if rule.megatron == EMBEDDING:
                    part = F.pad(part, (0, 0, 0, vocab_size - part.size(0)))
                yield name, part
