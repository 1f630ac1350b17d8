"""ModelFamily: all that a family of models is to this package, in one value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nemo_aligner.checkpoint.hf.families.decoder import is_tied
from nemo_aligner.checkpoint.hf.families.gguf_format import GgufFormat
from nemo_aligner.checkpoint.hf.families.rules import Rule
from nemo_aligner.checkpoint.hf.families.settings import Config
from nemo_aligner.models.shape import ModelShape

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
