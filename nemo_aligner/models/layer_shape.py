"""Position encoding, windows and experts of decoder layers, read from ``model_config.yaml``.

``shape.py`` combines them in a ``ModelShape``. Neither module imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_aligner.config.common import (
    MAX_COUNT,
    MAX_NUMBER,
    MIN_NUMBER,
    count_of_config,
    number_of_config,
    optional_number_of_config,
    read_count,
)
from nemo_aligner.utils.errors import CheckpointError, ConfigError, shown

Frequency = int | tuple[int, ...] | None
"""A choice of layers as in megatron-core: every N-th, or a 0 or 1 for each; None is no layer."""


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of RoPE: slow frequencies divided by ``factor``, fast ones unchanged.

    Attributes:
        low_freq_factor, high_freq_factor: a frequency is slow if it makes fewer than
            ``low_freq_factor`` full turns in the old context, and fast if it makes more than
            ``high_freq_factor``. Between them the two results are interpolated.
        old_context_len: context length before the scaling, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    old_context_len: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): slow frequencies divided by ``factor``, fast ones unchanged.

    Attributes:
        old_context_len: context length before the scaling, in tokens. A frequency is slow if it
            makes less than ``beta_slow`` full turns in this context, and fast if it makes more than
            ``beta_fast``. Between them the divisor changes linearly.
        attention_factor: factor by which RoPE's cosines and sines are multiplied.
        rounded: the linear change begins and ends at whole channel numbers.
    """

    factor: float
    old_context_len: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    rounded: bool


@dataclass(frozen=True)
class LongRope:
    """LongRoPE (Ding et al. 2024): each frequency has its own divisor.

    Attributes:
        short: divisors for sequences of at most ``old_context_len`` tokens.
        long: divisors for longer sequences; None if the config has none.
        attention_factor: factor by which RoPE's cosines and sines are multiplied.
    """

    short: tuple[float, ...]
    long: tuple[float, ...] | None
    old_context_len: int
    attention_factor: float


def read_longrope(config: Mapping[str, Any], frequencies: int) -> LongRope | None:
    """Read LongRoPE's settings; None if the model has another position embedding.

    NeMo has no keys for LongRoPE; keys that begin with ``longrope_`` are this package's own.

    Args:
        frequencies: number of frequencies of the model's RoPE, which each list of divisors must
            have as its length.

    Raises:
        CheckpointError: a list has another length, or a value that is not a positive number.
    """
    if config.get("position_embedding_type") != "longrope":
        return None
    long = "longrope_long_factor"
    length = count_of_config(config, "longrope_original_max_position_embeddings")
    ratio = count_of_config(config, "max_position_embeddings") / length
    ratio = number_of_config(config, "longrope_factor", ratio)
    usual = math.sqrt(1 + math.log(ratio) / math.log(length)) if min(ratio, length) > 1 else 1.0
    return LongRope(
        short=_factors(config, "longrope_short_factor", frequencies),
        long=None if config.get(long) is None else _factors(config, long, frequencies),
        old_context_len=length,
        attention_factor=number_of_config(config, "longrope_attention_factor", usual),
    )


def _factors(config: Mapping[str, Any], key: str, count: int) -> tuple[float, ...]:
    value = config.get(key)
    factors = value if isinstance(value, list) else []
    if len(factors) != count or not all(
        type(factor) in (int, float) and MIN_NUMBER <= factor <= MAX_NUMBER for factor in factors
    ):
        raise CheckpointError(
            f"model_config.yaml: {key}: got {shown(value)}, wanted {count} numbers above 0"
        )
    return tuple(map(float, factors))


def check_longer(tokens: int, until: int, longrope: LongRope | None, is_scaled: bool) -> None:
    """Check that a RoPE that depends on length is defined for sequences longer than ``until``.

    Args:
        tokens: length of the longest sequence.
        until: length up to which all sequences have the same RoPE.
        longrope: LongRoPE's settings; None for dynamic NTK-aware scaling.
        is_scaled: the RoPE has a second kind of scaling.

    Raises:
        ConfigError: LongRoPE has no divisors for longer sequences, or a dynamic RoPE is scaled
            twice.
    """
    missing = "has a second kind of RoPE scaling next to the dynamic one" if is_scaled else None
    if longrope is not None:
        missing = "lacks longrope_long_factor" if longrope.long is None else None
    if missing is not None:
        raise ConfigError(
            f"seq_length: got {tokens}, wanted at most {until}. RoPE is not defined for longer "
            f"sequences, because the model's config {missing}."
        )


