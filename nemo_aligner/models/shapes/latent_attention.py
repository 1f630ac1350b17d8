"""Multi-head latent attention (MLA) of a decoder, read from ``model_config.yaml``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_aligner.config.common import count_of_config, number_of_config, optional_number_of_config
from nemo_aligner.models.shapes.layer import read_zero_groups
from nemo_aligner.utils.errors import CheckpointError, ConfigError, shown

# Megatron's keys. ``q_lora_rank`` may be None, and is then not read with the others.
LATENT_ATTENTION, QUERY_RANK = "multi_latent_attention", "q_lora_rank"
LATENT_KEYS = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
# This package's own key: epsilon of the norms of the latents. Without this key they use
# ``layernorm_epsilon``.
LATENT_EPSILON = "latent_layernorm_epsilon"
# Settings of attention that are not supported with MLA, each with the values that switch it off.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "normalization": ("rmsnorm",),
    "post_layernorms": (False,),
    "qkv_bias": (False,),
    "qk_layernorm": (False,),
    "window_size": (),
    "no_rope_freq": (),
    "attn_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "attention_output_gate": (False,),
    "experimental_attention_variant": (),
}


@dataclass(frozen=True)
class LatentAttentionShape:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Keys and values of all heads are linear functions of one latent of a token, and of one key with
    RoPE that all heads share.

    Attributes:
        heads: number of heads, each with its own query, key and value.
        q_lora_rank: channels of the latent of queries; None if queries are computed from the hidden
            state.
        kv_lora_rank: channels of the latent of keys and values.
        qk_nope_head_dim: channels of a query or a key without RoPE.
        qk_rope_head_dim: channels of a query or a key with RoPE.
        v_head_dim: channels of a value.
        norm_epsilon: epsilon of the norms of the latents.
        score_factor: factor of the attention scores in addition to ``key_channels ** -0.5``: the
            square of YaRN's ``m(mscale_all_dim)``.
        zero_heads: how many of the heads, the last ones, have only zero weights; they were added so
            that tensor parallelism splits the heads evenly.
    """

    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    norm_epsilon: float
    score_factor: float
    zero_heads: int = 0

    @property
    def key_channels(self) -> int:
        """Channels of a query or a key: first those with RoPE, then those without."""
        return self.qk_rope_head_dim + self.qk_nope_head_dim

    @property
    def rotary_percentage(self) -> float:
        """Fraction of ``key_channels`` with RoPE.

        It is rounded so that ``int(key_channels * fraction)``, which megatron-core computes, is
        ``qk_rope_head_dim``.
        """
        fraction = self.qk_rope_head_dim / self.key_channels
        is_below = int(self.key_channels * fraction) < self.qk_rope_head_dim
        return math.nextafter(fraction, 1.0) if is_below else fraction

    @property
    def latent_width(self) -> int:
        """Channels of the latent of keys and values, and of the shared key with RoPE."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def query_width(self) -> int:
        """Channels of the queries of all heads."""
        return self.heads * self.key_channels

    @property
    def value_width(self) -> int:
        """Channels of the values of all heads, which the output projection reads."""
        return self.heads * self.v_head_dim

    @property
    def key_value_width(self) -> int:
        """Outputs of the up projection: all heads' keys without RoPE channels, and their values."""
        return self.heads * (self.qk_nope_head_dim + self.v_head_dim)

    @property
    def projection_width(self) -> int:
        """Outputs of the input projection: the latents, or queries and the latent of keys.

        Without a latent of queries the outputs are ordered by head, for tensor parallelism: each
        head has its query and an equal part of the latent of keys, added heads have zeros.
        """
        if self.q_lora_rank is not None:
            return self.q_lora_rank + self.latent_width
        latent_part = self.latent_width // (self.heads - self.zero_heads)
        return self.heads * (self.key_channels + latent_part)

    @property
    def norm_width(self) -> int:
        """Weights of the norms of both latents."""
        return (self.q_lora_rank or 0) + self.kv_lora_rank

    @property
    def up_parameters(self) -> int:
        """Count the weights of the up projections, from the latents to queries, keys and values."""
        queries = (self.q_lora_rank or 0) * self.query_width
        return queries + self.kv_lora_rank * self.key_value_width

    def check_fits(self, tp: int) -> None:
        """Check that tensor parallelism splits the input projection evenly.

        Raises:
            ConfigError: the size does not divide the projection's channels.
        """
        if self.q_lora_rank is not None and self.projection_width % tp != 0:
            raise ConfigError(
                f"model.tensor_model_parallel_size: got {tp}, wanted a divisor of the "
                f"{self.projection_width} channels of the model's attention latents"
            )

    def parameters(self, hidden_size: int) -> tuple[int, int]:
        """Count a layer's parameters: those that TP shards, and those replicated on all ranks."""
        matrices = hidden_size * (self.projection_width + self.value_width)
        return matrices + self.up_parameters, self.norm_width


