"""What families share of a ``config.json``: sizes, rotary embeddings and windows, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_aligner.config.common import MAX_COUNT, MAX_NUMBER, MIN_NUMBER, read_count, read_number
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.utils.errors import CheckpointError, shown

# Key of a NeMo config that names the family where the decoder alone does not determine it.
NAME_KEY = "hf_model_type"

# Settings that all families have.


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
    """Translate a ``config.json`` to a NeMo config; ``family`` adds the family's own settings.

    Numbers and flags are what transformers' class has where the config lacks the key.

    Args:
        name: of a family whose decoders are another's, too.
        act: values of ``hidden_act`` that are read; none if another key names the activation.
        epsilon: of the norms.
        base: of the rotation.
        rotated: share of a head's channels that are rotated; None for a family that rotates all.
        head_dim: channels of a head; None is its part of the hidden size.
        attention_bias: biases of queries, keys and values; None for a family without the choice.
        tied: the output layer is the embedding table.
    """
    read = HfSettings(config)
    if act:
        read.only("hidden_act", *act)
    if attention_bias is None:
        read.only("attention_bias", False, None)
    for key, *values in _ONLY:
        read.only(key, *values)
    heads, hidden = read.count("num_attention_heads"), read.count("hidden_size")
    nemo = {
        "num_layers": read.layers(),
        "hidden_size": hidden,
        "ffn_hidden_size": read.count("intermediate_size"),
        "num_attention_heads": heads,
        "num_query_groups": read.count("num_key_value_heads", heads),
        "kv_channels": read.count("head_dim", head_dim or hidden // heads),
        "encoder_seq_length": read.count("max_position_embeddings"),
        "max_position_embeddings": read.count("max_position_embeddings"),
        "normalization": "rmsnorm",
        "layernorm_epsilon": read.number("rms_norm_eps", epsilon),
        "activation": "fast-swiglu",
        "bias": False,
        "qkv_bias": attention_bias is not None and read.flag("attention_bias", attention_bias),
        "qk_layernorm": False,
        **rope_to_nemo(config, rotated, base),
        "vocab_size": read.count("vocab_size"),
        "make_vocab_size_divisible_by": 128,
        "share_embeddings_and_output_weights": read.flag("tie_word_embeddings", tied),
        **family,
    }
    ModelShape.from_config(nemo)  # raises now for what a load would refuse
    return nemo if name is None else {**nemo, NAME_KEY: name}


def decoder_to_hf(
    config: Config, model_type: str, of_shape: Mapping[str, str] | None = None, **family: Any
) -> dict[str, Any]:
    """Translate a NeMo config to the decoder's part of a ``config.json``; ``family`` overrides.

    Args:
        of_shape: keys that the family has beside them, and their fields of ``ModelShape``.
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
    """Tell if a NeMo config ties the output layer to the embedding table."""
    return bool(config.get("share_embeddings_and_output_weights", True))


# Reading of a ``config.json`` key by key; every error names the key.

Config = Mapping[str, Any]
# Far above any model's: a config may imply a list of them before any weight is looked at.
_MOST_LAYERS = 10_000


