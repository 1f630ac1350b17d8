"""Settings of a finished reward model's layout."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_aligner.config.common import Checks, setting

BATCH_INVARIANT_ROWS = 256


@dataclass
class InvarianceConfig:
    """Whether a reward depends on what is scored beside it; validation and critics, too."""

    batch_invariant: bool = setting(True, "a reward has the same bits alone and in any company")
    batch_invariant_rows: int = setting(
        BATCH_INVARIANT_ROWS, "rows of its matrix products; CPUs also use others of the same bits"
    )

    @property
    def invariant_rows(self) -> int | None:
        """``batch_invariant_rows`` where rewards are to be batch invariant."""
        return self.batch_invariant_rows if self.batch_invariant else None


@dataclass
class ScorerModelConfig(InvarianceConfig):
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
                "batch_invariant_rows",
            )
