"""Linear attention of decoder layers, read from ``model_config.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from nemo_aligner.config.common import count_of_config
from nemo_aligner.models.shapes.frequency import read_frequency
from nemo_aligner.models.shapes.hybrid import HYBRID_PATTERN, MAMBA
from nemo_aligner.utils.errors import CheckpointError, ConfigError, shown

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
    _parts_name: ClassVar[str] = "key heads of the model's linear attention"

    @property
    def values_per_key(self) -> int:
        """Number of value heads that share a key head."""
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

    def snapshot_bytes(self, element_bytes: int) -> int:
        """Count a layer's bytes in a snapshot of the prefix cache, over all tensor parallel ranks.

        These are the fp32 states of its value heads, and the inputs of the convolution at the last
        tokens, in elements of ``element_bytes`` bytes.
        """
        states = self.num_value_heads * self.key_head_dim * self.value_head_dim
        return 4 * states + element_bytes * (self.conv_kernel - 1) * self.conv_width

    @property
    def elements_of_backward(self) -> float:
        """Number of fp32 elements per token that exist at once in the backward pass.

        The layer is recomputed for the whole pack, in these tensors, whose numbers were fitted to
        measured training steps, within 1.5%:

        - the projections, before and after the convolution, and gradients of those before it
        - ``[64, 64]`` matrices of each chunk of tokens: five for a value head, two for a key head
        - keys and values in several forms
        - two states of each chunk
        """
        k, v, heads = self.key_head_dim, self.value_head_dim, self.num_value_heads
        overlap = 1 + (self.conv_kernel - 1) / CHUNK_TOKENS
        elements = 2 * overlap * self.projection_width + 2 * self.conv_width
        elements += 6 * self.value_width + CHUNK_TOKENS * (5 * heads + 2 * self.num_key_heads)
        return elements + heads * (6 * k + 2 * k * v / CHUNK_TOKENS) + 2 * self.num_key_heads * k

    @property
    def elements_of_last_chunk(self) -> float:
        """Number of elements per token that the last chunk of a sequence has less than others.

        The fit of ``elements_of_backward`` includes them.
        """
        return 0.0

    def check_fits(self, tp: int, cp: int) -> None:
        """Check that tensor parallelism splits the key heads evenly, and nothing splits sequences.

        Raises:
            ConfigError: ``tp`` does not divide the number of key heads, or ``cp``, the size of
                context parallelism, is above 1.
        """
        if cp > 1:
            raise ConfigError(
                f"model.context_parallel_size: got {cp}, which is not supported for a model with "
                "linear attention or Mamba-2. Set it to 1"
            )
        if self.num_key_heads % tp != 0:
            raise ConfigError(
                f"model.tensor_model_parallel_size: got {tp}, wanted a divisor of the "
                f"{self.num_key_heads} {self._parts_name}"
            )

    def parameters(self, hidden_size: int) -> tuple[int, int]:
        """Count a layer's parameters: those that TP shards, and those replicated on all ranks."""
        matrices = hidden_size * (self.projection_width + self.value_width)
        of_heads = self.conv_width * self.conv_kernel + 2 * self.num_value_heads
        return matrices + of_heads, self.value_head_dim


# Megatron's keys of Mamba-2, and this package's own keys for what megatron-core hard-codes.
MAMBA_HEADS, MAMBA_GROUPS = "mamba_num_heads", "mamba_num_groups"
MAMBA_STATE, MAMBA_HEAD_DIM = "mamba_state_dim", "mamba_head_dim"
MAMBA_KERNEL, MAMBA_CONV_BIAS = "mamba_conv_kernel_dim", "mamba_conv_bias"
MAMBA_LEAST_STEP = "mamba_time_step_min"


