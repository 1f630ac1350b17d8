"""The text decoder inside a model of several modalities: its config and its tensors.

The models that are read call their decoder on embedded tokens like any other one, so that for a
text alone they are that decoder. ``tests/checkpoint/hf/test_multimodal.py`` compares each of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from nemo_aligner.utils.errors import CheckpointError, shown

# model_type of the whole, and that of its text_config unless it says otherwise.
_DECODERS = {
    "gemma3": "gemma3_text",
    "internvl": "qwen2",
    "llava": "llama",
    "llava_next": "llama",
    "mistral3": "mistral",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
}
_SIZES = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 131072,
}
_QWEN2 = {"rope_theta": 1000000.0, "rms_norm_eps": 1e-5, "max_window_layers": 80}
# Decoders that are a known family's: that family, and the defaults of theirs that it has not.
# Their rotation by three coordinates (mrope) is the usual one for a text, whose three are equal.
_SAME_AS: dict[str, tuple[str, dict[str, Any]]] = {
    # LLaVA's releases leave out what does not differ from transformers' class.
    "llama": ("llama", {**_SIZES, "intermediate_size": 11008, "max_position_embeddings": 2048}),
    "mistral": ("mistral", {**_SIZES, "intermediate_size": 14336, "num_key_value_heads": 8}),
    "qwen2_vl_text": ("qwen2", _QWEN2),
    "qwen2_5_vl_text": ("qwen2", _QWEN2),
    "qwen3_vl_text": ("qwen3", {"rope_theta": 500000.0}),
}
_WHY_NOT = {
    "gemma3n": "its decoder has embeddings in every layer",
    "llama4": "the layout of its experts is not read",
    "mllama": "layers of its decoder attend to images",
    "paligemma": "its decoder sees a prompt in both directions",
    "qwen3_vl_moe": "the layout of its experts is not read",
}
_ROPE_KEYS = ("rope_parameters", "rope_scaling")
_DECODER = re.compile(r"(?:model\.)?language_model\.(?:model\.)?(.+)")
_OTHER_PARTS = re.compile(
    r"(?:model\.)?(vision_tower|vision_model|visual|multi_modal_projector|image_newline)\b"
)
_HEADS = ("lm_head.", "score.")
# Settings of a reward head, which stand beside the decoder's.
_OF_HEAD = (
    "architectures",
    "id2label",
    "problem_type",
    "value_head_prefix",
    "reward_token_id",
    "classifier_from_token",
    "method",
    "mean",
    "std",
)


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Tell if a ``config.json`` is of a model with more than a text decoder."""
    return config.get("model_type") in tuple(_DECODERS) or isinstance(
        config.get("text_config"), Mapping
    )


def decoder_config(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Extract the decoder's ``config.json`` from that of the whole.

    Args:
        names: the decoder's tensors, by ``decoder_name``.

    Raises:
        CheckpointError: the whole is not known to run its decoder like any other one.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _DECODERS:
        why = _WHY_NOT.get(kind, "") if isinstance(kind, str) else ""
        raise CheckpointError(
            f"model_type: got {shown(kind)}, a model with more than a text decoder"
            + (f": {why}" if why else "")
            + f"; wanted a decoder, or one of {', '.join(_DECODERS)}"
        )
    inside = config.get("text_config")
    if not isinstance(inside, Mapping | None):
        raise CheckpointError(f"text_config: got {shown(inside)}, wanted keys and values")
    # Older Qwen-VL has the decoder's settings among the others.
    text = {key: value for key, value in (inside or config).items() if value is not None}
    own = text["model_type"] if inside and "model_type" in text else _DECODERS[kind]
    family, defaults = _SAME_AS.get(own, (own, {})) if isinstance(own, str) else (own, {})
    of_head: dict[str, Any] = {key: config[key] for key in _OF_HEAD if key in config}
    tied = [each.get("tie_word_embeddings") for each in (config, text)]
    return {
        **defaults,
        **text,
        **{key: _without_mrope(text[key]) for key in _ROPE_KEYS if key in text},
        **of_head,
        "model_type": family,
        "tie_word_embeddings": next(
            (each for each in tied if each is not None), "lm_head.weight" not in set(names)
        ),
    }


def _without_mrope(rope: Any) -> Any:
    if not isinstance(rope, Mapping):
        return rope
    kept = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    return {key: "default" if value == "mrope" else value for key, value in kept.items()}


def decoder_name(name: str) -> str | None:
    """Name of a tensor in the decoder alone; None for one of another part."""
    if _OTHER_PARTS.match(name):
        return None
    found = _DECODER.fullmatch(name)
    if found is None:
        return name
    rest = found[1]
    return rest if rest.startswith(_HEADS) else f"model.{rest}"


def describe_others(names: Iterable[str]) -> str:
    """Say in a line which parts of the whole were left out; empty for none."""
    left = [name for name in names if decoder_name(name) is None]
    parts = sorted({found[1] for name in left if (found := _OTHER_PARTS.match(name))})
    return f"{len(left)} tensors of other parts ({', '.join(parts)})" if left else ""
