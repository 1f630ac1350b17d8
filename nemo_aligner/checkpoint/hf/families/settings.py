"""Translate the parts of a ``config.json`` that families share: sizes, RoPE and windows.

Functions named ``..._to_nemo`` serve conversions, those named ``..._to_hf`` serve exports.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_aligner.config.common import MAX_COUNT, MAX_NUMBER, MIN_NUMBER, read_count, read_number
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.utils.errors import CheckpointError, shown

# Key of a NeMo config for the name of the model family. Only families whose settings could also be
# those of another family write it.
NAME_KEY = "hf_model_type"

# Translation of the settings that all families have.


_ONLY = (
    ("mlp_bias", False, None),
    ("quantization_config", None),
    ("is_causal", True, None),
    ("use_bidirectional_attention", None, False),
)


def decoder_to_nemo(
    config: Config,
    *,
    name: str | None = None,
    act: tuple[str, ...] = ("silu", "swish"),
    epsilon: float = 1e-6,
    base: float = 10000.0,
    rotated: float | None = None,
    head_dim: int | None = None,
    attention_bias: bool | None = None,
    tied: bool = False,
    **family: Any,
) -> dict[str, Any]:
    """Translate a ``config.json`` to a NeMo config.

    The arguments from ``epsilon`` on are the defaults of transformers' class, for missing keys.

    Args:
        name: name of the family, if its decoders would fit another family, too.
        act: supported values of ``hidden_act``; empty if another key names the activation.
        epsilon: epsilon of the norms.
        base: base of RoPE.
        rotated: fraction of a head's channels with RoPE; None if the family always rotates all.
        head_dim: channels of a head; None means the hidden size divided by the heads.
        attention_bias: default of the key with this name; None if the family never has biases.
        tied: default of ``tie_word_embeddings``.
        family: settings of this family, which are added to the result.
    """
    reader = HfSettings(config)
    _check_supported(reader, act, has_biases=attention_bias is not None)
    heads, hidden = reader.count("num_attention_heads"), reader.count("hidden_size")
    nemo = {
        "num_layers": reader.layers(),
        "hidden_size": hidden,
        "ffn_hidden_size": reader.count("intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": reader.count("num_key_value_heads", heads),
        "kv_channels": _read_head_dim(reader, head_dim, hidden // heads),
        "encoder_seq_length": reader.count("max_position_embeddings"),
        "max_position_embeddings": reader.count("max_position_embeddings"),
        "normalization": "rmsnorm",
        "layernorm_epsilon": reader.number("rms_norm_eps", epsilon),
        "activation": "fast-swiglu",
        "bias": False,
        "qkv_bias": attention_bias is not None and reader.flag("attention_bias", attention_bias),
        "qk_layernorm": False,
        **rope_to_nemo(config, rotated, base),
        "vocab_size": reader.count("vocab_size"),
        "make_vocab_size_divisible_by": 128,
        "share_embeddings_and_output_weights": reader.flag("tie_word_embeddings", tied),
        **family,
    }
    ModelShape.from_config(nemo)  # raises for impossible settings
    return nemo if name is None else {**nemo, NAME_KEY: name}


def _check_supported(reader: HfSettings, act: tuple[str, ...], has_biases: bool) -> None:
    """Raise CheckpointError for values that no family supports, or that this family does not."""
    if act:
        reader.only("hidden_act", *act)
    if not has_biases:
        reader.only("attention_bias", False, None)
    for key, *values in _ONLY:
        reader.only(key, *values)


def _read_head_dim(reader: HfSettings, default: int | None, equal_share: int) -> int:
    """Read ``head_dim``, for which null means that the heads share the hidden size.

    This holds for all of transformers' classes, even those with another default for a missing key.
    """
    is_null = reader.config.get("head_dim", default) is None
    return equal_share if is_null else reader.count("head_dim", default)


def decoder_to_hf(
    config: Config, model_type: str, of_shape: Mapping[str, str] | None = None, **family: Any
) -> dict[str, Any]:
    """Translate a NeMo config to the decoder's part of a ``config.json``.

    Args:
        of_shape: additional keys of this family's ``config.json``, each with the name of the field
            of ``ModelShape`` that has its value.
        family: further keys of ``config.json`` with their values, which override the others.
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
        **rope_to_hf(config, shape),
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": is_tied(config),
        **{key: getattr(shape, name) for key, name in (of_shape or {}).items()},
        **family,
    }


def is_tied(config: Config) -> bool:
    """Tell if the output layer of a NeMo config uses the embedding's weights."""
    return bool(config.get("share_embeddings_and_output_weights", True))


# Reading of a ``config.json`` key by key; every error names the key.

