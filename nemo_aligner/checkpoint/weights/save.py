"""Save distributed checkpoints: sharded, in the background, or one tensor at a time.

This module also decides which weights of a model the checkpoint of a training run holds.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
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
from nemo_aligner.distributed.collectives import gather_objects, on_main, run_on_some
from nemo_aligner.models.quantized_layers import is_outline, read_outline
from nemo_aligner.models.shapes.lora import is_of_adapter
from nemo_aligner.utils.errors import CheckpointError
from nemo_aligner.utils.host_transfer import Wait, host_zeros, start_host_copies
from nemo_aligner.utils.writing import is_disk_full, write_problem

# The first part saves sharded models, in megatron-core's format.

# Options of torch's planner, as in megatron-core's save. Removing replicas and flattening are
# switched off, because ``_torch_tensors`` has done both.
PLANNING = {"dedup_replicated_tensors": False, "flatten_state_dict": False}


class PendingSave:
    """A save in progress: all ranks plan together, then a thread of each rank writes its file.

    megatron-core's own background save starts a manager process and forks writers. That needs a
    ``__main__`` guard in every script, and may hang after gloo's threads have run. Here all
    collectives run in the foreground, so all ranks call them in the same order. The thread only
    writes and syncs this rank's file; ``finish`` agrees on the outcome and writes the index.

    The tensors must not change until ``is_written``. Opaque objects (TransformerEngine's
    ``_extra_state``) are not saved, because they are pickles, which a reader must not load.
    """

    def __init__(
        self,
        sharded_state_dict: ShardedStateDict,
        folder: Path,
        arrived: Wait | None = None,
        planner: MCoreSavePlanner | None = None,
    ) -> None:
        """Begin to write into ``folder``, which all ranks share; collective.

        Args:
            arrived: function that waits for tensors that are still being copied to the host; the
                thread calls it before it writes.
            planner: chooses the tensors to write; None uses ``InPlaceSavePlanner``.

        Raises:
            CheckpointError: on every rank, if the folder cannot be written to.
        """
        on_main(lambda: folder.mkdir(parents=True, exist_ok=True))
        self._folder = folder
        self._arrived = arrived
        # torch's collectives for planning a save; an error on one rank is raised on every rank.
        self._ranks = _DistWrapper(None, use_dist=True, coordinator_rank=0)
        # per_thread_copy_ahead=0 switches off torch's staging copy. The tensors are in host memory
        # already, and the copy would wait for the GPU's kernels.
        self._writer = torch_checkpoint.FileSystemWriter(folder, per_thread_copy_ahead=0)
        self._planner = planner or InPlaceSavePlanner(**PLANNING)
        self._metadata: torch_checkpoint.Metadata | None = None
        with _as_checkpoint_error(folder):
            sharded, common = save_preprocess(without_objects(sharded_state_dict))
            on_main(lambda: write_common(common, folder))
            tensors = _torch_tensors(sharded)
            plan = self._ranks.reduce_scatter("plan", lambda: self._plan(tensors), self._plan_all)
        # This rank calls no collectives until finish(), so the thread's write cannot mix with them.
        self._written = in_background(partial(self._write, self._planner.finish_plan(plan)))

    @property
    def is_written(self) -> bool:
        """True if this rank's file is on disk, or if writing it failed."""
        return self._written.done()

    def finish(self) -> None:
        """Wait for all ranks' files and write the index; collective.

        Raises:
            CheckpointError: on every rank, if any rank could not write its file; the message names
                those ranks.
        """
        # A slow disk may take longer than the time limit of the collective in which ranks agree.
        run_on_some(None if self.is_written else self._wait_until_written)
        with _as_checkpoint_error(self._folder):
            self._ranks.all_reduce("write", self._written.result, self._write_index)

    def _wait_until_written(self) -> None:
        wait([self._written])

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
        # save_config writes metadata.json, from which a reader learns the format.
        save_config(CheckpointingConfig(TORCH_DIST, 1), str(self._folder))