class HfSettings:
    """Typed access to a ``config.json``; a null key counts as absent.

    Raises:
        CheckpointError: from every method, for an unsupported value; it names the key.
    """

    def __init__(self, config: Config) -> None:
        self.config = config

    def number(self, key: str, default: float | None = None) -> Any:
        """Read a number above 0."""
        value = self.config.get(key)
        wanted = f"a number above 0, from {MIN_NUMBER} to {MAX_NUMBER}"
        return read_number(default if value is None else value, key, wanted)

    def count(
        self, key: str, default: int | None = None, least: int = 1, most: int = MAX_COUNT
    ) -> int:
        """Read an integer."""
        value = self.config.get(key)
        wanted = f"a whole number from {least} on, at most {most}"
        return read_count(default if value is None else value, key, wanted, least, most)

    def flag(self, key: str, default: bool) -> bool:
        """Read a bool."""
        value = self.config.get(key)
        if not isinstance(value, bool | None):
            raise CheckpointError(f"{key}: got {shown(value)}, wanted true or false")
        return default if value is None else value

    def layers(self) -> int:
        """Read ``num_hidden_layers``."""
        return self.count("num_hidden_layers", most=_MOST_LAYERS)

    def window(self, missing: int | None = 4096) -> int | None:
        """Read ``sliding_window``: null is none, and ``missing`` stands for a missing key."""
        is_null = self.config.get("sliding_window", missing) is None
        return None if is_null else self.count("sliding_window", missing)

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse any value but ``allowed``, of which the first is the default."""
        value = self.config.get(key, allowed[0])
        if value not in allowed:
            wanted = " or ".join(repr(choice) for choice in allowed)
            raise CheckpointError(
                f"{key}: got {shown(value)}, which is not supported; wanted {wanted}"
            )


# Rotary embedding.


# By kind, NeMo's keys and those of ``rope_parameters``.
_FACTORS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"seq_len_interpolation_factor": "factor"},
    "dynamic": {"dynamic_rope_factor": "factor"},
    "llama3": {
        "scale_factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "old_context_len": "original_max_position_embeddings",
    },
}
_ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


def rope_to_nemo(
    config: Config,
    rotated: float | None,
    base: float = 10000.0,
    kinds: tuple[str, ...] = _ROPE_KINDS,
) -> dict[str, Any]:
    """Translate to NeMo's keys from ``rope_parameters`` (transformers 5) or the older keys.

    Args:
        rotated: see ``decoder_to_nemo``.
        base: of the rotation, unless the config says otherwise.
        kinds: that the family has.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise CheckpointError(f"rope_parameters: got {shown(rope)}, wanted keys and values")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in kinds:
        raise CheckpointError(
            f"rope_type: got {shown(kind)}, which is not supported; wanted "
            + " or ".join(map(repr, kinds))
        )
    beside = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    inside = {key: value for key, value in rope.items() if value is not None}
    scaling = HfSettings({**beside, **inside})
    # A share below 1 would be read and not applied.
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
    return {**rotary, **{ours: scaling.number(name) for ours, name in _FACTORS[kind].items()}}


_YARN = {
    "yarn_attention_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
    "yarn_mscale": "mscale",
    "yarn_mscale_all_dim": "mscale_all_dim",
}


def _yarn_to_nemo(scaling: HfSettings, config: Config) -> dict[str, Any]:
    """YaRN's settings by megatron-core's names; those that are left out keep transformers' values.

    transformers prefers an original length beside ``rope_parameters`` to the one inside.
    """
    key = "original_max_position_embeddings"
    outside = HfSettings(config)
    most = outside.count("max_position_embeddings")
    length = outside.count(key, scaling.count(key, most))
    found = {
        "position_embedding_type": "yarn",
        "yarn_rotary_scaling_factor": scaling.number("factor", most / length),
        "yarn_original_max_position_embeddings": length,
        "yarn_correction_range_round_to_int": scaling.flag("truncate", True),
    }
    # 0 is none there, too, and one mscale alone changes nothing.
    given = {ours: name for ours, name in _YARN.items() if scaling.config.get(name)}
    if len(given.keys() & {"yarn_mscale", "yarn_mscale_all_dim"}) < 2:
        given = {ours: name for ours, name in given.items() if "mscale" not in ours}
    return {**found, **{ours: scaling.number(name) for ours, name in given.items()}}


_LONGROPE = {
    "longrope_short_factor": "short_factor",
    "longrope_long_factor": "long_factor",
    "longrope_attention_factor": "attention_factor",
    "longrope_factor": "factor",
}


def _longrope_to_nemo(scaling: HfSettings, config: Config) -> dict[str, Any]:
    """LongRoPE's settings; an original length beside ``rope_parameters`` is preferred."""
    key, outside = "original_max_position_embeddings", HfSettings(config)
    inside = scaling.count(key, outside.count("max_position_embeddings"))
    given = {ours: scaling.config.get(name) for ours, name in _LONGROPE.items()}
    return {
        "position_embedding_type": "longrope",
        f"longrope_{key}": outside.count(key, inside),
        **{ours: value for ours, value in given.items() if value is not None},
    }


