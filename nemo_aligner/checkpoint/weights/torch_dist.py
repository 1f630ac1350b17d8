"""Model weights in and out of a distributed checkpoint, through megatron-core."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import (
    CheckpointingConfig,
    CheckpointingException,
    save_config,
)
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factory_merges,
    is_main_replica,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess, save_preprocess
from megatron.core.dist_checkpointing.strategies.common import TorchCommonSaveStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from nemo_aligner.checkpoint.untrusted import read_json
from nemo_aligner.checkpoint.weights import index as safe_metadata
from nemo_aligner.checkpoint.weights import zarr as zarr_weights
from nemo_aligner.checkpoint.weights.background import in_background
from nemo_aligner.checkpoint.weights.index import read_metadata
from nemo_aligner.errors import CheckpointError
from nemo_aligner.parallel.collectives import gather_objects, on_main

ShardedStateDict = dict[str, Any]
PLANNING = {"dedup_replicated_tensors": False, "flatten_state_dict": False}
_FORMAT = "torch_dist"
ZARR = "zarr"
_SHOWN_KEYS = 5


class PendingSave:
    """Weights on their way into ``folder``: all ranks plan together, a thread of each writes.

    megatron-core's own background save starts a manager process and forks writers, which needs a
    ``__main__`` guard in every script and may hang after gloo's threads have run. Here collectives
    are made in the foreground alone, so no rank can meet another out of order: the thread writes
    and syncs this rank's file, and ``finish`` agrees on the outcome and writes the index.

    The tensors must stay as they are until ``is_written``.
    """

    def __init__(
        self,
        sharded_state_dict: ShardedStateDict,
        folder: Path,
        planner: MCoreSavePlanner | None = None,
    ) -> None:
        self._folder = folder
        self._ranks = _DistWrapper(None, use_dist=True, coordinator_rank=0)
        # Nothing is copied ahead: that is for tensors on a GPU, and would wait for its kernels.
        self._writer = torch_checkpoint.FileSystemWriter(folder, per_thread_copy_ahead=0)
        self._planner = planner or MCoreSavePlanner(**PLANNING)
        self._metadata: torch_checkpoint.Metadata | None = None
        with _as_checkpoint_error(folder):
            sharded, common = save_preprocess(_without_objects(sharded_state_dict))
            on_main(lambda: TorchCommonSaveStrategy("torch", 1).save_common(common, folder))
            grouped, _, _ = _replace_state_dict_keys_with_sharded_keys(
                sharded, keep_only_main_replica=True
            )
            tensors = mcore_to_pyt_state_dict(grouped)
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
        return self._writer.write_data(plan, self._planner).value()

    def _write_index(self, written: list[list[WriteResult]]) -> None:
        assert self._metadata is not None
        self._writer.finish(self._metadata, written)
        save_config(CheckpointingConfig(_FORMAT, 1), str(self._folder))


def start_saving(sharded_state_dict: ShardedStateDict, folder: Path) -> PendingSave:
    """Begin to write the tensors of ``sharded_state_dict`` into ``folder``; every rank calls it.

    ``folder`` is created and must be seen by all ranks. Opaque objects (TransformerEngine's
    ``_extra_state``) are left out: they are pickles, and a reader must not load them.

    Raises:
        CheckpointError: on every rank, if it cannot be written to.
    """
    on_main(lambda: folder.mkdir(parents=True, exist_ok=True))
    return PendingSave(sharded_state_dict, folder)


def save_weights(sharded_state_dict: ShardedStateDict, folder: Path) -> None:
    """``start_saving``, and wait until all is written."""
    start_saving(sharded_state_dict, folder).finish()


def copy_tensors(sharded_state_dict: ShardedStateDict, host: dict[int, Tensor]) -> None:
    """Put a copy in host memory in the place of every tensor that this rank writes.

    ``host`` keeps the copies, as much memory as the tensors have; the next call with it and the
    same model writes into the same memory, which is a good deal faster than to ask for more.
    """
    for place, entry in enumerate(nested_values(sharded_state_dict)):
        # A factory is a tensor that is split when it is saved.
        is_tensor = isinstance(entry, (ShardedTensor, ShardedTensorFactory))
        if is_tensor and is_main_replica(entry.replica_id):
            if place not in host:
                host[place] = torch.empty_like(entry.data, device="cpu", requires_grad=False)
            entry.data = host[place].copy_(entry.data.detach())


def load_weights(sharded_state_dict: ShardedStateDict, folder: Path) -> dict[str, Any]:
    """Fill ``sharded_state_dict`` from ``folder`` and give it back as a plain state dict.

    Every rank calls it. The tensors keep the dtype and device that they have; ``ShardedObject``
    entries are left out, and what is not in tensors (``common.pt``) comes along.

    Raises:
        CheckpointError: on every rank, if any rank misses a tensor, finds another shape, or finds
            something in ``folder`` that would run as code; or if the data is damaged.
    """
    request = _without_objects(sharded_state_dict)
    _raise_everywhere(lambda: _check(request, folder, with_common=True))
    with _as_checkpoint_error(folder):
        return dist_checkpointing.load(request, str(folder))


def load_tensors(sharded_state_dict: ShardedStateDict, folder: Path) -> dict[str, Any]:
    """``load_weights`` of the tensors alone; ``common.pt`` is not opened, and zarr is read, too."""
    request = _without_objects(sharded_state_dict)
    _raise_everywhere(lambda: _check(request, folder, with_common=False))
    tensors, _, factories = load_preprocess(request)
    with _as_checkpoint_error(folder):
        if read_format(folder) == ZARR:
            loaded = zarr_weights.load(tensors, folder)
        else:
            loaded = TorchDistLoadShardedStrategy().load(tensors, folder)
    return apply_factory_merges(loaded, factories)


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


def _without_objects(sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
    _, kept = extract_matching_values(
        sharded_state_dict, lambda value: isinstance(value, ShardedObject)
    )
    return kept


def _check(request: ShardedStateDict, folder: Path, *, with_common: bool) -> None:
    check_format(folder, with_common=with_common)
    wanted, _, _ = load_preprocess(request)
    _check_tensors(nested_values(wanted), folder)


def _raise_everywhere(check: Callable[[], None]) -> None:
    try:
        check()
        problem = None
    except CheckpointError as error:
        problem = str(error)
    for found in gather_objects(problem):
        if found is not None:
            raise CheckpointError(found)


def read_format(folder: Path) -> str:
    """``torch_dist`` or ``zarr``: how megatron-core wrote the checkpoint in ``folder``.

    Raises:
        CheckpointError: it is another format, or no distributed checkpoint.
    """
    path = folder / "metadata.json"
    backend = read_json(path, str(path)).get("sharded_backend")
    if backend not in (_FORMAT, ZARR):
        raise CheckpointError(f"{path}: got the format {backend!r}, wanted {_FORMAT!r}")
    return backend


def check_format(folder: Path, *, with_common: bool = True) -> None:
    """Refuse a ``folder`` that is not a distributed checkpoint with a harmless index.

    With ``common.pt`` it has to be torch_dist, and that file plain data.
    """
    if read_format(folder) == ZARR and not with_common:
        return
    read_metadata(folder)
    if with_common:
        read_common(folder)


def read_common(folder: Path) -> dict[str, Any]:
    """``common.pt``: what a checkpoint holds beside tensors, as plain data.

    megatron-core's list of harmless classes counts as plain, ``argparse.Namespace`` among them.
    """
    common = folder / "common.pt"
    try:
        return torch.load(common, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{common}: refused or unreadable: {error}") from error


def check_data(folder: Path, *, read: bool) -> None:
    """Find what is missing of the stored weights; ``read`` them once to find what is damaged.

    Raises:
        CheckpointError: a piece is missing, of another size, or damaged.
    """
    if read_format(folder) == ZARR:
        zarr_weights.check_data(folder)
    else:
        safe_metadata.check_data(folder, read=read)


def stored_tensors(folder: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name -> (global shape, dtype) of every tensor in a distributed checkpoint."""
    if read_format(folder) == ZARR:
        return zarr_weights.stored_tensors(folder)
    return safe_metadata.stored_tensors(folder)


def _check_tensors(wanted: Iterable[Any], folder: Path) -> None:
    stored = stored_tensors(folder)
    tensors = [value for value in wanted if isinstance(value, ShardedTensor)]
    missing = sorted({tensor.key for tensor in tensors if tensor.key not in stored})
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} tensors are missing: {_some(missing)}; "
            f"it holds {len(stored)}: {_some(sorted(stored))}"
        )
    for tensor in tensors:
        got, wanted_shape = stored[tensor.key][0], tuple(tensor.global_shape)
        first = int(tensor.allow_shape_mismatch)  # a padded vocabulary may differ in its rows
        if len(got) != len(wanted_shape) or got[first:] != wanted_shape[first:]:
            raise CheckpointError(
                f"{folder}: {tensor.key}: got shape {list(got)}, wanted {list(wanted_shape)}"
            )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN_KEYS} more" if len(names) > _SHOWN_KEYS else ""
    return ", ".join(names[:_SHOWN_KEYS]) + more
