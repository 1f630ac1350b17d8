"""What all families write alike in ``config.json`` and in ``model_config.yaml``.

What is absent from a ``config.json`` has the value that transformers gives it.
"""

from __future__ import annotations

from typing import Any

from nemo_aligner.checkpoint.hf.families.rope import rope_to_hf, rope_to_nemo
from nemo_aligner.checkpoint.hf.families.settings import Config, HfSettings
from nemo_aligner.models.shape import ModelShape


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