@dataclass(frozen=True)
class QueryScaling:
    """Llama 4's scaling of queries by their position.

    It multiplies queries at position p by ``1 + beta ln(1 + floor(p / old_context_len))``.

    Attributes:
        old_context_len: number of tokens, from the first, whose queries are not scaled.
    """

    beta: float
    old_context_len: int


def read_query_scaling(config: Mapping[str, Any]) -> QueryScaling | None:
    """Read Llama 4's scaling of queries; the keys are Megatron-Bridge's."""
    if config.get("llama_4_scaling_beta") is None:
        return None
    return QueryScaling(
        beta=number_of_config(config, "llama_4_scaling_beta", math.nan),
        old_context_len=count_of_config(config, "llama_4_original_max_position_embeddings"),
    )


def read_rope_scaling(config: Mapping[str, Any]) -> RopeScaling | None:
    """Read Llama 3.1's RoPE scaling; the keys are NeMo's."""
    if not config.get("scale_positional_embedding"):
        return None
    # The defaults are Llama 3.1's values, which NeMo does not write into its configs.
    return RopeScaling(
        factor=number_of_config(config, "scale_factor", 8.0),
        low_freq_factor=number_of_config(config, "low_freq_factor", 1.0),
        high_freq_factor=number_of_config(config, "high_freq_factor", 4.0),
        old_context_len=count_of_config(config, "old_context_len", 8192),
    )


def read_yarn(config: Mapping[str, Any]) -> YarnScaling | None:
    """Read YaRN's settings; None if the model has another RoPE. The keys are megatron-core's.

    ``yarn_attention_factor`` is this package's own key, and overrides mscale. Without it the factor
    is ``m(mscale) / m(mscale_all_dim)``, or ``m(1)`` if one is missing, with ``m(x) = 0.1 x
    ln(factor) + 1``.
    """
    if config.get("position_embedding_type") != "yarn":
        return None
    base = number_of_config(config, "rotary_base", 10000.0)
    if base <= 1:
        raise CheckpointError(f"model_config.yaml: rotary_base: got {base}, wanted more than 1")
    factor = number_of_config(config, "yarn_rotary_scaling_factor", math.nan)
    above = optional_number_of_config(config, "yarn_mscale")
    below = optional_number_of_config(config, "yarn_mscale_all_dim")
    if above is None or below is None:
        above, below = 1.0, 0.0
    of_factor = 0.1 * math.log(max(factor, 1.0))
    by_mscales = (above * of_factor + 1) / (below * of_factor + 1)
    rounded = config.get("yarn_correction_range_round_to_int")
    return YarnScaling(
        factor=factor,
        old_context_len=count_of_config(config, "yarn_original_max_position_embeddings"),
        beta_fast=number_of_config(config, "yarn_beta_fast", 32.0),
        beta_slow=number_of_config(config, "yarn_beta_slow", 1.0),
        attention_factor=number_of_config(config, "yarn_attention_factor", by_mscales),
        rounded=True if rounded is None else bool(rounded),
    )


def read_frequency(config: Mapping[str, Any], key: str) -> Frequency:
    """Read a key that chooses layers: N for every N-th, or a list with 0 or 1 for each layer.

    Raises:
        CheckpointError: the value is neither of them.
    """
    value, layers = config.get(key), config.get("num_layers")
    if value is None or (type(value) is int and 0 < value <= MAX_COUNT):
        return value
    marks = value if isinstance(value, list | tuple) else ()
    if len(marks) == layers and all(type(mark) in (int, bool) and 0 <= mark <= 1 for mark in marks):
        return tuple(map(int, marks))
    raise CheckpointError(
        f"model_config.yaml: {key}: got {shown(value)}, wanted a number N for every N-th layer, or "
        f"0 or 1 for each of the {layers} layers"
    )


def is_in(frequency: Frequency, layer_number: int, mark: int) -> bool:
    """Tell if ``frequency`` chooses a layer.

    Args:
        layer_number: number of the layer, from 1.
        mark: 0 or 1, whichever marks a chosen layer if ``frequency`` is a list.
    """
    if isinstance(frequency, tuple):
        return frequency[layer_number - 1] == mark
    return frequency is not None and layer_number % frequency == 0