def rotations_by_layer(config: Config, local_base: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the rotary embedding of a family in which it depends on a layer's window.

    Args:
        local_base: older key of the base in layers with a window.

    Returns:
        ``rope_parameters`` of the layers without a window, and of those with one.
    """
    given = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or {}
    for key, value in (("rope_parameters", given), ("rope_scaling", scaling)):
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{key}: got {shown(value)}, wanted keys and values")
    of_layers = [given.get(kind) or {} for kind in (FULL, SLIDING)]
    if not all(isinstance(each, Mapping) for each in of_layers) or given.keys() - {FULL, SLIDING}:
        raise CheckpointError(
            f"rope_parameters: got {shown(given)}, wanted those of {FULL!r} and of {SLIDING!r}"
        )
    bases = [{"rope_theta": config.get(key)} for key in ("rope_theta", local_base)]
    of_global, of_local = ({**base, **each} for base, each in zip(bases, of_layers, strict=True))
    return {**of_global, **scaling}, of_local


def rope_to_hf(config: Config, shape: ModelShape) -> dict[str, Any]:
    """Translate to the keys of ``config.json`` for transformers 4 and 5."""
    found = {
        "seq_len_interpolation_factor": shape.seq_len_interpolation_factor,
        "scale_positional_embedding": shape.rope_scaling and True,
        "dynamic_rope_factor": shape.dynamic_rope_factor,
        "position_embedding_type": (shape.yarn and "yarn") or (shape.longrope and "longrope"),
    }
    # NeMo can combine them: each is a setting of its own there.
    several = [f"{key}={value}" for key, value in found.items() if value is not None]
    if len(several) > 1:
        raise CheckpointError(
            f"model_config.yaml: got {' and '.join(several)}, wanted one of them: Hugging Face has "
            "no name for both"
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
            "original_max_position_embeddings": llama3.old_context_len,
        }
    if yarn is not None:
        rope |= {
            "rope_type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.old_context_len,
            "truncate": yarn.rounded,
            **{name: config[key] for key, name in _YARN.items() if config.get(key) is not None},
        }
    if shape.longrope is not None:
        rope |= {
            "rope_type": "longrope",
            "original_max_position_embeddings": shape.longrope.old_context_len,
            **{name: config[key] for key, name in _LONGROPE.items() if config.get(key) is not None},
        }
    # transformers 5 reads the first, 4 the other two.
    scaling = None if rope["rope_type"] == "default" else rope
    return {"rope_parameters": rope, "rope_theta": shape.rotary_base, "rope_scaling": scaling}


# Sliding windows.

SLIDING, FULL = "sliding_attention", "full_attention"


def window_to_nemo(config: Config, size: int | None, kinds: list[str]) -> dict[str, Any]:
    """Translate a window of ``size`` keys, in the layers that ``layer_types`` names.

    Args:
        kinds: default of ``layer_types``, one entry for each layer.
    """
    count, kinds = len(kinds), config.get("layer_types") or kinds
    has_window = size is not None and isinstance(kinds, list)
    if kinds == [FULL] * count:
        return {}
    if not has_window or len(kinds) != count or not all(kind in (SLIDING, FULL) for kind in kinds):
        raise CheckpointError(
            f"layer_types: got {shown(kinds)}, a window of {size} and {count} layers, which is not "
            f"supported; wanted {SLIDING!r} or {FULL!r} for each layer, and a window"
        )
    assert size is not None
    if kinds == [SLIDING] * count:
        return window_everywhere(size)
    if kinds == alternating_layers(count):
        return {"window_size": size, "window_pattern": "alternate"}
    marks = [int(kind == SLIDING) for kind in kinds]
    return {"window_size": size, "window_attn_skip_freq": frequency(marks, 0)}


def frequency(marks: list[int], mark: int) -> int | list[int]:
    """Shorten a 0 or 1 for each layer to N, if every N-th has the ``mark`` and no other."""
    every = marks.index(mark) + 1 if mark in marks else len(marks) + 1
    is_regular = all((each == mark) == (layer % every == 0) for layer, each in enumerate(marks, 1))
    return every if is_regular else marks


def every_nth_layer(layers: int, without: int) -> list[str]:
    """``layer_types`` of a model with windows in all layers but every ``without``-th."""
    return [SLIDING if layer % without else FULL for layer in range(1, layers + 1)]


def window_everywhere(size: int | None) -> dict[str, Any]:
    """NeMo's keys for a window in every layer; none for None."""
    return {} if size is None else {"window_size": size, "window_pattern": "all"}


def alternating_layers(layers: int) -> list[str]:
    """``layer_types`` of a model with windows in its odd layers, counted from 1."""
    return [FULL if layer % 2 else SLIDING for layer in range(layers)]


def layer_types(config: Config) -> list[str]:
    """``layer_types`` of a NeMo config."""
    shape = ModelShape.from_config(config)
    windows = [shape.window_of(layer + 1) for layer in range(shape.num_layers)]
    return [FULL if window is None else SLIDING for window in windows]


def window_to_hf(config: Config) -> dict[str, Any]:
    """Keys of ``config.json`` for the window of a NeMo config, and the layers that have it."""
    size = ModelShape.from_config(config).window_size
    return {"sliding_window": size, "layer_types": layer_types(config)}
