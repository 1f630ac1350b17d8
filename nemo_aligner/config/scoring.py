"""Settings of a finished reward model's layout."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_aligner.config.common import Checks, setting


@dataclass
class ScorerModelConfig:
    """How a finished reward model is laid out to score."""

    tensor_model_parallel_size: int = setting(1, "processes that share every layer")
    pipeline_model_parallel_size: int = setting(1, "stages that the layers are dealt out to")
    sequence_parallel: bool = setting(False, "share norms, too, along the tokens; needs tensor > 1")
    micro_batch_tokens: int = setting(8192, "tokens in one forward pass")

    def __post_init__(self) -> None:
        with Checks("model", self) as checks:
            checks.positive(
                "tensor_model_parallel_size",
                "pipeline_model_parallel_size",
                "micro_batch_tokens",
            )
