"""ParallelLayout: sizes of the parallel groups, and this rank's place in them."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from nemo_aligner.utils.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LayoutSizes:
    """Sizes of the tensor, context, pipeline and data parallel groups.

    Groups of ``ep`` data and context parallel ranks share the experts of a mixture. Keys and values
    go round context parallel ranks in a ``ring``, or are gathered.
    """

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    ring: bool = False

    @property
    def num_ranks(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def given(self) -> dict[str, Any]:
        """Arguments of ``initialize_layout``, which computes ``dp``."""
        names = ("tp", "cp", "pp", "ep", "sequence_parallel", "ring")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        context = f" CP={self.cp}{'+ring' * self.ring}" if self.cp > 1 else ""
        experts = f" EP={self.ep}" if self.ep > 1 else ""
        tensor = f"TP={self.tp}{'+SP' * self.sequence_parallel}"
        return f"{tensor}{context} PP={self.pp} DP={self.dp}{experts}"


@dataclass(frozen=True, kw_only=True)
class ParallelLayout(LayoutSizes):
    """Group sizes, and this rank's index in each group."""

    tp_rank: int
    pp_rank: int
    dp_rank: int
    cp_rank: int = 0

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp - 1


def check_sizes(
    world_size: int, tp: int, pp: int, sequence_parallel: bool, ep: int = 1, cp: int = 1
) -> int:
    """Compute the data parallel size that ``world_size`` leaves.

    Raises:
        ConfigError: ``tp * pp * cp`` does not divide ``world_size``, ``ep`` not what ``tp * pp``
            leaves, or sequence parallel without TP.
    """
    least = tp * pp * cp
    if world_size % least != 0:
        context = f" x model.context_parallel_size ({cp})" if cp > 1 else ""
        raise ConfigError(
            f"model.tensor_model_parallel_size ({tp}) x model.pipeline_model_parallel_size ({pp})"
            f"{context}: got {world_size} processes, wanted a multiple of {least}, as "
            f"--processes {least}"
        )
    if sequence_parallel and tp == 1:
        raise ConfigError(
            "model.sequence_parallel: got true with model.tensor_model_parallel_size 1, "
            "wanted 2 or more"
        )
    dp = world_size // least
    if dp * cp % ep != 0:
        raise ConfigError(
            f"model.expert_model_parallel_size: got {ep}, wanted a divisor of the {dp * cp} data "
            f"parallel ranks that {world_size} processes leave, as --processes {tp * pp * ep}"
        )
    return dp


def initialize_layout(
    tp: int = 1,
    pp: int = 1,
    sequence_parallel: bool = False,
    seed: int = 1234,
    ep: int = 1,
    cp: int = 1,
    ring: bool = False,
) -> ParallelLayout:
    """Build Megatron's process groups over the initialised world, and seed its generators."""
    # Imported here, because planning a layout needs no torch.
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    dp = check_sizes(dist.get_world_size(), tp, pp, sequence_parallel, ep, cp)
    parallel_state.initialize_model_parallel(
        tp, pp, context_parallel_size=cp, expert_model_parallel_size=ep
    )
    if pp > 1 and torch.cuda.is_available():
        # NCCL makes a group's communicator in the first call of all its ranks, and a pipeline
        # begins with messages between two.
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        dist.all_reduce(torch.zeros(1, device="cuda"), group=pipeline)
    model_parallel_cuda_manual_seed(seed)
    return ParallelLayout(
        tp=tp,
        cp=cp,
        pp=pp,
        dp=dp,
        ep=ep,
        sequence_parallel=sequence_parallel,
        ring=ring,
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
    )


def destroy_layout() -> None:
    """Destroy Megatron's process groups, if any, so that others can be built in this process."""
    # Not imported: where nothing was built, megatron-core need not be loaded either.
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None:
        parallel_state.destroy_model_parallel()