def read_latent_attention(config: Mapping[str, Any]) -> LatentAttentionShape | None:
    """Read multi-head latent attention; None for a model without it.

    Raises:
        CheckpointError: a key is missing or out of range, or the config has a setting that is not
            supported with latent attention.
    """
    if not config.get(LATENT_ATTENTION):
        return None
    for key, neutral in _UNSUPPORTED.items():
        value = config.get(key)
        if value is not None and value not in neutral:
            raise CheckpointError(
                f"model_config.yaml: {key}: got {shown(value)} together with {LATENT_ATTENTION}, "
                "which is not supported"
            )
    heads = count_of_config(config, "num_attention_heads")
    rank = None if config.get(QUERY_RANK) is None else count_of_config(config, QUERY_RANK)
    epsilon = number_of_config(config, "layernorm_epsilon", 1e-5)
    kv_rank, plain, rotated, value = (count_of_config(config, key) for key in LATENT_KEYS)
    norm_epsilon = number_of_config(config, LATENT_EPSILON, epsilon)
    factor = _read_score_factor(config)
    sizes = heads, rank, kv_rank, plain, rotated, value
    shape = LatentAttentionShape(*sizes, norm_epsilon, factor, read_zero_groups(config))
    _check_sizes(config, shape)
    return shape


def _check_sizes(config: Mapping[str, Any], shape: LatentAttentionShape) -> None:
    """Raise CheckpointError for sizes of latent attention that are not supported."""
    problem, heads = "", shape.heads
    groups = config.get("num_query_groups", heads)
    if groups != heads:
        problem = f"num_query_groups: got {shown(groups)}, wanted {heads}, a key for each head"
    elif shape.qk_rope_head_dim % 2:
        problem = f"qk_pos_emb_head_dim: got {shape.qk_rope_head_dim}, wanted an even number"
    elif shape.v_head_dim > shape.key_channels:
        # Values are padded to the size of keys, not the other way round.
        problem = (
            f"v_head_dim: got {shape.v_head_dim}, wanted at most the {shape.key_channels} channels "
            "of a key"
        )
    elif shape.q_lora_rank is None and shape.latent_width % (heads - shape.zero_heads):
        # See ``projection_width``.
        problem = (
            f"kv_lora_rank: got {shape.kv_lora_rank} without {QUERY_RANK}, wanted kv_lora_rank + "
            f"qk_pos_emb_head_dim={shape.qk_rope_head_dim} to be a multiple of the "
            f"{heads - shape.zero_heads} heads"
        )
    if problem:
        raise CheckpointError(f"model_config.yaml: {problem}")


def _read_score_factor(config: Mapping[str, Any]) -> float:
    """Compute ``m(mscale_all_dim) ** 2`` with ``m(x) = 0.1 x ln(factor) + 1``; 1 without YaRN."""
    scale = optional_number_of_config(config, "yarn_mscale_all_dim")
    if config.get("position_embedding_type") != "yarn" or scale is None:
        return 1.0
    factor = number_of_config(config, "yarn_rotary_scaling_factor", math.nan)
    return (0.1 * scale * math.log(max(factor, 1.0)) + 1) ** 2