def _torch_tensors(sharded_state_dict: ShardedStateDict) -> dict[str, Any]:
    """Flatten a sharded state dict to this rank's tensors by stored key, for torch's planner.

    It calls two private functions of megatron-core's save, because the complete save would start
    writer processes.
    """
    grouped, _, _ = _replace_state_dict_keys_with_sharded_keys(
        sharded_state_dict, keep_only_main_replica=True
    )
    return mcore_to_pyt_state_dict(grouped)


def save_weights(
    sharded_state_dict: ShardedStateDict, folder: Path, arrived: Wait | None = None
) -> WeightSums:
    """Save a sharded state dict, and wait until all ranks have written their files; collective.

    Args:
        arrived: function that waits for tensors that are still being copied to the host; None if
            there are none.

    Returns:
        The checksums of all weights (``weights.sums``), on every rank.
    """
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
        host: list that keeps the copies; empty at the first call. The next call with the same list
            and model reuses that memory, which is much faster than allocating it again.

    Returns:
        A function that waits until all copies have finished.
    """
    entries = [
        entry
        for entry in nested_values(sharded_state_dict)
        # A ShardedTensorFactory also holds one tensor, which megatron-core splits when it is saved.
        if isinstance(entry, (ShardedTensor, ShardedTensorFactory))
        and is_main_replica(entry.replica_id)
    ]
    # The first call allocates host memory. Later calls reuse it, because the tensors come in the
    # same order.
    if not host:
        host += host_zeros([entry.data.detach() for entry in entries])
    sources = [entry.data.detach() for entry in entries]
    for entry, copy in zip(entries, host, strict=True):
        entry.data = copy
    return start_host_copies(zip(host, sources, strict=True))


def fill_outlines(sharded_state_dict: ShardedStateDict, scratch: Path) -> None:
    """Replace each quantized weight that this rank writes by its dequantized values.

    They are in a new file in the folder ``scratch``, because memory may not have room for them.
    """
    entries = [
        entry
        for entry in nested_values(sharded_state_dict)
        if isinstance(entry, (ShardedTensor, ShardedTensorFactory))
        and is_main_replica(entry.replica_id)
        and is_outline(entry.data)
    ]
    if not entries:
        return
    dtype, count = entries[0].data.dtype, sum(entry.data.numel() for entry in entries)
    file = scratch / f"dequantized.{dist.get_rank()}"
    values = torch.from_file(str(file), shared=True, size=count, dtype=dtype)
    parts = values.split([entry.data.numel() for entry in entries])
    for entry, part in zip(entries, parts, strict=True):
        part = part.view(entry.data.shape)
        part.copy_(read_outline(entry.data))
        entry.data = part


@contextmanager
def _as_checkpoint_error(folder: Path) -> Iterator[None]:
    """Convert an OSError, or torch's CheckpointException, in the block to a CheckpointError.

    torch's CheckpointException is not an ``Exception``, so callers would not catch it.
    """
    try:
        yield
    except torch_checkpoint.CheckpointException as error:
        for cause, _ in error.failures.values():
            if isinstance(cause, CheckpointError):  # it has a complete message already
                raise CheckpointError(str(cause)) from error
        problems: dict[str, list[int]] = {}
        for rank, (cause, _) in error.failures.items():
            problems.setdefault(write_problem(folder, cause), []).append(rank)
        # Group the ranks by problem, because often all of them have the same one.
        failures = "; ".join(
            f"rank {', '.join(map(str, ranks))}: {problem}" for problem, ranks in problems.items()
        )
        if dist.get_world_size() == 1:
            (failures,) = problems
        raise CheckpointError(f"{folder}: cannot be written: {failures}") from error
    except (OSError, CheckpointingException, RuntimeError) as error:
        # Raise other RuntimeErrors (e.g. a lost rank) unchanged; only a full disk is a problem of
        # writing.
        if isinstance(error, RuntimeError) and not is_disk_full(error):
            raise
        problem = write_problem(folder, error)
        raise CheckpointError(f"{folder}: cannot be written: {problem}") from error


# The planners below pass tensors to torch's writer without cloning them.


class SummingPlanner(MCoreSavePlanner):
    """megatron-core's planner, which also adds each shard to ``sums`` before it is written.

    The checkpoints of a training run need no checksums of the weights; their ``sums`` stays None.
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
    """megatron-core's planner, passing tensors in a form that torch's writer does not clone.

    torch's ``FileSystemWriter`` clones every tensor that is a part of a larger storage, and keeps
    all clones until its file is written. For the optimizer's flat state that would double the
    memory.
    """

    def resolve_data(self, write_item: WriteItem) -> Tensor | BytesIO:
        data = super().resolve_data(write_item)
        return zero_copy_slice(data) if isinstance(data, Tensor) else data


