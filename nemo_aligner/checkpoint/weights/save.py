"""Saving of distributed checkpoints: sharded, in the background, or one tensor at a time."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
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
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper

from nemo_aligner.checkpoint.decoder_tensors import HEAD_PREFIX
from nemo_aligner.checkpoint.weights.store import (
    TORCH_DIST,
    ShardedStateDict,
    check_finite,
    without_objects,
    write_common,
)
from nemo_aligner.checkpoint.weights.sums import WeightSums, add_shard, merge_sums
from nemo_aligner.distributed.collectives import gather_objects, on_main
from nemo_aligner.models.shape import is_of_adapter
from nemo_aligner.utils.errors import CheckpointError
from nemo_aligner.utils.host_transfer import Wait, host_zeros, start_host_copies
from nemo_aligner.utils.writing import is_disk_full, write_problem

# Sharded saves, in megatron-core's format.

# As in megatron-core's own save: keys are flat already, and replicas are dropped beforehand.
PLANNING = {"dedup_replicated_tensors": False, "flatten_state_dict": False}


class PendingSave:
    """A save in progress: all ranks plan together, then a thread of each writes its file.

    megatron-core's own background save starts a manager process and forks writers, which needs a
    ``__main__`` guard in every script and may hang after gloo's threads have run. Here all
    collectives run in the foreground, so ranks cannot meet them in different orders: the thread
    only writes and syncs this rank's file, and ``finish`` agrees on the outcome and writes the
    index.

    The tensors must not change until ``is_written``. Opaque objects (TransformerEngine's
    ``_extra_state``) are left out: they are pickles, which a reader must not load.
    """

    def __init__(
        self,
        sharded_state_dict: ShardedStateDict,
        folder: Path,
        arrived: Wait | None = None,
        planner: MCoreSavePlanner | None = None,
    ) -> None:
        """Begin to write into ``folder``, which every rank must see; collective.

        ``arrived`` waits for tensors that are still being copied; the thread calls it first.

        Raises:
            CheckpointError: on every rank, if the folder cannot be written to.
        """
        on_main(lambda: folder.mkdir(parents=True, exist_ok=True))
        self._folder = folder
        self._arrived = arrived
        # Planning collectives of torch's own save; an error on one rank is raised on each.
        self._ranks = _DistWrapper(None, use_dist=True, coordinator_rank=0)
        # No staging copy: that is for tensors on a GPU, and would wait for its kernels.
        self._writer = torch_checkpoint.FileSystemWriter(folder, per_thread_copy_ahead=0)
        self._planner = planner or InPlaceSavePlanner(**PLANNING)
        self._metadata: torch_checkpoint.Metadata | None = None
        with _as_checkpoint_error(folder):
            sharded, common = save_preprocess(without_objects(sharded_state_dict))
            on_main(lambda: write_common(common, folder))
            tensors = _torch_tensors(sharded)
            plan = self._ranks.reduce_scatter("plan", lambda: self._plan(tensors), self._plan_all)
        # From here on nothing is collective until finish().
        self._written = in_background(partial(self._write, self._planner.finish_plan(plan)))

    @property
    def is_written(self) -> bool:
        """True if this rank's file is on disk, or has failed."""
        return self._written.done()

    def finish(self) -> None:
        """Wait for all ranks' files and write the index; collective.

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
        # metadata.json, by which a reader tells the format.
        save_config(CheckpointingConfig(TORCH_DIST, 1), str(self._folder))


def _torch_tensors(sharded_state_dict: ShardedStateDict) -> dict[str, Any]:
    """Flatten a sharded state dict to this rank's tensors by stored key, for torch's planner.

    megatron-core does this inside its own save, which would also start writer processes.
    """
    grouped, _, _ = _replace_state_dict_keys_with_sharded_keys(
        sharded_state_dict, keep_only_main_replica=True
    )
    return mcore_to_pyt_state_dict(grouped)


def save_weights(
    sharded_state_dict: ShardedStateDict, folder: Path, arrived: Wait | None = None
) -> WeightSums:
    """Save and wait until all is written; see ``PendingSave``. Returns the sums on every rank."""
    return _save_and_sum(sharded_state_dict, folder, InPlaceSavePlanner(**PLANNING), arrived)


def _save_and_sum(
    sharded_state_dict: ShardedStateDict,
    folder: Path,
    planner: SummingPlanner,
    arrived: Wait | None = None,
) -> WeightSums:
    planner.sums = {}
    PendingSave(sharded_state_dict, folder, arrived, planner).finish()
    return merge_sums(gather_objects(planner.sums))


def copy_tensors(sharded_state_dict: ShardedStateDict, host: list[Tensor]) -> Wait:
    """Replace every tensor that this rank writes by a copy in host memory.

    Args:
        host: keeps the copies, as much memory as the tensors have. The next call with it and the
            same model reuses that memory, which is much faster than allocating.

    Returns:
        A function that waits for the copies, see ``start_host_copies``.
    """
    written = [
        entry
        for entry in nested_values(sharded_state_dict)
        # A ShardedTensorFactory holds one tensor, which is split when it is saved.
        if isinstance(entry, (ShardedTensor, ShardedTensorFactory))
        and is_main_replica(entry.replica_id)
    ]
    # The first save pays for the pages; later ones find them in the same order.
    if not host:
        host += host_zeros([entry.data.detach() for entry in written])
    sources = [entry.data.detach() for entry in written]
    for entry, copy in zip(written, host, strict=True):
        entry.data = copy
    return start_host_copies(zip(host, sources, strict=True))


@contextmanager
def _as_checkpoint_error(folder: Path) -> Iterator[None]:
    """Convert torch's CheckpointException, which is not an ``Exception``, and OSError."""
    try:
        yield
    except torch_checkpoint.CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, CheckpointError):  # it says all there is to say
                raise CheckpointError(str(cause)) from error
        problems: dict[str, list[int]] = {}
        for rank, (cause, _) in error.failures.items():
            problems.setdefault(write_problem(folder, cause), []).append(rank)
        # Most often all ranks meet the same.
        failures = "; ".join(
            f"rank {', '.join(map(str, ranks))}: {problem}" for problem, ranks in problems.items()
        )
        if dist.get_world_size() == 1:
            (failures,) = problems
        raise CheckpointError(f"{folder}: cannot be written: {failures}") from error
    except (OSError, CheckpointingException, RuntimeError) as error:
        # Out of memory and a lost rank are RuntimeErrors, too, and no fault of the disk.
        if isinstance(error, RuntimeError) and not is_disk_full(error):
            raise
        problem = write_problem(folder, error)
        raise CheckpointError(f"{folder}: cannot be written: {problem}") from error


