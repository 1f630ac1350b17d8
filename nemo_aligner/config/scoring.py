"""Settings of a finished reward model's layout."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_aligner.config.common import Checks, setting

BATCH_INVARIANT_ROWS = 256


@dataclass
class InvarianceConfig:
    """Whether a reward depends on what is scored beside it; validation and critics, too."""

    batch_invariant: bool = setting(True, "rewards have the same bits alone and in any batch")
    batch_invariant_rows: int = setting(
        BATCH_INVARIANT_ROWS,
        "rows per matrix product; CPUs also use others that give the same bits",
    )

    @property
    def invariant_rows(self) -> int | None:
        """``batch_invariant_rows`` where rewards are to be batch invariant."""
        return self.batch_invariant_rows if self.batch_invariant else None


@dataclass
class ScorerModelConfig(InvarianceConfig):
    """How a finished reward model is laid out to score."""

    tensor_model_parallel_size: int = setting(1, "number of ranks that share each layer")
    pipeline_model_parallel_size: int = setting(1, "number of pipeline stages")
    sequence_parallel: bool = setting(
        False, "also split norms along the tokens; needs tensor parallelism"
    )
    micro_batch_tokens: int = setting(8192, "tokens per forward pass")

    def __post_init__(self) -> None:
        with Checks("model", self) as checks:
            checks.positive(
                "tensor_model_parallel_size",
                "pipeline_model_parallel_size",
                "micro_batch_tokens",
                "batch_invariant_rows",
            )
