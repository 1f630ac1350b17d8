"""Parallel layout: the sizes of the parallel groups, and the rank of this process in each group."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

from nemo_aligner.utils.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LayoutSizes:
    """Sizes of the parallel groups, which planning and a dry run use without any process group.

    Attributes:
        tp: tensor parallel size.
        cp: context parallel size.
        pp: pipeline parallel size.
        dp: data parallel size.
        ep: expert parallel size: the experts of a mixture-of-experts model are sharded over this
            many of the data and context parallel ranks.
        sequence_parallel: the tensor parallel ranks also shard the activations between them.
        ring: context parallel ranks pass keys and values around in a ring instead of gathering
            all of them.
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
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments with which ``initialize_layout`` builds this layout.

        ``dp`` is not among them: it follows from the number of processes.
        """
        names = ("tp", "cp", "pp", "ep", "sequence_parallel", "ring")
        return {name: getattr(self, name) for name in names}

    def __str__(self) -> str:
        context = f" CP={self.cp}{'+ring' * self.ring}" if self.cp > 1 else ""
        experts = f" EP={self.ep}" if self.ep > 1 else ""
        tensor = f"TP={self.tp}{'+SP' * self.sequence_parallel}"
        return f"{tensor}{context} PP={self.pp} DP={self.dp}{experts}"


@dataclass(frozen=True, kw_only=True)
class ParallelLayout(LayoutSizes):
    """Sizes of the parallel groups, and the rank of this process in each group.

    ``initialize_layout`` returns it, after it has created Megatron's process groups. Planning and
    a dry run use ``LayoutSizes``, which needs no process groups.

    Attributes:
        tp_rank: rank in the tensor parallel group.
        pp_rank: rank in the pipeline parallel group, which is the number of the pipeline stage.
        dp_rank: rank in the data parallel group.
        cp_rank: rank in the context parallel group.
    """

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
    """Check the sizes of the parallel groups, and return the data parallel size.

    It is ``world_size / (tp * pp * cp)``.

    Raises:
        ConfigError: ``tp * pp * cp`` does not divide ``world_size``, ``ep`` does not divide
            ``dp * cp``, or sequence parallelism is on without tensor parallelism.
    """
    ranks_per_replica = tp * pp * cp
    if world_size % ranks_per_replica != 0:
        context = f" x model.context_parallel_size ({cp})" if cp > 1 else ""
        raise ConfigError(
            f"model.tensor_model_parallel_size ({tp}) x model.pipeline_model_parallel_size ({pp})"
            f"{context}: got {world_size} processes, wanted a multiple of {ranks_per_replica}, "
            f"e.g. --processes {ranks_per_replica}"
        )
    if sequence_parallel and tp == 1:
        raise ConfigError(
            "model.sequence_parallel: got true, wanted false with "
            "model.tensor_model_parallel_size=1. Set this size to 2 or more, or "
            "model.sequence_parallel=false"
        )
    dp = world_size // ranks_per_replica
    if dp * cp % ep != 0:
        raise ConfigError(
            f"model.expert_model_parallel_size: got {ep}, wanted a divisor of {dp * cp}, which is "
            f"the number of data and context parallel ranks with {world_size} processes. Change "
            "this size, or start another number of processes, e.g. --processes "
            f"{tp * pp * math.lcm(cp, ep)}"
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
    """Build Megatron's process groups over all ranks, and seed its random generators.

    torch.distributed must be initialised. ``LayoutSizes`` describes the sizes; the data parallel
    size follows from them and the number of ranks.
    """
    # Imported here, so that planning a layout does not need torch.
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    dp = check_sizes(dist.get_world_size(), tp, pp, sequence_parallel, ep, cp)
    parallel_state.initialize_model_parallel(
        tp, pp, context_parallel_size=cp, expert_model_parallel_size=ep
    )
    if pp > 1 and torch.cuda.is_available():
        # Create the communicator of the pipeline group now. NCCL needs a collective of all ranks
        # for this, but a pipeline starts with messages between two ranks.
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
    """Destroy Megatron's process groups, if any, so that new ones can be built."""
    # Do not import megatron-core here: if it is not loaded, there are no groups to destroy.
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    if parallel_state is not None:
        parallel_state.destroy_model_parallel()