# Zero-copy saves.


class SummingPlanner(MCoreSavePlanner):
    """megatron-core's planner, which adds each shard to ``sums`` on its way to the writer.

    A training run's checkpoints, where ``sums`` is None, need none.
    """

    sums: WeightSums | None = None

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        data = super().resolve_data(write_item)
        if self.sums is not None and isinstance(data, Tensor):
            assert write_item.tensor_data is not None, write_item.index
            chunk = write_item.tensor_data.chunk
            add_shard(self.sums, write_item.index.fqn, data.view(chunk.sizes), chunk.offsets)
        return data


class InPlaceSavePlanner(SummingPlanner):
    """megatron-core's planner, handing the writer tensors that it need not clone.

    torch's ``FileSystemWriter`` clones every tensor that is part of a larger storage, and holds all
    clones until its file is written: as much again as the optimizer's flat state.
    """

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        data = super().resolve_data(write_item)
        return zero_copy_slice(data) if isinstance(data, Tensor) else data


def zero_copy_slice(tensor: Tensor) -> Tensor:
    """View the same memory as a tensor whose storage holds nothing else.

    Returns ``tensor`` itself if it is one already, or if there can be none: on a GPU, or strided.
    """
    is_part = tensor.untyped_storage().size() != tensor.nbytes
    if not is_part or not tensor.is_cpu or not tensor.is_contiguous():
        return tensor
    # As bytes, because numpy lacks bf16. A tensor from an array has a storage of its bytes only.
    content = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return torch.from_numpy(content).view(tensor.dtype).view(tensor.shape)


T = TypeVar("T")


def in_background(function: Callable[[], T]) -> Future[T]:
    """Run ``function`` in a thread of its own, which is joined when the process ends.

    It must not call collectives: their order relative to the foreground's would differ by rank.
    """
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
    future = executor.submit(function)
    # Takes no more work, and ends its thread after this one.
    executor.shutdown(wait=False)
    return future


# Lazy tensors, written one at a time by conversions.


@dataclass(frozen=True)
class LazyTensor:
    """A tensor of known ``shape`` and ``dtype`` that ``read`` loads into memory.

    ``read_part`` loads one of its first axis, where that can be had alone.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    read_part: Callable[[int], Tensor] | None = None

    def outline(self) -> Tensor:
        """Equivalent tensor on torch's meta device."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def dtype_of_matrices(tensors: Iterable[LazyTensor]) -> torch.dtype:
    """Promote the dtypes of all matrices; norms and biases do not count."""
    # Norms are often fp32 beside bf16 matrices, and would make the whole archive fp32.
    dtypes = {tensor.dtype for tensor in tensors if len(tensor.shape) > 1}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


