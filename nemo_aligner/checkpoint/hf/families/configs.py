"""A decoder as Hugging Face's ``config.json`` and as NeMo's ``model_config.yaml`` describe it.

What is absent from a ``config.json`` has the value that transformers gives it. ``hf_names.py`` has
the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_aligner.errors import CheckpointError, shown
from nemo_aligner.models.shape import LEAST_NUMBER, MOST, MOST_NUMBER, ModelShape

Config = Mapping[str, Any]
_SLIDING, _FULL = "sliding_attention", "full_attention"
# Far more than any model has: a config may ask for a list of them, before a weight is looked at.
_MOST_LAYERS = 10_000


class _Settings:
    """A ``config.json``, read key by key; every complaint names the key."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def number(self, key: str, default: float | None = None) -> Any:
        value: Any = self.config.get(key)
        value = default if value is None else value
        if type(value) not in (int, float) or not LEAST_NUMBER <= value <= MOST_NUMBER:
            raise CheckpointError(
                f"{key}: got {shown(value)}, wanted a number above 0, from {LEAST_NUMBER} to "
                f"{MOST_NUMBER}"
            )
        return value

    def count(self, key: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        value: Any = self.config.get(key)
        value = default if value is None else value
        if type(value) is not int or not least <= value <= most:
            raise CheckpointError(
                f"{key}: got {shown(value)}, wanted a whole number from {least} on, at most {most}"
            )
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.config.get(key)
        if not isinstance(value, bool | None):
            raise CheckpointError(f"{key}: got {shown(value)}, wanted true or false")
        return default if value is None else value

    def layers(self) -> int:
        return self.count("num_hidden_layers", most=_MOST_LAYERS)

    def window(self) -> int | None:
        """``sliding_window``, whose null is none, and whose absence is 4096."""
        is_null = self.config.get("sliding_window", 4096) is None
        return None if is_null else self.count("sliding_window", 4096)

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse any value but ``allowed``; the first one is the default."""
        value = self.config.get(key, allowed[0])
        if value not in allowed:
            wanted = " or ".join(repr(choice) for choice in allowed)
            raise CheckpointError(
                f"{key}: got {shown(value)}, which is not supported; wanted {wanted}"
            )


def _decoder(config: Config, rotated: float | None = None, **family: Any) -> dict[str, Any]:
    """What all families write alike, and ``family``, which says what else one is made of.

    ``rotated`` is the part of a head's channels that a family rotates unless the config says
    otherwise; None is a family that rotates all.
    """
    read = _Settings(config)
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
        **_rope(config, rotated),
        "vocab_size": read.count("vocab_size"),
        "make_vocab_size_divisible_by": 128,
        "share_embeddings_and_output_weights": read.flag("tie_word_embeddings", False),
        **family,
    }
    ModelShape.from_config(nemo)  # or it would be refused when it is loaded
    return nemo


def _rope(config: Config, rotated: float | None) -> dict[str, Any]:
    """Rotary settings; transformers 5 writes ``rope_parameters``, older ones several keys."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise CheckpointError(f"rope_parameters: got {shown(rope)}, wanted keys and values")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    beside = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    inside = {key: value for key, value in rope.items() if value is not None}
    scaling = _Settings({**beside, **inside})
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


def _window(config: Config, size: int | None, kinds: list[str]) -> dict[str, Any]:
    """The window of ``size``, in the layers that ``layer_types`` names, or ``kinds`` without it."""
    count, kinds = len(kinds), config.get("layer_types") or kinds
    if kinds == [_FULL] * count:
        return {}
    if size is not None and kinds == [_SLIDING] * count:
        return _everywhere(size)
    if size is not None and kinds == _alternating(count):
        return {"window_size": size, "window_pattern": "alternate"}
    raise CheckpointError(
        f"layer_types: got {shown(kinds)}, a window of {size} and {count} layers, which is not "
        "supported; wanted a window in all layers, in none, or in the first, the third, and so on"
    )


def _alternating(layers: int) -> list[str]:
    return [_FULL if layer % 2 else _SLIDING for layer in range(layers)]


def llama_to_nemo(config: Config) -> dict[str, Any]:
    """Llama, SmolLM: a ``config.json`` as a NeMo config.

    Raises:
        CheckpointError: of this and of the others: it names a key whose value is not supported.
    """
    read = _Settings(config)
    read.only("hidden_act", "silu", "swish")
    read.only("sliding_window", None)
    return _decoder(config)


def mistral_to_nemo(config: Config) -> dict[str, Any]:
    """Mistral, with a window in all layers or in none."""
    read = _Settings(config)
    read.only("hidden_act", "silu", "swish")
    read.only("layer_types", None)
    size = read.window()
    return _decoder(config, **({} if size is None else _everywhere(size)))


def _everywhere(size: int) -> dict[str, Any]:
    return {"window_size": size, "window_pattern": "all"}


def qwen2_to_nemo(config: Config) -> dict[str, Any]:
    """Qwen2 and Qwen2.5: Llama with biases of queries, keys and values."""
    return _qwen(config, qkv_bias=True)


def qwen3_to_nemo(config: Config) -> dict[str, Any]:
    """Qwen3: Llama with norms of queries and keys."""
    return _qwen(config, qk_layernorm=True, kv_channels=_Settings(config).count("head_dim", 128))


def _qwen(config: Config, **family: Any) -> dict[str, Any]:
    read = _Settings(config)
    read.only("hidden_act", "silu", "swish")
    layers, size = read.layers(), None
    kinds = [_FULL] * layers
    if read.flag("use_sliding_window", False):
        size = read.window()
    if size is not None:
        without = read.count("max_window_layers", 28, least=0)
        kinds = [_FULL if layer < without else _SLIDING for layer in range(layers)]
    return _decoder(config, **family, **_window(config, size, kinds))


def gemma_to_nemo(config: Config) -> dict[str, Any]:
    """Gemma: GEGLU and scaled embeddings."""
    read = _Settings(config)
    # Gemma's own releases say gelu, and mean its approximation.
    read.only("hidden_act", "gelu_pytorch_tanh", "gelu")
    read.only("hidden_activation", None, "gelu_pytorch_tanh")
    return _gemma(config)


def gemma2_to_nemo(config: Config) -> dict[str, Any]:
    """Gemma 2: alternating windows, capped scores, and norms of what is added."""
    read = _Settings(config)
    read.only("hidden_activation", "gelu_pytorch_tanh")
    size, is_uncapped = read.window(), config.get("attn_logit_softcapping", 50.0) is None
    return _gemma(
        config,
        post_layernorms=True,
        attn_logit_softcapping=None if is_uncapped else read.number("attn_logit_softcapping", 50.0),
        query_pre_attn_scalar=read.number("query_pre_attn_scalar", 256),
        **_window(config, size, _alternating(read.layers())),
    )


def _gemma(config: Config, **family: Any) -> dict[str, Any]:
    read = _Settings(config)
    return _decoder(
        config,
        kv_channels=read.count("head_dim", 256),
        activation="geglu",
        apply_embedding_scaling=True,
        # As Gemma stores it: 1 + weight would round a bf16 weight once more.
        layernorm_zero_centered_gamma=True,
        share_embeddings_and_output_weights=read.flag("tie_word_embeddings", True),
        **family,
    )


def nemotron_to_nemo(config: Config) -> dict[str, Any]:
    """Nemotron: squared ReLU, LayerNorm1P, and half of the channels rotated."""
    read = _Settings(config)
    read.only("hidden_act", "relu2")
    return _decoder(
        config,
        rotated=0.5,
        normalization="layernorm1p",
        layernorm_epsilon=read.number("norm_eps", 1e-5),
        activation="squared-relu",
    )


def _decoder_to_hf(config: Config, model_type: str, **family: Any) -> dict[str, Any]:
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
        **_rope_to_hf(shape),
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": is_tied(config),
        **family,
    }