Config = Mapping[str, Any]
# Maximum number of layers of a model. Without a limit, a damaged config with a huge number would
# exhaust the memory, because lists with an entry for each layer are built before weights are read.
_MAX_LAYERS = 10_000


class HfSettings:
    """Typed access to a ``config.json``; a null key counts as absent.

    Raises:
        CheckpointError: from every method, for an unsupported value; the message names the key.
    """

    def __init__(self, config: Config) -> None:
        self.config = config

    def number(self, key: str, default: float | None = None) -> Any:
        """Read a number above 0; ``default`` if the key is absent; an error if both are missing."""
        value = self.config.get(key)
        expected = f"a number above 0, from {MIN_NUMBER} to {MAX_NUMBER}"
        return read_number(default if value is None else value, key, expected)

    def count(
        self, key: str, default: int | None = None, minimum: int = 1, limit: int = MAX_COUNT
    ) -> int:
        """Read an integer from ``minimum`` to ``limit``; ``default`` if the key is absent."""
        value = self.config.get(key)
        expected = f"a whole number from {minimum} on, at most {limit}"
        return read_count(default if value is None else value, key, expected, minimum, limit)

    def flag(self, key: str, default: bool) -> bool:
        """Read a bool; ``default`` if the key is absent."""
        value = self.config.get(key)
        if not isinstance(value, bool | None):
            raise CheckpointError(f"{key}: got {shown(value)}, wanted true or false")
        return default if value is None else value

    def layers(self) -> int:
        """Read the number of layers (``num_hidden_layers``), which must be set."""
        return self.count("num_hidden_layers", limit=_MAX_LAYERS)

    def window(self, missing: int | None = 4096) -> int | None:
        """Read ``sliding_window``, in tokens: None if it is null; ``missing`` without the key."""
        is_null = self.config.get("sliding_window", missing) is None
        return None if is_null else self.count("sliding_window", missing)

    def only(self, key: str, *allowed: Any) -> None:
        """Check that the value of ``key`` is one of ``allowed``, or that the key is absent.

        An absent key stands for the first of ``allowed``, transformers' default.

        Raises:
            CheckpointError: the key has another value.
        """
        value = self.config.get(key, allowed[0])
        if value not in allowed:
            supported = " or ".join(repr(choice) for choice in allowed)
            raise CheckpointError(
                f"{key}: got {shown(value)}, which is not supported; wanted {supported}"
            )


# Translation of RoPE settings.


# NeMo's keys for each kind of RoPE scaling, with the keys of ``rope_parameters`` that hold the same
# values.
_FACTORS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"seq_len_interpolation_factor": "factor"},
    "dynamic": {"dynamic_rope_factor": "factor"},
    "llama3": {
        "scale_factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
    },
}
_ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