@dataclass(frozen=True)
class Mamba2Shape(LinearAttentionShape):
    """A Mamba-2 layer (Dao and Gu 2024, arXiv:2405.21060), in place of attention.

    Its groups are the key heads: C is a group's query, B its key, and x the values of its heads.

    Attributes:
        conv_bias: the convolution has a bias.
        least_step: lower bound of the time step dt.
    """

    conv_bias: bool = True
    least_step: float = 0.0
    _parts_name: ClassVar[str] = "groups of the model's Mamba-2 layers"

    @property
    def projection_width(self) -> int:
        """Outputs of the input projection: x, B and C, the gates z, and each head's time step."""
        return self.conv_width + self.value_width + self.num_value_heads

    @property
    def elements_of_backward(self) -> float:
        """Number of fp32 elements per token that exist at once in the backward pass.

        With heads of 16 channels or more, most exist when the gates are computed again: 15 tensors
        as wide as they are, and fewer of other kinds.
        """
        k, heads, groups = self.key_head_dim, self.num_value_heads, self.num_key_heads
        elements = 15 * self.value_width + CHUNK_TOKENS * (2 * heads + groups) + 8 * groups * k
        return elements + heads * (2 * k + 8 + k * self.value_head_dim / CHUNK_TOKENS)

    @property
    def elements_of_last_chunk(self) -> float:
        """Number of elements per token that the last chunk of a sequence has less than others.

        No chunk reads the state after it, so the state and the copy of the values that its matmul
        reads are freed.
        """
        states = self.num_value_heads * self.key_head_dim * self.value_head_dim
        return self.value_width + states / CHUNK_TOKENS

    def parameters(self, hidden_size: int) -> tuple[int, int]:
        matrices = hidden_size * (self.projection_width + self.value_width)
        # Each head has A, D and the bias of its time step.
        of_heads = self.conv_width * (self.conv_kernel + self.conv_bias) + 3 * self.num_value_heads
        return matrices + of_heads + self.value_width, 0


def read_mamba(config: Mapping[str, Any]) -> Mamba2Shape:
    """Read the sizes of Mamba-2 layers.

    Raises:
        CheckpointError: a key is missing or out of range.
    """
    heads, groups = (count_of_config(config, key) for key in (MAMBA_HEADS, MAMBA_GROUPS))
    if heads % groups != 0:
        raise CheckpointError(
            f"model_config.yaml: {MAMBA_HEADS}: got {heads}, wanted a multiple of the {groups} "
            "groups"
        )
    has_bias, least_step = config.get(MAMBA_CONV_BIAS), config.get(MAMBA_LEAST_STEP) or 0.0
    if not isinstance(has_bias, bool | None):
        raise CheckpointError(
            f"model_config.yaml: {MAMBA_CONV_BIAS}: got {shown(has_bias)}, wanted true or false"
        )
    if type(least_step) not in (int, float) or not 0 <= least_step <= 1:
        raise CheckpointError(
            f"model_config.yaml: {MAMBA_LEAST_STEP}: got {shown(least_step)}, wanted a number from "
            "0 to 1"
        )
    return Mamba2Shape(
        num_key_heads=groups,
        num_value_heads=heads,
        key_head_dim=count_of_config(config, MAMBA_STATE),
        value_head_dim=count_of_config(config, MAMBA_HEAD_DIM),
        conv_kernel=count_of_config(config, MAMBA_KERNEL, 4),
        conv_bias=has_bias is not False,
        least_step=float(least_step),
    )


def read_linear_attention(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the layers with linear attention; the fields are None for a model without.

    A hybrid model has Mamba-2 in the layers that its pattern names. Otherwise
    ``linear_attention_freq`` is Megatron's: every N-th layer has attention and all others have
    linear attention; or a list with a 0 for each layer with attention and a 1 for each other one.

    Raises:
        CheckpointError: the variant is not supported, a key is missing or out of range, or the
            layers have norms of their outputs or LayerNorms, which is not supported.
    """
    variant = config.get(ATTENTION_VARIANT)
    if MAMBA in str(config.get(HYBRID_PATTERN)):
        return {"linear_attention": read_mamba(config), LINEAR_FREQUENCY: None}
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
    unsupported = [key for key in ("post_layernorms",) if config.get(key)]
    if config.get("normalization", "rmsnorm") != "rmsnorm":
        unsupported.append("normalization")
    if unsupported:
        raise CheckpointError(
            f"model_config.yaml: {unsupported[0]}: got {shown(config[unsupported[0]])} together "
            f"with {ATTENTION_VARIANT}={GATED_DELTA_NET}, which is not supported"
        )
    return {"linear_attention": shape, LINEAR_FREQUENCY: read_frequency(config, LINEAR_FREQUENCY)}
