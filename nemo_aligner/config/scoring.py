"""Settings of a finished reward model's layout."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_aligner.config.common import require_positive


@dataclass
class ScorerModelConfig:
    """How a finished reward model is laid out to score."""

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    sequence_parallel: bool = False
    micro_batch_tokens: int = 8192

    def __post_init__(self) -> None:
        require_positive(
            "model",
            self,
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "micro_batch_tokens",
        )