def rope_to_nemo(
    config: Config,
    rotated: float | None,
    base: float = 10000.0,
    kinds: tuple[str, ...] = _ROPE_KINDS,
) -> dict[str, Any]:
    """Translate ``rope_parameters`` (transformers 5), or the older keys, to NeMo's keys.

    Args:
        rotated: default fraction of a head's channels with RoPE; None if the family always rotates
            all of them.
        base: default base of RoPE.
        kinds: kinds of RoPE scaling that the family supports.

    Raises:
        CheckpointError: a value has the wrong type, is out of range, or is not supported.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise CheckpointError(f"rope_parameters: got {shown(rope)}, wanted a mapping")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in kinds:
        raise CheckpointError(
            f"rope_type: got {shown(kind)}, which is not supported; wanted "
            + " or ".join(map(repr, kinds))
        )
    outside = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    inside = {key: value for key, value in rope.items() if value is not None}
    scaling = HfSettings({**outside, **inside})
    # transformers' class of such a family rotates all channels, whatever the fraction, so only 1 is
    # accepted.
    if rotated is None:
        scaling.only("partial_rotary_factor", None, 1.0)
    rotary = {
        "position_embedding_type": "rope",
        "rotary_base": scaling.number("rope_theta", base),
        "rotary_percentage": scaling.number("partial_rotary_factor", rotated or 1.0),
        "scale_positional_embedding": kind == "llama3",
    }
    if kind == "yarn":
        return {**rotary, **_yarn_to_nemo(scaling, config)}
    if kind == "longrope":
        return {**rotary, **_longrope_to_nemo(scaling, config)}
    factors = {nemo_key: scaling.number(key) for nemo_key, key in _FACTORS[kind].items()}
    if kind == "llama3":
        factors["old_context_len"] = _original_length(scaling, config)
    return {**rotary, **factors}


_ORIGINAL = "original_max_position_embeddings"


def _original_length(scaling: HfSettings, config: Config) -> int:
    """Return the number of positions that a model had before its RoPE was scaled.

    As in transformers, ``original_max_position_embeddings`` at the top level of ``config.json`` has
    priority over the same key in ``rope_parameters``. Without both it is the number of positions.
    """
    outside = HfSettings(config)
    inside = scaling.count(_ORIGINAL, outside.count("max_position_embeddings"))
    return outside.count(_ORIGINAL, inside)


_YARN = {
    "yarn_attention_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_mscale": "mscale",
    "yarn_mscale_all_dim": "mscale_all_dim",
}


def _yarn_to_nemo(scaling: HfSettings, config: Config) -> dict[str, Any]:
    """Translate YaRN's settings to megatron-core's names; missing ones keep their defaults."""
    length = _original_length(scaling, config)
    stretch = HfSettings(config).count("max_position_embeddings") / length
    yarn = {
        "position_embedding_type": "yarn",
        "yarn_rotary_scaling_factor": scaling.number("factor", stretch),
        "yarn_original_max_position_embeddings": length,
        "yarn_correction_range_round_to_int": scaling.flag("truncate", True),
    }
    # transformers ignores a value of 0. It ignores mscale and mscale_all_dim unless both are set.
    present = {nemo_key: name for nemo_key, name in _YARN.items() if scaling.config.get(name)}
    if len(present.keys() & {"yarn_mscale", "yarn_mscale_all_dim"}) < 2:
        present = {nemo_key: name for nemo_key, name in present.items() if "mscale" not in nemo_key}
    return {**yarn, **{nemo_key: scaling.number(name) for nemo_key, name in present.items()}}


_LONGROPE = {
    "longrope_short_factor": "short_factor",
    "longrope_long_factor": "long_factor",
    "longrope_attention_factor": "attention_factor",
    "longrope_factor": "factor",
}


def _longrope_to_nemo(scaling: HfSettings, config: Config) -> dict[str, Any]:
    """Translate LongRoPE's settings to NeMo's keys."""
    longrope = {nemo_key: scaling.config.get(name) for nemo_key, name in _LONGROPE.items()}
    return {
        "position_embedding_type": "longrope",
        f"longrope_{_ORIGINAL}": _original_length(scaling, config),
        **{nemo_key: value for nemo_key, value in longrope.items() if value is not None},
    }


def split_rope_by_window(config: Config, local_base: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read both RoPE settings of a family whose layers with a window have another RoPE.

    Args:
        local_base: key in older configs for the base of RoPE in layers with a window.

    Returns:
        ``rope_parameters`` of the layers without a window, and of the layers with one.
    """
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    for key, value in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{key}: got {shown(value)}, wanted a mapping")
    by_kind = [parameters.get(kind) or {} for kind in (FULL, SLIDING)]
    are_mappings = all(isinstance(rope, Mapping) for rope in by_kind)
    if not are_mappings or parameters.keys() - {FULL, SLIDING}:
        raise CheckpointError(
            f"rope_parameters: got {shown(parameters)}, wanted a mapping for {FULL!r} and one for "
            f"{SLIDING!r}"
        )
    bases = [{"rope_theta": config.get(key)} for key in ("rope_theta", local_base)]
    full, sliding = ({**base, **rope} for base, rope in zip(bases, by_kind, strict=True))
    return {**full, **scaling}, sliding


def rope_to_hf(config: Config, shape: ModelShape) -> dict[str, Any]:
    """Translate RoPE settings to the keys of ``config.json`` for transformers 4 and 5.

    Args:
        config: NeMo config of the model.
        shape: shape of the same model.
    """
    scalings = {
        "seq_len_interpolation_factor": shape.seq_len_interpolation_factor,
        "scale_positional_embedding": shape.rope_scaling and True,
        "dynamic_rope_factor": shape.dynamic_rope_factor,
        "position_embedding_type": (shape.yarn and "yarn") or (shape.longrope and "longrope"),
    }
    # A NeMo config has a key for each kind of RoPE scaling, so it may have several. Hugging Face
    # has one ``rope_type``.
    several = [f"{key}={value}" for key, value in scalings.items() if value is not None]
    if len(several) > 1:
        raise CheckpointError(
            f"model_config.yaml: got {' and '.join(several)}, several kinds of RoPE scaling, which "
            "Hugging Face cannot combine. Only a model with one of them can be exported"
        )
    rope: dict[str, Any] = {"rope_theta": shape.rotary_base, "rope_type": "default"}
    if shape.seq_len_interpolation_factor is not None:
        rope |= {"rope_type": "linear", "factor": shape.seq_len_interpolation_factor}
    if shape.dynamic_rope_factor is not None:
        rope |= {"rope_type": "dynamic", "factor": shape.dynamic_rope_factor}
    llama3, yarn = shape.rope_scaling, shape.yarn
    if llama3 is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": llama3.factor,
            "low_freq_factor": llama3.low_freq_factor,
            "high_freq_factor": llama3.high_freq_factor,
            _ORIGINAL: llama3.old_context_len,
        }
    if yarn is not None:
        rope |= {
            "rope_type": "yarn",
            "factor": yarn.factor,
            _ORIGINAL: yarn.old_context_len,
            "truncate": yarn.rounded,
            **{name: config[key] for key, name in _YARN.items() if config.get(key) is not None},
        }
    if shape.longrope is not None:
        rope |= {
            "rope_type": "longrope",
            _ORIGINAL: shape.longrope.old_context_len,
            **{name: config[key] for key, name in _LONGROPE.items() if config.get(key) is not None},
        }
    # transformers 5 reads rope_parameters, transformers 4 the other two keys.
    scaling = None if rope["rope_type"] == "default" else rope
    return {"rope_parameters": rope, "rope_theta": shape.rotary_base, "rope_scaling": scaling}