def read_window(value: Any) -> int | None:
    """Read a window: a number of keys, or NeMo's pair (keys before a token, keys after it).

    Raises:
        CheckpointError: the value is neither of them.
    """
    size = value
    if isinstance(value, list | tuple) and len(value) == 2 and value[1] == 0:
        keys_before = value[0]
        size = keys_before + 1 if type(keys_before) is int else keys_before
        if keys_before == -1:
            size = None
    if size is None or (type(size) is int and 0 < size <= MAX_COUNT):
        return size
    raise CheckpointError(
        f"model_config.yaml: window_size: got {shown(value)}, wanted a number of keys above 0, or "
        "NeMo's pair [keys before the token, 0]"
    )


def read_window_pattern(config: Mapping[str, Any], window: int | None) -> dict[str, Any]:
    """Read which layers have the window, from ``window_pattern`` or ``window_attn_skip_freq``.

    Raises:
        CheckpointError: the config has both keys.
    """
    pattern, key = config.get("window_pattern") or "all", "window_attn_skip_freq"
    skipped = read_frequency(config, key)
    if pattern != "all" and skipped is not None:
        raise CheckpointError(
            f"model_config.yaml: {key}: got {shown(config[key])} and window_pattern={pattern}, "
            "wanted only one of the two keys"
        )
    if window is None:
        pattern, skipped = "all", None
    return {"window_pattern": pattern, key: skipped}


# Mixture-of-experts (MoE) layers: how their experts are read from the config.


# Megatron's keys, in the order of the fields of ``ExpertShape``.
EXPERT_COUNT = "num_moe_experts"
EXPERT_TOP_K, EXPERT_WIDTH = "moe_router_topk", "moe_ffn_hidden_size"
# If true, a chosen expert's weight is its probability in the softmax over all experts, and the
# weights are not renormalized.
PRE_SOFTMAX = "moe_router_pre_softmax"
SHARED_WIDTH, SHARED_GATE = "moe_shared_expert_intermediate_size", "moe_shared_expert_gate"


@dataclass(frozen=True)
class ExpertShape:
    """The experts of a mixture-of-experts layer (Shazeer et al. 2017, arXiv:1701.06538).

    Attributes:
        count: number of experts in a layer.
        top_k: number of experts that a token goes through, the most probable ones.
        width: number of ffn channels of an expert.
        renormalized: the weights of a token's experts sum to 1.
        shared_width: number of ffn channels of the shared expert, which all tokens go through; None
            if there is none.
        shared_gate: a learned gate, a sigmoid computed from the token, multiplies the shared
            expert's output.
    """

    count: int
    top_k: int
    width: int
    renormalized: bool
    shared_width: int | None = None
    shared_gate: bool = False

    def check_fits(self, tp: int, ep: int) -> None:
        """Check that a layout splits the experts evenly.

        Raises:
            ConfigError: the layout does not. The message names the setting, and what it should
                divide.
        """
        if self.count % ep != 0:
            raise ConfigError(
                f"model.expert_model_parallel_size: got {ep}, wanted a divisor of the model's "
                f"{self.count} experts"
            )
        for width in (self.width, self.shared_width or self.width):
            if width % tp != 0:
                raise ConfigError(
                    f"model.tensor_model_parallel_size: got {tp}, wanted a divisor of an expert's "
                    f"{width} ffn channels"
                )

    def parameters(self, hidden_size: int, matrices: int) -> tuple[int, int, int]:
        """Count a layer's parameters.

        Args:
            matrices: number of matrices of an MLP: 3 if it is gated, else 2.

        Returns:
            The numbers of parameters of the routed experts, of the shared expert, and of the router
            with the shared gate.
        """
        shared = matrices * hidden_size * (self.shared_width or 0)
        routed = matrices * hidden_size * self.width * self.count
        return routed, shared, hidden_size * (self.count + self.shared_gate)

    @property
    def active_width(self) -> int:
        """Number of ffn channels that a token goes through, in routed and shared experts."""
        return self.top_k * self.width + (self.shared_width or 0)

    def __str__(self) -> str:
        shared = "" if self.shared_width is None else f", and a shared one of {self.shared_width}"
        return f"{self.count} experts of {self.width}, {self.top_k} a token{shared}"


