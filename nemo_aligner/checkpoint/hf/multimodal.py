"""Extract the text decoder of a multimodal Hugging Face model.

For a sample without images, the supported models compute the same as their text decoder by itself.
``tests/checkpoint/hf/test_multimodal.py`` compares each of them with its decoder.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nemo_aligner.utils.errors import CheckpointError, shown

# The model_type of each supported multimodal model, and the model_type of its decoder for a config
# whose text_config has none.
_DECODERS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "internvl": "qwen2",
    "llava": "llama",
    "llava_next": "llama",
    "mistral3": "mistral",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
_SIZES = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 131072,
}
_QWEN2 = {"rope_theta": 1000000.0, "rms_norm_eps": 1e-5, "max_window_layers": 80}
# The model_type of each decoder, the supported family that computes the same, and the defaults of
# transformers' class where they differ from that family's. Qwen-VL's RoPE has three coordinates
# (mrope), which are equal for text, so for text it is ordinary RoPE.
_SAME_AS: dict[str, tuple[str, dict[str, Any]]] = {
    # The config.json of LLaVA's releases lacks settings that have the default of transformers'
    # class.
    "llama": ("llama", {**_SIZES, "intermediate_size": 11008, "max_position_embeddings": 2048}),
    "mistral": ("mistral", {**_SIZES, "intermediate_size": 14336, "num_key_value_heads": 8}),
    "qwen2_vl_text": ("qwen2", _QWEN2),
    "qwen2_5_vl_text": ("qwen2", _QWEN2),
    "qwen3_vl_text": ("qwen3", {"rope_theta": 500000.0}),
}
_UNSUPPORTED_REASONS = {
    "gemma3n": "its decoder has embeddings in every layer",
    "llama4": "the layout of its experts is not supported",
    "mllama": "layers of its decoder attend to images",
    "paligemma": "its decoder attends to a prompt in both directions",
    "qwen3_vl_moe": "the layout of its experts is not supported",
}
_ROPE_KEYS = ("rope_parameters", "rope_scaling")
_DTYPE_KEYS = ("dtype", "torch_dtype")
# Keys whose null does not stand for the default of the decoder's class: no window, no cap, no
# latent of queries, as many key heads as query heads.
_NULLABLE = ("sliding_window", "attn_logit_softcapping", "q_lora_rank", "num_key_value_heads")
_DECODER = re.compile(r"(?:model\.)?language_model\.(?:model\.)?(.+)")
_OTHER_PARTS = re.compile(
    r"(?:model\.)?(vision_tower|vision_model|visual|multi_modal_projector|image_newline"
    r"|audio_tower|embed_vision|embed_audio)\b"
)
_HEADS = ("lm_head.", "score.")
# Settings of a reward head. They are at the top level of config.json, not in text_config.
_HEAD_SETTINGS = (
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
    """Tell if a ``config.json`` is that of a model with further parts, such as a vision encoder."""
    return config.get("model_type") in tuple(_DECODERS) or isinstance(
        config.get("text_config"), Mapping
    )


def decoder_config(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Extract the ``config.json`` of the text decoder from that of the multimodal model.

    Args:
        names: names of the decoder's tensors, from ``decoder_name``.

    Raises:
        CheckpointError: the multimodal model is not supported.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _DECODERS:
        reason = _UNSUPPORTED_REASONS.get(model_type, "") if isinstance(model_type, str) else ""
        raise CheckpointError(
            f"model_type: got {shown(model_type)}, a model with more parts than a text decoder, "
            "which is not supported"
            + (f": {reason}" if reason else "")
            + f". Use a text decoder, or one of {', '.join(_DECODERS)}"
        )
    inside = config.get("text_config")
    if not isinstance(inside, Mapping | None):
        raise CheckpointError(f"text_config: got {shown(inside)}, wanted a mapping")
    # Older Qwen-VL models have no text_config: the decoder's settings are at the top level.
    stored = inside or config
    text = {key: value for key, value in stored.items() if value is not None or key in _NULLABLE}
    decoder = text["model_type"] if inside and "model_type" in text else _DECODERS[model_type]
    family, defaults = decoder, dict[str, Any]()
    if isinstance(decoder, str):
        family, defaults = _SAME_AS.get(decoder, (decoder, {}))
    head_settings: dict[str, Any] = {key: config[key] for key in _HEAD_SETTINGS if key in config}
    tied = [settings.get("tie_word_embeddings") for settings in (config, text)]
    dtypes = [settings.get(key) for settings in (config, text) for key in _DTYPE_KEYS]
    return {
        **defaults,
        **text,
        **{key: _without_mrope(text[key]) for key in _ROPE_KEYS if key in text},
        **head_settings,
        "model_type": family,
        # For ``read_dtype``, which reads "dtype" first.
        "dtype": next((dtype for dtype in dtypes if dtype is not None), None),
        "tie_word_embeddings": next(
            (is_tied for is_tied in tied if is_tied is not None),
            "lm_head.weight" not in set(names),
        ),
    }


def _without_mrope(rope: Any) -> Any:
    """Replace Qwen-VL's RoPE with three coordinates (mrope) by ordinary RoPE in RoPE settings."""
    if not isinstance(rope, Mapping):
        return rope
    settings = {key: value for key, value in rope.items() if not key.startswith("mrope_")}
    return {key: "default" if value == "mrope" else value for key, value in settings.items()}


def decoder_name(name: str) -> str | None:
    """Return a tensor's name in the decoder by itself; None if it belongs to another part."""
    if _OTHER_PARTS.match(name):
        return None
    match = _DECODER.fullmatch(name)
    if match is None:
        return name
    inner_name = match[1]
    return inner_name if inner_name.startswith(_HEADS) else f"model.{inner_name}"


def describe_dropped_parts(names: Iterable[str]) -> Iterator[str]:
    """Yield a line that names the dropped parts of a multimodal model, if there are any."""
    dropped = [name for name in names if decoder_name(name) is None]
    parts = sorted({match[1] for name in dropped if (match := _OTHER_PARTS.match(name))})
    if dropped:
        yield f"dropped: {len(dropped)} tensors of other parts ({', '.join(parts)})"
