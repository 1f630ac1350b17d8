"""Model weights into a distributed checkpoint, as megatron-core writes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as torch_checkpoint
from megatron.core.dist_checkpointing.core import (
    CheckpointingConfig,
    CheckpointingException,
    save_config,
)
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from nemo_aligner.checkpoint.weights.background import in_background
from nemo_aligner.checkpoint.weights.common import write_common
from nemo_aligner.checkpoint.weights.own_storage import InPlaceSavePlanner
from nemo_aligner.checkpoint.weights.private_names import rank_collectives, torch_tensors
from nemo_aligner.checkpoint.weights.tensor_store import ShardedStateDict, without_objects
from nemo_aligner.checkpoint.weights.torch_dist import TORCH_DIST
from nemo_aligner.errors import CheckpointError
from nemo_aligner.parallel.collectives import on_main
from nemo_aligner.parallel.host_copies import Wait, copy_beside
from nemo_aligner.parallel.host_memory import host_zeros

PLANNING = {"dedup_replicated_tensors": False, "flatten_state_dict": False}


class PendingSave:
    """Weights on their way into ``folder``: all ranks plan together, a thread of each writes.

    megatron-core's own background save starts a manager process and forks writers, which needs a
    ``__main__`` guard in every script and may hang after gloo's threads have run. Here collectives
    are made in the foreground alone, so no rank can meet another out of order: the thread writes
    and syncs this rank's file, and ``finish`` agrees on the outcome and writes the index.

    The tensors must stay as they are until ``is_written``. Nothing of them is read before
    ``arrived`` returns, which only the thread waits for.
    """

    def __init__(
        self,
        sharded_state_dict: ShardedStateDict,
        folder: Path,
        planner: MCoreSavePlanner | None = None,
        arrived: Wait | None = None,
    ) -> None:
        self._folder = folder
        self._arrived = arrived
        self._ranks = rank_collectives()
        # Nothing is copied ahead: that is for tensors on a GPU, and would wait for its kernels.
        self._writer = torch_checkpoint.FileSystemWriter(folder, per_thread_copy_ahead=0)
        self._planner = planner or InPlaceSavePlanner(**PLANNING)
        self._metadata: torch_checkpoint.Metadata | None = None
        with _as_checkpoint_error(folder):
            sharded, common = save_preprocess(without_objects(sharded_state_dict))
            on_main(lambda: write_common(common, folder))
            tensors = torch_tensors(sharded)
            plan = self._ranks.reduce_scatter("plan", lambda: self._plan(tensors), self._plan_all)
        self._written = in_background(partial(self._write, self._planner.finish_plan(plan)))

    @property
    def is_written(self) -> bool:
        """Whether this rank's file is on the disk, or could not be written."""
        return self._written.done()

    def finish(self) -> None:
        """Wait for all ranks' files and write the index; every rank calls it.

        Raises:
            CheckpointError: on every rank, if any could not write; it names the ranks.
        """
        with _as_checkpoint_error(self._folder):
            self._ranks.all_reduce("write", self._written.result, self._write_index)

    def _plan(self, tensors: dict[str, Any]) -> SavePlan:
        self._planner.set_up_planner(tensors, is_coordinator=self._ranks.is_coordinator)
        self._writer.set_up_storage_writer(self._ranks.is_coordinator)
        return self._writer.prepare_local_plan(self._planner.create_local_plan())

    def _plan_all(self, plans: list[SavePlan]) -> list[SavePlan]:
        plans, self._metadata = self._planner.create_global_plan(plans)
        return self._writer.prepare_global_plan(plans)

    def _write(self, plan: SavePlan) -> list[WriteResult]:
        if self._arrived is not None:
            self._arrived()
        return self._writer.write_data(plan, self._planner).value()

    def _write_index(self, written: list[list[WriteResult]]) -> None:
        assert self._metadata is not None
        self._writer.finish(self._metadata, written)
        save_config(CheckpointingConfig(TORCH_DIST, 1), str(self._folder))


def start_saving(
    sharded_state_dict: ShardedStateDict, folder: Path, arrived: Wait | None = None
) -> PendingSave:
    """Begin to write the tensors of ``sharded_state_dict`` into ``folder``; every rank calls it.

    ``folder`` is created and must be seen by all ranks. Of tensors that are still being copied
    ``arrived`` waits until they are there. Opaque objects (TransformerEngine's
    ``_extra_state``) are left out: they are pickles, and a reader must not load them.

    Raises:
        CheckpointError: on every rank, if it cannot be written to.
    """
    on_main(lambda: folder.mkdir(parents=True, exist_ok=True))
    return PendingSave(sharded_state_dict, folder, arrived=arrived)


def save_weights(
    sharded_state_dict: ShardedStateDict, folder: Path, arrived: Wait | None = None
) -> None:
    """``start_saving``, and wait until all is written."""
    start_saving(sharded_state_dict, folder, arrived).finish()


def copy_tensors(sharded_state_dict: ShardedStateDict, host: list[Tensor]) -> Wait:
    """Replace every tensor that this rank writes by a copy in host memory.

    ``host`` keeps the copies, as much memory as the tensors have; the next call with it and the
    same model writes into the same memory, which is a good deal faster than to ask for more.

    Returns:
        What waits until the copies are there, as ``copy_beside`` has it.
    """
    written = [
        entry
        for entry in nested_values(sharded_state_dict)
        # A factory is a tensor that is split when it is saved.
        if isinstance(entry, (ShardedTensor, ShardedTensorFactory))
        and is_main_replica(entry.replica_id)
    ]
    if not host:
        host += host_zeros([entry.data.detach() for entry in written])
    sources = [entry.data.detach() for entry in written]
    for entry, copy in zip(written, host, strict=True):
        entry.data = copy
    return copy_beside(zip(host, sources, strict=True))


@contextmanager
def _as_checkpoint_error(folder: Path) -> Iterator[None]:
    """torch gathers every rank's failure into one exception, which is not an ``Exception``."""
    try:
        yield
    except torch_checkpoint.CheckpointException as error:
        failures = [f"rank {rank}: {cause}" for rank, (cause, _) in error.failures.items()]
        raise CheckpointError(f"{folder}: {'; '.join(failures)}") from error
    except (OSError, CheckpointingException) as error:
        raise CheckpointError(f"{folder}: {error}") from error
