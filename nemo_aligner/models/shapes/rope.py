"""Scaling of RoPE and of queries by position, read from ``model_config.yaml``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_aligner.config.common import (
    MAX_NUMBER,
    MIN_NUMBER,
    count_of_config,
    number_of_config,
    optional_number_of_config,
)
from nemo_aligner.utils.errors import CheckpointError, ConfigError, shown

# This package's own key for the parts of RoPE that are in fp32 in a 16-bit model, and its values
# (``ModelShape.rope_fp32``).
ROPE_FP32 = "rope_fp32"
FP32_PRODUCTS, FP32_TABLES = "products", "tables"


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
    """Read Llama 4's scaling of queries from Megatron-Bridge's keys; None if the model has none."""
    if config.get("llama_4_scaling_beta") is None:
        return None
    return QueryScaling(
        beta=number_of_config(config, "llama_4_scaling_beta", math.nan),
        old_context_len=count_of_config(config, "llama_4_original_max_position_embeddings"),
    )


def read_rope_scaling(config: Mapping[str, Any]) -> RopeScaling | None:
    """Read Llama 3.1's RoPE scaling from NeMo's keys; None if the model has none."""
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