def is_tied(config: Config) -> bool:
    """Whether the output layer is the embedding table, in a NeMo config."""
    return bool(config.get("share_embeddings_and_output_weights", True))


def _rope_to_hf(shape: ModelShape) -> dict[str, Any]:
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


def llama_to_hf(config: Config) -> dict[str, Any]:
    """A NeMo config of a Llama as the decoder's part of a ``config.json``.

    Raises:
        CheckpointError: of this and of the others: Hugging Face has no name for such a rotation.
    """
    return _decoder_to_hf(config, "llama", attention_bias=False, mlp_bias=False)


def mistral_to_hf(config: Config) -> dict[str, Any]:
    """The same of a Mistral."""
    window = ModelShape.from_config(config).window_size
    return _decoder_to_hf(config, "mistral", sliding_window=window)


def qwen2_to_hf(config: Config) -> dict[str, Any]:
    """The same of a Qwen2."""
    return _decoder_to_hf(config, "qwen2", **_qwen_window(config))


def qwen3_to_hf(config: Config) -> dict[str, Any]:
    """The same of a Qwen3."""
    return _decoder_to_hf(config, "qwen3", attention_bias=False, **_qwen_window(config))


def _qwen_window(config: Config) -> dict[str, Any]:
    window = ModelShape.from_config(config).window_size
    kinds = _layer_types(config)
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": kinds.count(_FULL),
        "layer_types": kinds,
    }


def _layer_types(config: Config) -> list[str]:
    shape = ModelShape.from_config(config)
    windows = [shape.window_of(layer + 1) for layer in range(shape.num_layers)]
    return [_FULL if window is None else _SLIDING for window in windows]


def gemma_to_hf(config: Config) -> dict[str, Any]:
    """The same of a Gemma."""
    return _decoder_to_hf(
        config,
        "gemma",
        hidden_act="gelu_pytorch_tanh",
        hidden_activation=None,
        attention_bias=False,
    )


def gemma2_to_hf(config: Config) -> dict[str, Any]:
    """The same of a Gemma 2."""
    shape = ModelShape.from_config(config)
    scalar = shape.query_pre_attn_scalar or float(shape.kv_channels)
    return _decoder_to_hf(
        config,
        "gemma2",
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        attention_bias=False,
        # transformers takes nothing but an int.
        query_pre_attn_scalar=int(scalar) if scalar.is_integer() else scalar,
        attn_logit_softcapping=shape.attn_logit_softcapping,
        sliding_window=shape.window_size,
        layer_types=_layer_types(config),
    )


def nemotron_to_hf(config: Config) -> dict[str, Any]:
    """The same of a Nemotron."""
    shape = ModelShape.from_config(config)
    decoder = _decoder_to_hf(
        config,
        "nemotron",
        hidden_act="relu2",
        norm_eps=shape.layernorm_epsilon,
        partial_rotary_factor=shape.rotary_percentage,
        attention_bias=False,
        mlp_bias=False,
    )
    del decoder["rms_norm_eps"]
    return decoder