class _ReadingPlanner(SummingPlanner):
    """Planner of meta tensors, each of which is read when it is written."""

    def __init__(self, tensors: Mapping[tuple[str, tuple[int, ...]], LazyTensor]) -> None:
        super().__init__(**PLANNING)
        self._tensors = tensors

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None, index
        tensor = self._tensors[index.fqn, tuple(index.offset)]
        data = tensor.read()
        assert (tuple(data.shape), data.dtype) == (tensor.shape, tensor.dtype), index
        # A sum, or a conversion to fp16, may overflow.
        check_finite(data, f"{index.fqn}, from {list(index.offset)} on")
        # A key that stacks all layers has one axis more in the file.
        return data.view((1,) * (len(index.offset) - data.dim()) + data.shape)


def save_lazy(
    tensors: Mapping[str, LazyTensor],
    layers: Mapping[str, Sequence[LazyTensor]],
    folder: Path,
) -> WeightSums:
    """Write ``tensors``, and ``layers`` stacked under one key each, reading one after the other.

    One process calls it, with torch.distributed initialised. torch's writer keeps the last tensor
    of every key, so that peak memory is ``tensors`` and two layers. Returns the sums.
    """
    request: dict[str, Any] = {}
    unread = {}
    for key, tensor in tensors.items():
        request[key] = ShardedTensor.from_rank_offsets(key, tensor.outline())
        # The planner asks for a shard by its key and offsets alone.
        unread[key, (0,) * len(tensor.shape)] = tensor
    for key, stack in layers.items():
        for number, tensor in enumerate(stack):
            request[f"{number}.{key}"] = ShardedTensor.from_rank_offsets(
                key, tensor.outline(), (0, number, len(stack)), prepend_axis_num=1
            )
            unread[key, (number, *(0,) * len(tensor.shape))] = tensor
    return _save_and_sum(request, folder, _ReadingPlanner(unread))


# A training run's weights: the whole model, or with LoRA only what is trained.

_PREFIX = "model."
# Layers have keys of their own here instead of one stacked tensor: frozen layers have no optimizer
# state, and a stack with holes cannot be saved.
_PER_LAYER = {"non_homogeneous_layers": True}


class ShardedModel(Protocol):
    """Interface of a Megatron module that is saved."""

    def sharded_state_dict(
        self, prefix: str = ..., sharded_offsets: tuple = ..., metadata: dict | None = ...
    ) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = ...) -> Any: ...


def sharded_weights(model: ShardedModel) -> dict[str, Any]:
    """Sharded state dict of the parts of ``model`` that a run's checkpoint holds.

    With adapters it leaves out the frozen weights, which are the pretrained checkpoint's.
    """
    entries = model.sharded_state_dict(prefix=_PREFIX, metadata=dict(_PER_LAYER))
    if not any(map(is_of_adapter, entries)):
        return entries
    return {key: entry for key, entry in entries.items() if is_of_adapter(key) or _is_head(key)}


def put_weights(model: ShardedModel, state: Mapping[str, Any], path: Path) -> None:
    """Load into the model what was read for ``sharded_weights``."""
    plain = {key.removeprefix(_PREFIX): value for key, value in state.items()}
    has_adapters = any(map(is_of_adapter, plain))

    def is_frozen(key: str) -> bool:
        return has_adapters and not (is_of_adapter(key) or _is_head(key))

    load_into(model, plain, path, is_frozen)


def load_into(
    model: ShardedModel,
    state: Mapping[str, Any],
    source: Path,
    may_lack: Callable[[str], bool],
) -> None:
    """Load a plain state dict; an error names the tensors that are missing or unexpected.

    TransformerEngine's opaque ``_extra_state`` is never saved, so it is never missed.
    """
    missing, unexpected = model.load_state_dict(state, strict=False)
    lost = [key for key in missing if "_extra_state" not in key and not may_lack(key)]
    if lost or unexpected:
        raise CheckpointError(f"{source}: not loaded: {', '.join([*lost, *unexpected])}")


def frozen_digest(model: ShardedModel) -> str:
    """Digest the frozen weights beside adapters, the same at any layout; collective.

    A sum over all tensors of their bits, weighted by their names. Zero rows, which pad a
    vocabulary, add nothing.
    """
    entries = model.sharded_state_dict(prefix=_PREFIX, metadata=dict(_PER_LAYER))
    total = 0
    for name, entry in entries.items():
        is_tensor = isinstance(entry, ShardedTensor | ShardedTensorFactory)
        is_trained = is_of_adapter(name) or _is_head(name)
        # One replica of each shard is summed, so the layout cannot matter.
        if is_tensor and not is_trained and is_main_replica(entry.replica_id):
            total += zlib.crc32(entry.key.encode()) * _sum_of_bits(entry.data.detach())
    return f"{sum(gather_objects(total)) % 2**64:016x}"


def _sum_of_bits(values: Tensor) -> int:
    # As integers, so that the sum is exact in any order.
    integers = {2: torch.int16, 4: torch.int32}[values.element_size()]
    return int(values.view(integers).sum(dtype=torch.int64))


def _is_head(key: str) -> bool:
    return key.removeprefix(_PREFIX).startswith(HEAD_PREFIX)
