"""Settings of LoRA: small trained matrices beside the frozen ones of the backbone."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_aligner.config.common import Checks, setting

# Megatron's names of a layer's linear layers: queries, keys and values in one; the attention's
# output; the MLP's first product, with its gate; its second one.
LORA_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


@dataclass
class LoraConfig:
    """LoRA (Hu et al. 2021, arXiv:2106.09685) on the linear layers of the backbone."""

    rank: int = setting(0, "rank of the LoRA matrices; 0: train the weights themselves")
    alpha: float = setting(32.0, "LoRA's output is scaled by alpha / rank")
    dropout: float = setting(0.0, "dropout on LoRA's inputs")
    targets: list[str] = setting(
        list(LORA_TARGETS), "linear layers with LoRA; default: all four of a layer"
    )

    def __post_init__(self) -> None:
        with Checks("model.lora", self) as checks:
            checks.not_negative("rank")
            checks.positive("alpha")
            checks.require(0 <= self.dropout < 1, "dropout", "0 or more, and less than 1")
            known = bool(self.targets) and set(self.targets) <= set(LORA_TARGETS)
            fits = known and len(set(self.targets)) == len(self.targets)
            checks.require(fits, "targets", f"at least one of {', '.join(LORA_TARGETS)}, each once")
