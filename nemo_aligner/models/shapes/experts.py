"""Experts of mixture-of-experts (MoE) layers, read from ``model_config.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_aligner.config.common import (
    count_of_config,
    optional_number_of_config,
    read_count,
)
from nemo_aligner.utils.errors import CheckpointError, ConfigError, shown

# Megatron's keys, in the order of the fields of ``ExpertShape``.
EXPERT_COUNT = "num_moe_experts"
EXPERT_TOP_K, EXPERT_WIDTH = "moe_router_topk", "moe_ffn_hidden_size"
# If true, a chosen expert's weight is its probability in the softmax over all experts, and the
# weights are not renormalized.
PRE_SOFTMAX = "moe_router_pre_softmax"
SHARED_WIDTH, SHARED_GATE = "moe_shared_expert_intermediate_size", "moe_shared_expert_gate"
# megatron-core's key for the limit of an expert's two projections. The other two keys are this
# package's: megatron-core has one for the biases of all linear layers, and none for the router's.
CLAMP_VALUE = "activation_func_clamp_value"
# gpt-oss' activation of experts, ``(up + 1) * gate * sigmoid(1.702 * gate)``.
QUICK_GEGLU = "quick-geglu"
EXPERT_BIAS, ROUTER_BIAS = "moe_expert_bias", "moe_router_bias"

# Fields of ``ExpertShape`` that older checkpoints lack, with the values that their models have.
EXPERTS_NAMED_LATER = {"has_biases": False, "router_bias": False, "clamp_value": None}


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
        has_biases: both linear layers of a routed expert have biases.
        router_bias: the router has a bias.
        clamp_value: limit of an expert's gate from above, and of its up projection on both sides;
            None is no limit.
    """

    count: int
    top_k: int
    width: int
    renormalized: bool
    shared_width: int | None = None
    shared_gate: bool = False
    has_biases: bool = False
    router_bias: bool = False
    clamp_value: float | None = None

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
            with the shared gate. ``output_biases`` are not included.
        """
        shared = matrices * hidden_size * (self.shared_width or 0)
        # A biased MLP has a bias for each channel that its first linear layer computes.
        rows = matrices * hidden_size + (matrices - 1) * self.has_biases
        routers = hidden_size * (self.count + self.shared_gate) + self.count * self.router_bias
        return rows * self.width * self.count, shared, routers

    def output_biases(self, hidden_size: int) -> int:
        """Count the biases of the routed experts' outputs, which TP does not split."""
        return self.count * hidden_size if self.has_biases else 0

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
    _check_activation(config)
    if not config.get(EXPERT_COUNT):
        return None
    count = count_of_config(config, EXPERT_COUNT)
    key = f"model_config.yaml: {EXPERT_TOP_K}"
    top_k = read_count(config.get(EXPERT_TOP_K), key, f"a whole number from 1 to {count}", 1, count)
    names = (PRE_SOFTMAX, SHARED_GATE, EXPERT_BIAS, ROUTER_BIAS)
    flags = {name: config.get(name) for name in names}
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
        has_biases=bool(flags[EXPERT_BIAS]),
        router_bias=bool(flags[ROUTER_BIAS]),
        clamp_value=optional_number_of_config(config, CLAMP_VALUE),
    )


def _check_activation(config: Mapping[str, Any]) -> None:
    activation, clamp = config.get("activation"), config.get(CLAMP_VALUE)
    has_experts = bool(config.get(EXPERT_COUNT))
    if (activation == QUICK_GEGLU and not has_experts) or (
        clamp is not None and activation != QUICK_GEGLU
    ):
        raise CheckpointError(
            f"model_config.yaml: activation: got {shown(activation)} with {CLAMP_VALUE}="
            f"{shown(clamp)} and {EXPERT_COUNT}={shown(config.get(EXPERT_COUNT))}. "
            f"{QUICK_GEGLU} is supported only for experts, and only it may be clamped."
        )
