"""Experts of mixture-of-experts (MoE) layers, read from ``model_config.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_aligner.config.common import count_of_config, optional_number_of_config, read_count
from nemo_aligner.models.shapes.frequency import read_frequency
from nemo_aligner.utils.errors import CheckpointError, ConfigError, shown

# Megatron's keys, in the order of the fields of ``ExpertShape``.
EXPERT_COUNT = "num_moe_experts"
EXPERT_TOP_K, EXPERT_WIDTH = "moe_router_topk", "moe_ffn_hidden_size"
# If true, a chosen expert's weight is its probability in the softmax over all experts, and the
# weights are not renormalized.
PRE_SOFTMAX = "moe_router_pre_softmax"
SHARED_WIDTH, SHARED_GATE = "moe_shared_expert_intermediate_size", "moe_shared_expert_gate"
# Megatron's choice of the layers with experts: N for layers 1, N + 1, 2 N + 1 and so on; or a list
# with a 1 for each layer with experts and a 0 for each dense layer.
EXPERT_FREQUENCY = "moe_layer_freq"
# Megatron's keys of the router.
SCORE_FUNCTION, EXPERT_BIAS = "moe_router_score_function", "moe_router_enable_expert_bias"
GROUP_COUNT, GROUP_TOP_K = "moe_router_num_groups", "moe_router_group_topk"
SCALING_FACTOR = "moe_router_topk_scaling_factor"
SOFTMAX, SIGMOID = "softmax", "sigmoid"
# megatron-core's key for the limit to which an expert's gate and up projection are clamped.
CLAMP_VALUE = "activation_func_clamp_value"
# gpt-oss' activation of experts, ``(up + 1) * gate * sigmoid(1.702 * gate)``.
QUICK_GEGLU = "quick-geglu"
# This package's own keys: megatron-core has one key for the biases of all linear layers together,
# and none for the router's bias.
EXPERT_LINEAR_BIAS, ROUTER_BIAS = "moe_expert_bias", "moe_router_bias"
# This package's own key of Gemma 4's experts.
BRANCH_NORMS = "moe_branch_norms"


# Fields of ``ExpertShape`` that older checkpoints lack, with the values that their models have.
ADDED_EXPERT_FIELDS = {
    "score_function": "softmax",
    "expert_bias": False,
    "num_groups": 1,
    "group_topk": 1,
    "scaling_factor": 1.0,
    "has_biases": False,
    "router_bias": False,
    "clamp_value": None,
    "branch_norms": False,
}


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
        score_function: ``softmax`` or ``sigmoid``, which computes the scores of the experts from
            the router's logits.
        expert_bias: a constant for each expert is added to its score for the choice of experts, but
            not for their weights (DeepSeek-V3, arXiv:2412.19437, section 2.1.2). Training does not
            change the constants.
        num_groups: number of equal groups into which the experts are divided; 1 means no groups.
        group_topk: number of groups from which a token's experts are chosen. A group counts by its
            best score, or with sigmoid scores by the sum of its two best.
        scaling_factor: factor of the weights of a token's experts.
        has_biases: both linear layers of a routed expert have biases.
        router_bias: the router has a bias.
        clamp_value: limit of an expert's gate from above, and of its up projection on both sides;
            None means no limit.
        branch_norms: as in Gemma 4, the routed experts and the shared one each norm their input and
            output, the router norms its input, and an expert's weight is multiplied by a learned
            factor.
    """

    count: int
    top_k: int
    width: int
    renormalized: bool
    shared_width: int | None = None
    shared_gate: bool = False
    score_function: str = SOFTMAX
    expert_bias: bool = False
    num_groups: int = 1
    group_topk: int = 1
    scaling_factor: float = 1.0
    has_biases: bool = False
    router_bias: bool = False
    clamp_value: float | None = None
    branch_norms: bool = False

    @property
    def is_sigmoid(self) -> bool:
        return self.score_function == SIGMOID

    @property
    def has_plain_router(self) -> bool:
        """True if scores are a softmax and alone decide the choice and the weights of experts."""
        is_scaled = self.scaling_factor != 1
        is_grouped = self.num_groups > 1
        is_biased = self.expert_bias or self.router_bias
        return not (self.is_sigmoid or is_biased or is_grouped or is_scaled or self.branch_norms)

    @property
    def has_fp32_router(self) -> bool:
        """True if the router's weight stays fp32 in 16 bits, as in transformers' class.

        These classes have experts as in DeepSeek-V2 and V3: a bias for the choice of experts, or a
        shared expert without a gate. Other classes round the weight to the model's dtype.
        """
        is_shared_plainly = self.shared_width is not None and not self.shared_gate
        return self.expert_bias or (is_shared_plainly and not self.branch_norms)

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
            with the shared gate and the norms inside the MLP. The constants of ``expert_bias`` are
            not parameters, and ``output_biases`` are not included.
        """
        shared = matrices * hidden_size * (self.shared_width or 0)
        # A biased MLP has a bias for each channel that its first linear layer computes.
        rows = matrices * hidden_size + (matrices - 1) * self.has_biases
        routers = hidden_size * (self.count + self.shared_gate) + self.count * self.router_bias
        # A Gemma 4's MLP has five norms, of which two are those of any layer, and the router's.
        routers += self.branch_norms * (4 * hidden_size + self.count)
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
        CheckpointError: a key is missing or out of range, or the layer has post-norms or an
            activation that is not supported with experts; or the router's keys are wrong
            (``_read_router``).
    """
    _check_activation(config)
    if not config.get(EXPERT_COUNT):
        return None
    count = count_of_config(config, EXPERT_COUNT)
    key = f"model_config.yaml: {EXPERT_TOP_K}"
    top_k = read_count(config.get(EXPERT_TOP_K), key, f"a whole number from 1 to {count}", 1, count)
    names = (PRE_SOFTMAX, SHARED_GATE, EXPERT_LINEAR_BIAS, ROUTER_BIAS, BRANCH_NORMS)
    flags = {name: config.get(name) for name in names}
    for name, value in flags.items():
        if not isinstance(value, bool | None):
            raise CheckpointError(
                f"model_config.yaml: {name}: got {shown(value)}, wanted true or false"
            )
    shared = config.get(SHARED_WIDTH)
    ungated = ("gelu", "gelu-tanh", "xielu")
    activation, has_biases = config.get("activation"), flags[EXPERT_LINEAR_BIAS]
    is_unsupported = activation in ungated or (activation == "squared-relu" and has_biases)
    if (config.get("post_layernorms") and not flags[BRANCH_NORMS]) or is_unsupported:
        raise CheckpointError(
            f"model_config.yaml: {EXPERT_COUNT}: got {count} together with post_layernorms or "
            f"activation={activation}, which is not supported. Such models are supported without "
            "experts."
        )
    return ExpertShape(
        count,
        top_k,
        count_of_config(config, EXPERT_WIDTH),
        renormalized=not flags[PRE_SOFTMAX],
        shared_width=None if shared is None else count_of_config(config, SHARED_WIDTH),
        shared_gate=shared is not None and bool(flags[SHARED_GATE]),
        **_read_router(config, count, top_k),
        has_biases=bool(flags[EXPERT_LINEAR_BIAS]),
        router_bias=bool(flags[ROUTER_BIAS]),
        clamp_value=optional_number_of_config(config, CLAMP_VALUE),
        branch_norms=bool(flags[BRANCH_NORMS]),
    )