def read_experts(config: Mapping[str, Any]) -> ExpertShape | None:
    """Read the experts from a NeMo model config; None for a dense model.

    Raises:
        CheckpointError: a key is missing or out of range, or the layer has post-norms or an MLP
            without a gate, which are not supported with experts.
    """
    if not config.get(EXPERT_COUNT):
        return None
    count = count_of_config(config, EXPERT_COUNT)
    key = f"model_config.yaml: {EXPERT_TOP_K}"
    top_k = read_count(config.get(EXPERT_TOP_K), key, f"a whole number from 1 to {count}", 1, count)
    flags = {name: config.get(name) for name in (PRE_SOFTMAX, SHARED_GATE)}
    for name, value in flags.items():
        if not isinstance(value, bool | None):
            raise CheckpointError(
                f"model_config.yaml: {name}: got {shown(value)}, wanted true or false"
            )
    shared = config.get(SHARED_WIDTH)
    if config.get("post_layernorms") or config.get("activation") == "squared-relu":
        raise CheckpointError(
            f"model_config.yaml: {EXPERT_COUNT}: got {count} together with post_layernorms or an "
            "MLP without a gate, which is not supported. Such models are supported without experts."
        )
    return ExpertShape(
        count,
        top_k,
        count_of_config(config, EXPERT_WIDTH),
        renormalized=not flags[PRE_SOFTMAX],
        shared_width=None if shared is None else count_of_config(config, SHARED_WIDTH),
        shared_gate=shared is not None and bool(flags[SHARED_GATE]),
    )


# Layers with linear attention.

# Megatron's keys, in the order of the fields of ``LinearAttentionShape``.
LINEAR_ATTENTION_KEYS = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
CHUNK_TOKENS = 64
"""Tokens of a chunk, in which linear attention is computed by matmuls."""
ATTENTION_VARIANT, LINEAR_FREQUENCY = "experimental_attention_variant", "linear_attention_freq"
GATED_DELTA_NET = "gated_delta_net"


@dataclass(frozen=True)
class LinearAttentionShape:
    """A Gated DeltaNet layer (Yang et al. 2024, arXiv:2412.06464), in place of attention.

    Attributes:
        num_key_heads: heads of queries, and of keys.
        num_value_heads: heads of values, each with a state; consecutive ones share a key head.
        key_head_dim: channels of a query and of a key.
        value_head_dim: channels of a value.
        conv_kernel: taps of the causal convolution over queries, keys and values.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int

    @property
    def values_per_key(self) -> int:
        """Value heads of a key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def value_width(self) -> int:
        """Channels of all value heads, which the output projection reads."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_width(self) -> int:
        """Channels of queries, keys and values, which the convolution reads."""
        return 2 * self.num_key_heads * self.key_head_dim + self.value_width

    @property
    def projection_width(self) -> int:
        """Outputs of the input projection: queries, keys, values, output gates, and two scalars.

        The scalars of each value head become its write strength (beta) and its decay.
        """
        return self.conv_width + self.value_width + 2 * self.num_value_heads

    def check_fits(self, tp: int) -> None:
        """Check that tensor parallelism splits the key heads evenly.

        Raises:
            ConfigError: it does not.
        """
        if self.num_key_heads % tp != 0:
            raise ConfigError(
                f"model.tensor_model_parallel_size: got {tp}, wanted a divisor of the "
                f"{self.num_key_heads} key heads of the model's linear attention"
            )

    def parameters(self, hidden_size: int) -> tuple[int, int]:
        """Count a layer's parameters: those that TP shards, and those replicated on all ranks."""
        matrices = hidden_size * (self.projection_width + self.value_width)
        of_heads = self.conv_width * self.conv_kernel + 2 * self.num_value_heads
        return matrices + of_heads, self.value_head_dim