def zero_copy_slice(tensor: Tensor) -> Tensor:
    """Return a view of ``tensor`` whose storage has only the elements of ``tensor``.

    Return ``tensor`` itself if its storage already has nothing else, or if such a view is not
    possible: on a GPU, and if the elements are not contiguous.
    """
    is_part = tensor.untyped_storage().size() != tensor.nbytes
    if not is_part or not tensor.is_cpu or not tensor.is_contiguous():
        return tensor
    # View as bytes, because numpy has no bf16. A tensor that is made from an array has a storage of
    # exactly the array's bytes.
    content = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return torch.from_numpy(content).view(tensor.dtype).view(tensor.shape)


T = TypeVar("T")


def in_background(function: Callable[[], T]) -> Future[T]:
    """Run ``function`` in a new thread, which is joined when the process ends.

    ``function`` must not call collectives: their order among the foreground's collectives could
    differ between ranks.
    """
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
    future = executor.submit(function)
    # wait=False returns at once; the executor's thread ends after this function.
    executor.shutdown(wait=False)
    return future


# The second part writes lazy tensors one at a time, for conversions.


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is not in memory yet.

    Attributes:
        shape: shape of the tensor.
        dtype: dtype of the tensor.
        read: loads or computes the tensor.
        read_part: loads the slice at one index of the first axis; None if slices cannot be read
            separately.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    read_part: Callable[[int], Tensor] | None = None

    def outline(self) -> Tensor:
        """Return a tensor of this shape and dtype without data (on torch's meta device)."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


def dtype_of_matrices(tensors: Iterable[LazyTensor]) -> torch.dtype:
    """Return the dtype that all matrices share, or fp32 if they differ.

    Norms and biases do not count: they are often fp32 in a model with bf16 matrices.
    """
    dtypes = {tensor.dtype for tensor in tensors if len(tensor.shape) > 1}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


class _ReadingPlanner(SummingPlanner):
    """Planner that gets tensors without data, and reads each ``LazyTensor`` when it is written."""

    def __init__(self, tensors: Mapping[tuple[str, tuple[int, ...]], LazyTensor]) -> None:
        super().__init__(**PLANNING)
        self._tensors = tensors

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None, index
        tensor = self._tensors[index.fqn, tuple(index.offset)]
        data = tensor.read()
        assert (tuple(data.shape), data.dtype) == (tensor.shape, tensor.dtype), index
        # Check the values, because a weighted sum of models, or a conversion to fp16, may overflow.
        check_finite(data, f"{index.fqn}, from {list(index.offset)} on")
        # If the stored key stacks all layers, add the axis of the layers.
        return data.view((1,) * (len(index.offset) - data.dim()) + data.shape)


def save_lazy(
    tensors: Mapping[str, LazyTensor],
    layers: Mapping[str, Sequence[LazyTensor]],
    folder: Path,
) -> WeightSums:
    """Write ``tensors`` and ``layers``, reading one tensor after the other.

    One process calls it, with torch.distributed initialised. Peak memory is that of ``tensors`` and
    two layers, because torch's writer keeps the last tensor of every key.

    Args:
        tensors: tensors outside the layers, by their stored names.
        layers: for each stored name one tensor of each layer; the file stacks them.

    Returns:
        The checksums of all weights (``weights.sums``).
    """
    request: dict[str, Any] = {}
    lazy_tensors = {}
    for key, tensor in tensors.items():
        request[key] = ShardedTensor.from_rank_offsets(key, tensor.outline())
        # The planner looks a lazy tensor up by the key and offsets of its shard.
        lazy_tensors[key, (0,) * len(tensor.shape)] = tensor
    for key, stack in layers.items():
        for number, tensor in enumerate(stack):
            request[f"{number}.{key}"] = ShardedTensor.from_rank_offsets(
                key, tensor.outline(), (0, number, len(stack)), prepend_axis_num=1
            )
            lazy_tensors[key, (number, *(0,) * len(tensor.shape))] = tensor
    return _save_and_sum(request, folder, _ReadingPlanner(lazy_tensors))


# The third part chooses the weights in a training run's checkpoint: the whole model, or with LoRA
# only the trained weights.

_PREFIX = "model."
# Give each layer separate keys, instead of one tensor that stacks all layers: frozen layers have no
# optimizer state, and a stack cannot be saved if layers are missing.
_PER_LAYER = {"non_homogeneous_layers": True}


class ShardedModel(Protocol):
    """The interface that saving and loading need; every Megatron module has these methods."""

    def sharded_state_dict(
        self, prefix: str = ..., sharded_offsets: tuple = ..., metadata: dict | None = ...
    ) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = ...) -> Any: ...


class ShardedOptimizer(Protocol):
    """An optimizer whose state is saved next to the model's weights.

    ``sharded_state_dict`` returns copies in host memory, which may not have finished yet. The
    optimizer's next update waits until they have, and the next call of ``sharded_state_dict``
    overwrites them. ``finish_update`` waits until the last update has reached the model's weights.
    """

    def sharded_state_dict(
        self, model_state: dict[str, Any], is_loading: bool = ...
    ) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], step: int) -> None: ...

    def finish_update(self) -> None: ...


def sharded_weights(model: ShardedModel) -> dict[str, Any]:
    """Return the sharded state dict of the weights that a run's checkpoint holds.

    For a model with LoRA adapters these are the adapters and the head. The frozen weights are in
    the pretrained checkpoint.
    """
    entries = model.sharded_state_dict(prefix=_PREFIX, metadata=dict(_PER_LAYER))
    if not any(map(is_of_adapter, entries)):
        return entries
    return {key: entry for key, entry in entries.items() if is_of_adapter(key) or _is_head(key)}


def put_weights(model: ShardedModel, state: Mapping[str, Any], path: Path) -> None:
    """Load into ``model`` the state that was read from a run's checkpoint for its weights.

    Args:
        path: the checkpoint's name in errors.
    """
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
    """Load a plain state dict into a model.

    TransformerEngine's opaque ``_extra_state`` is never saved, so it may be missing.

    Args:
        source: name of the checkpoint in errors.
        may_lack: tells if the state dict may lack a key of the model.

    Raises:
        CheckpointError: tensors are missing or unexpected; the message names them.
    """
    missing, unexpected = model.load_state_dict(state, strict=False)
    missing = [key for key in missing if "_extra_state" not in key and not may_lack(key)]
    if missing or unexpected:
        raise CheckpointError(
            f"{source}: not loaded: {', '.join([*missing, *unexpected])}: these tensors are "
            "missing in the checkpoint or unknown to the model"
        )


def frozen_digest(model: ShardedModel) -> str:
    """Return a digest of a LoRA model's frozen weights; collective.

    A run resumes only if the digest is unchanged. The digest is the same for every parallel layout:
    each tensor's elements are summed as integers, and the sums are weighted by the CRC-32 of the
    tensors' names. Rows of zeros, with which a vocabulary may be padded, add nothing.
    """
    entries = model.sharded_state_dict(prefix=_PREFIX, metadata=dict(_PER_LAYER))
    total = 0
    for name, entry in entries.items():
        is_tensor = isinstance(entry, ShardedTensor | ShardedTensorFactory)
        is_trained = is_of_adapter(name) or _is_head(name)
        # Sum only one replica of each shard, so that the digest does not depend on the parallel
        # layout.
        if is_tensor and not is_trained and is_main_replica(entry.replica_id):
            data = read_outline(entry.data).detach()
            total += zlib.crc32(entry.key.encode()) * _sum_as_integers(data)
    return f"{sum(gather_objects(total)) % 2**64:016x}"


def _sum_as_integers(values: Tensor) -> int:
    # Sum the bits of the values as integers, because an integer sum is exact in any order.
    integers = {2: torch.int16, 4: torch.int32}[values.element_size()]
    return int(values.view(integers).sum(dtype=torch.int64))


def _is_head(key: str) -> bool:
    return key.removeprefix(_PREFIX).startswith(HEAD_PREFIX)