def _read_router(config: Mapping[str, Any], count: int, top_k: int) -> dict[str, Any]:
    """Read how the router scores and chooses ``top_k`` of ``count`` experts.

    Raises:
        CheckpointError: an unknown score function, or groups that do not divide the experts or have
            fewer than ``top_k``.
    """
    function, bias = config.get(SCORE_FUNCTION) or SOFTMAX, config.get(EXPERT_BIAS)
    if function not in (SOFTMAX, SIGMOID):
        raise CheckpointError(
            f"model_config.yaml: {SCORE_FUNCTION}: got {shown(function)}, wanted {SOFTMAX} or "
            f"{SIGMOID}"
        )
    if not isinstance(bias, bool | None):
        raise CheckpointError(
            f"model_config.yaml: {EXPERT_BIAS}: got {shown(bias)}, wanted true or false"
        )
    key = f"model_config.yaml: {GROUP_COUNT}"
    groups = read_count(config.get(GROUP_COUNT) or 1, key, "a whole number above 0", 1, count)
    key = f"model_config.yaml: {GROUP_TOP_K}"
    expected = f"a whole number from 1 to {groups}, the number of groups"
    chosen = read_count(config.get(GROUP_TOP_K) or groups, key, expected, 1, groups)
    if chosen == groups:
        groups = chosen = 1
    # A group is ranked by its best score, or its best two with sigmoid, so it needs as many
    # experts. The chosen groups together need ``top_k`` experts.
    min_experts = max(2 if function == SIGMOID else 1, -(-top_k // chosen))
    if groups > 1 and (count % groups or count // groups < min_experts):
        raise CheckpointError(
            f"model_config.yaml: {GROUP_COUNT}: got {groups}, wanted a divisor of the {count} "
            f"experts that leaves at least {min_experts} experts in a group"
        )
    factor = optional_number_of_config(config, SCALING_FACTOR)
    return {
        "score_function": function,
        "expert_bias": bool(bias),
        "num_groups": groups,
        "group_topk": chosen,
        "scaling_factor": 1.0 if factor is None else factor,
    }


def read_expert_layers(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Read which layers have experts: a 1 for each of them, and a 0 for each dense layer.

    None means that all layers are alike: all have experts, or the whole model is dense.

    Raises:
        CheckpointError: no layer has experts, although the config has ``num_moe_experts``.
    """
    if not config.get(EXPERT_COUNT):
        return None
    frequency = read_frequency(config, EXPERT_FREQUENCY)
    if frequency is None:
        return None
    marks = frequency
    if isinstance(marks, int):
        period = marks
        marks = tuple(int(layer % period == 0) for layer in range(config["num_layers"]))
    if all(marks):
        return None
    if not any(marks):
        raise CheckpointError(
            f"model_config.yaml: {EXPERT_FREQUENCY}: got no layer with experts together with "
            f"{EXPERT_COUNT}={config[EXPERT_COUNT]}. Remove {EXPERT_COUNT} if the model is dense"
        )
    return marks


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