# Translation of sliding windows.

SLIDING, FULL = "sliding_attention", "full_attention"


def window_to_nemo(config: Config, size: int | None, kinds: list[str]) -> dict[str, Any]:
    """Translate a sliding window, in the layers that ``layer_types`` names, to NeMo's keys.

    Args:
        size: number of keys in the window; None if there is no window.
        kinds: default of ``layer_types``, one entry for each layer.

    Returns:
        NeMo's keys for the window; empty if no layer has one.
    """
    count, kinds = len(kinds), config.get("layer_types") or kinds
    has_window = size is not None and isinstance(kinds, list)
    if kinds == [FULL] * count:
        return {}
    if not has_window or len(kinds) != count or not all(kind in (SLIDING, FULL) for kind in kinds):
        raise CheckpointError(
            f"layer_types: got {shown(kinds)} with sliding_window={size} and {count} layers, "
            f"wanted {SLIDING!r} or {FULL!r} for each layer, and a sliding_window"
        )
    assert size is not None
    if kinds == [SLIDING] * count:
        return window_everywhere(size)
    if kinds == alternating_layers(count):
        return {"window_size": size, "window_pattern": "alternate"}
    marks = [int(kind == SLIDING) for kind in kinds]
    return {"window_size": size, "window_attn_skip_freq": frequency(marks, 0)}


def frequency(marks: list[int], mark: int) -> int | list[int]:
    """Shorten a list of 0 and 1, one for each layer, to N if exactly every N-th is ``mark``.

    NeMo's keys for windows and for layers without RoPE take either form.

    A list that has no such N is returned unchanged.
    """
    period = marks.index(mark) + 1 if mark in marks else len(marks) + 1
    is_regular = all(
        (layer_mark == mark) == (layer % period == 0) for layer, layer_mark in enumerate(marks, 1)
    )
    return period if is_regular else marks


def every_nth_layer(layers: int, without: int) -> list[str]:
    """Return ``layer_types`` for windows in all layers except every ``without``-th one."""
    return [SLIDING if layer % without else FULL for layer in range(1, layers + 1)]


def window_everywhere(size: int | None) -> dict[str, Any]:
    """Return NeMo's keys for a window of ``size`` keys in every layer; empty for None."""
    return {} if size is None else {"window_size": size, "window_pattern": "all"}


def alternating_layers(layers: int) -> list[str]:
    """Return ``layer_types`` of a model with windows in its odd layers, counted from 1."""
    return [FULL if layer % 2 else SLIDING for layer in range(layers)]


LINEAR = "linear_attention"


def linear_layers(config: Config) -> list[bool]:
    """Tell for each layer of a NeMo config if it has linear attention."""
    shape = ModelShape.from_config(config)
    if shape.is_uniform:
        return [False] * shape.num_layers
    numbers = range(1, shape.num_layers + 1)
    return [shape.of_layer(number).linear_attention is not None for number in numbers]


def layer_types(config: Config) -> list[str]:
    """List for each layer of a NeMo config whether it has a window, as ``layer_types`` does."""
    shape = ModelShape.from_config(config)
    windows = [shape.window_of(layer + 1) for layer in range(shape.num_layers)]
    return [FULL if window is None else SLIDING for window in windows]


def window_to_hf(config: Config, *, always_sized: bool = False) -> dict[str, Any]:
    """Return the keys of ``config.json`` for a NeMo config's window: its size and its layers.

    Args:
        always_sized: whether a model without a window gets a size, too: the number of positions.
            Some classes of transformers compute the mask of a window that no layer uses, and
            fail if the size is null.
    """
    shape = ModelShape.from_config(config)
    size = shape.window_size
    if size is None and always_sized:
        size = shape.max_position_embeddings
    return {"sliding_window": size, "layer_types": layer_types(config)}
