"""A layer's mixture of experts in the terms of ``model_config.yaml``; imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_aligner.config.common import count_of_config, read_count
from nemo_aligner.utils.errors import CheckpointError, ConfigError, shown

# Megatron's keys, in the order of the fields of ``ExpertShape``.
COUNT = "num_moe_experts"
TOP_K, WIDTH = "moe_router_topk", "moe_ffn_hidden_size"
# True: a chosen expert's weight is its share of the softmax over all experts.
PRE_SOFTMAX = "moe_router_pre_softmax"
SHARED_WIDTH, SHARED_GATE = "moe_shared_expert_intermediate_size", "moe_shared_expert_gate"


@dataclass(frozen=True)
class ExpertShape:
    """MLPs of which each token goes through a few (Shazeer et al. 2017, arXiv:1701.06538).

    Attributes:
        count: experts of a layer.
        top_k: of them a token goes through those with the largest probabilities.
        width: ffn channels of an expert.
        renormalized: the weights of a token's experts sum to 1.
        shared_width: ffn channels of an expert that all tokens go through; None without one.
        shared_gate: the shared expert's output is multiplied by a sigmoid of the token.
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
            ConfigError: it names the setting, and what it should divide.
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
        """Parameters of a layer's own experts, of its shared one, and of router and shared gate."""
        shared = matrices * hidden_size * (self.shared_width or 0)
        own = matrices * hidden_size * self.width * self.count
        return own, shared, hidden_size * (self.count + self.shared_gate)

    @property
    def active_width(self) -> int:
        """Ffn channels that a token goes through."""
        return self.top_k * self.width + (self.shared_width or 0)

    def __str__(self) -> str:
        shared = "" if self.shared_width is None else f", and a shared one of {self.shared_width}"
        return f"{self.count} experts of {self.width}, {self.top_k} a token{shared}"


def read_experts(config: Mapping[str, Any]) -> ExpertShape | None:
    """Read a mixture of experts from a NeMo model config; None without one.

    Raises:
        CheckpointError: a key is missing or out of range, or the layer has what no expert has here.
    """
    if not config.get(COUNT):
        return None
    count = count_of_config(config, COUNT)
    key = f"model_config.yaml: {TOP_K}"
    top_k = read_count(config.get(TOP_K), key, f"a whole number from 1 to {count}", 1, count)
    flags = {name: config.get(name) for name in (PRE_SOFTMAX, SHARED_GATE)}
    for name, value in flags.items():
        if not isinstance(value, bool | None):
            raise CheckpointError(f"model_config.yaml: {name}: got {shown(value)}, wanted a bool")
    shared = config.get(SHARED_WIDTH)
    if config.get("post_layernorms") or config.get("activation") == "squared-relu":
        raise CheckpointError(
            f"model_config.yaml: {COUNT}: got {count} beside post_layernorms or an MLP without a "
            "gate, wanted it without experts"
        )
    return ExpertShape(
        count,
        top_k,
        count_of_config(config, WIDTH),
        renormalized=not flags[PRE_SOFTMAX],
        shared_width=None if shared is None else count_of_config(config, SHARED_WIDTH),
        shared_gate=shared is not None and bool(flags[SHARED_GATE]),
    )