def read_linear_attention(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the layers with linear attention; the fields are None for a model without.

    ``linear_attention_freq`` is Megatron's: every N-th layer has attention and all others have
    linear attention; or a list with a 0 for each layer with attention and a 1 for each other one.

    Raises:
        CheckpointError: the variant is not supported, a key is missing or out of range, or the
            layers have experts or norms of their outputs, which is not supported.
    """
    variant = config.get(ATTENTION_VARIANT)
    if variant is None:
        return {"linear_attention": None, LINEAR_FREQUENCY: None}
    if variant != GATED_DELTA_NET:
        raise CheckpointError(
            f"model_config.yaml: {ATTENTION_VARIANT}: got {shown(variant)}, wanted "
            f"{GATED_DELTA_NET}, or no such key"
        )
    shape = LinearAttentionShape(*(count_of_config(config, key) for key in LINEAR_ATTENTION_KEYS))
    if shape.num_value_heads % shape.num_key_heads != 0:
        raise CheckpointError(
            f"model_config.yaml: linear_num_value_heads: got {shape.num_value_heads}, wanted a "
            f"multiple of the {shape.num_key_heads} key heads"
        )
    unsupported = [key for key in (EXPERT_COUNT, "post_layernorms") if config.get(key)]
    if config.get("normalization", "rmsnorm") != "rmsnorm":
        unsupported.append("normalization")
    if unsupported:
        raise CheckpointError(
            f"model_config.yaml: {unsupported[0]}: got {shown(config[unsupported[0]])} together "
            f"with {ATTENTION_VARIANT}={GATED_DELTA_NET}, which is not supported"
        )
    return {"linear_attention": shape, LINEAR_FREQUENCY: read_frequency(config, LINEAR_FREQUENCY)}


# All fields of a layer.


def read_layer(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the fields that describe a layer's modules."""
    normalization = config.get("normalization", "rmsnorm")
    window = read_window(config.get("window_size"))
    return {
        "activation": config.get("activation", "swiglu").removeprefix("fast-"),
        "normalization": normalization,
        "layernorm_zero_centered_gamma": normalization == "layernorm1p"
        or bool(config.get("layernorm_zero_centered_gamma")),
        "qkv_bias": bool(config.get("qkv_bias")),
        "qk_layernorm": bool(config.get("qk_layernorm")),
        "qk_layernorm_across_heads": bool(config.get("qk_layernorm_across_heads")),
        "zero_query_groups": _read_zero_groups(config),
        "pre_layernorms": config.get("pre_layernorms") is not False,
        "post_layernorms": bool(config.get("post_layernorms")),
        "apply_embedding_scaling": bool(config.get("apply_embedding_scaling")),
        "embedding_multiplier": number_of_config(config, "embedding_multiplier", 1.0),
        "residual_multiplier": number_of_config(config, "residual_multiplier", 1.0),
        "window_size": window,
        **read_window_pattern(config, window),
        "attn_logit_softcapping": optional_number_of_config(config, "attn_logit_softcapping"),
        "query_pre_attn_scalar": optional_number_of_config(config, "query_pre_attn_scalar"),
        "attention_output_gate": bool(config.get("attention_output_gate")),
        "experts": read_experts(config),
        **read_linear_attention(config),
    }


def _read_zero_groups(config: Mapping[str, Any]) -> int:
    value = config.get("zero_query_groups") or 0
    largest = count_of_config(config, "num_query_groups", config["num_attention_heads"]) - 1
    expected = f"a whole number from 0 to {largest}, fewer than the query groups"
    return read_count(value, "model_config.yaml: zero_query_groups", expected, 0, largest)


# Supported values of each key; the first one is the default where the key is missing.
_SUPPORTED = {
    "normalization": ("rmsnorm", "layernorm1p"),
    "activation": ("fast-swiglu", "swiglu", "geglu", "fast-geglu", "squared-relu"),
    "position_embedding_type": ("rope", "yarn", "longrope"),
    "bias": (False,),
    **dict.fromkeys(
        (
            "qkv_bias",
            "qk_layernorm",
            "qk_layernorm_across_heads",
            "attention_output_gate",
            "post_layernorms",
            "apply_embedding_scaling",
            "layernorm_zero_centered_gamma",
            "scale_positional_embedding",
            "share_embeddings_and_output_weights",
        ),
        (False, True, None),
    ),
    "pre_layernorms": (True, False, None),
    "transformer_block_type": ("pre_ln",),
    "rotary_interleaved": (False, None),
    "window_pattern": ("all", "alternate", None),
    "moe_num_experts": (None, 0),
}


def check_supported(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for the first key whose value is not supported."""
    for key, values in _SUPPORTED.items():
        value = config.get(key, values[0])
        if value not in values:
            expected = " or ".join(str(item) for item in values)
            raise CheckpointError(
                f"model_config.yaml: {key}: got {shown(value)}, wanted {expected}"
            )
