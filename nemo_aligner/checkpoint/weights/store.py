"""Read a checkpoint's weights: the interface ``TensorStore``, and the format torch_dist.

Each rank reads a checkpoint's index once, when it opens the checkpoint. The files are not trusted:
the index is checked for code, gaps and overlaps, and shards for missing or damaged bytes.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from io import BufferedReader, BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import (
    dict_list_map_inplace,
    extract_matching_values,
    merge,
    nested_values,
)
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    apply_factory_merges,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from torch import Size, Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from nemo_aligner.checkpoint.safe_load import (
    INDEX_NAME,
    load_plain,
    read_metadata,
)
from nemo_aligner.checkpoint.weights.shards import (
    FileSlice,
    check_shards,
    check_untransformed,
    check_zip,
    read_shard,
    slices_of,
)
from nemo_aligner.distributed.collectives import raise_everywhere
from nemo_aligner.utils.errors import CheckpointError, short

ShardedStateDict = dict[str, Any]
# Global shape and dtype of each tensor, by its stored name.
StoredTensors = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
_SHOWN_KEYS = 5


class TensorStore(ABC):
    """The weights of a checkpoint on disk.

    Attributes:
        folder: folder of the files, which may be a temporary one.
        tensors: global shape and dtype of each tensor, by its stored name.
        source: name of the checkpoint in errors about its values; ``folder`` by default.
    """

    def __init__(self, folder: Path, tensors: StoredTensors) -> None:
        self.folder = self.source = folder
        self.tensors = tensors

    @abstractmethod
    def check_data(self, *, read: bool) -> None:
        """Raise CheckpointError if weights are missing.

        Args:
            read: read all weights once to find damaged ones, too.
        """

    @abstractmethod
    def read_into(self, target: Tensor, key: str, offsets: Sequence[int]) -> int:
        """Fill ``target`` with the part of the tensor ``key`` that begins at index ``offsets``.

        ``target`` has as many axes as the stored tensor, and may extend past its end.

        Returns:
            The number of elements that were filled.
        """

    def read(self, key: str, layer: int | None = None) -> Tensor:
        """Read the tensor ``key`` to the CPU, or one ``layer`` of a tensor that stacks layers.

        Raises:
            CheckpointError: the tensor is missing, damaged, or has values that are NaN or infinite.
        """
        if key not in self.tensors:
            raise CheckpointError(f"{self.folder}: the tensor {key} is missing")
        shape, dtype = self.tensors[key]
        offsets, sizes = [0] * len(shape), list(shape)
        if layer is not None:
            offsets[0], sizes[0] = layer, 1
        target = torch.empty(sizes, dtype=dtype)
        self._read_whole(target, key, offsets)
        check_finite(target, f"{self.source}: {key}")
        return target if layer is None else target[0]

    def load(
        self, sharded_state_dict: ShardedStateDict, common: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Fill ``sharded_state_dict`` and return it as a plain state dict; collective.

        Tensors keep their dtype and device. ``ShardedObject`` entries are dropped.

        Args:
            common: plain data that is stored next to the tensors, merged into the result.

        Raises:
            CheckpointError: on every rank, if on any rank a tensor is missing, has another shape,
                or cannot be read.
        """
        # load_preprocess splits off factories: a factory stands for one tensor of the model that is
        # stored in several parts, such as the two halves of SwiGLU, which are joined at the end.
        request, unsharded, factories = load_preprocess(without_objects(sharded_state_dict))
        tensors, _ = extract_sharded_base(request)
        raise_everywhere(lambda: self._check_request(tensors))
        filled = raise_everywhere(lambda: dict_list_map_inplace(self._fill_entry, tensors))
        try:
            state = merge(merge(common or {}, unsharded), filled)
        except ValueError as error:
            raise CheckpointError(
                f"{self.folder}: the plain data next to the tensors ({COMMON_NAME}) does not fit: "
                f"{error}"
            ) from error
        return apply_factory_merges(state, factories)

    def _fill_entry(self, entry: ShardedTensor) -> Tensor:
        if entry.data is None:
            entry.init_data("cpu")
        data = entry.data.detach()
        # A stored tensor that stacks all layers has one more axis than a layer's tensor here.
        target = data[(None,) * entry.prepend_axis_num]
        if entry.allow_shape_mismatch:
            target.zero_()  # the stored vocabulary may have fewer rows of padding
            self.read_into(target, entry.key, entry.global_offset)
        else:
            self._read_whole(target, entry.key, entry.global_offset)
        check_finite(target, f"{self.source}: {entry.key}")
        return data

    def _read_whole(self, target: Tensor, key: str, offsets: Sequence[int]) -> None:
        if self.read_into(target, key, offsets) != target.numel():
            raise CheckpointError(f"{self.folder}: {key}: only a part of the tensor is stored")

    def _check_request(self, request: ShardedStateDict) -> None:
        """Raise CheckpointError unless all requested tensors are stored with their shapes."""
        stored = self.tensors
        requested = [value for value in nested_values(request) if isinstance(value, ShardedTensor)]
        missing = sorted({tensor.key for tensor in requested if tensor.key not in stored})
        if missing:
            raise CheckpointError(
                f"{self.folder}: {len(missing)} tensors are missing: {_list_some(missing)}; "
                f"the checkpoint has {len(stored)}: {_list_some(sorted(stored))}"
            )
        for tensor in requested:
            stored_shape, shape = stored[tensor.key][0], tuple(tensor.global_shape)
            first = int(tensor.allow_shape_mismatch)  # axis 0 may differ: padding of a vocabulary
            if len(stored_shape) != len(shape) or stored_shape[first:] != shape[first:]:
                raise CheckpointError(
                    f"{self.folder}: {tensor.key}: got shape {list(stored_shape)}, wanted "
                    f"{list(shape)}"
                )


def _list_some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN_KEYS} more" if len(names) > _SHOWN_KEYS else ""
    return ", ".join(names[:_SHOWN_KEYS]) + more


def check_finite(tensor: Tensor, location: str) -> None:
    """Check that no value of a tensor is NaN or infinite; an error begins with ``location``.

    A single such value makes every reward NaN. In an embedding, it does so for every sample that
    contains the token.
    """
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return
    # Convert 8-bit floats, which torch's aminmax does not support.
    values = tensor if tensor.element_size() > 1 else tensor.half()
    # A NaN makes both extremes NaN. Unlike isfinite, aminmax allocates no memory.
    if bool(torch.stack(values.aminmax()).isfinite().all()):
        return
    bad = (~values.isfinite()).nonzero()
    ends = ", which ends at 65504: try bf16" if tensor.dtype is torch.float16 else ""
    raise CheckpointError(
        f"{location}: got {len(bad)} of {tensor.numel()} values that are NaN or infinite in "
        f"{str(tensor.dtype).removeprefix('torch.')}{ends}, the first at {bad[0].tolist()}. "
        "Use a copy of the checkpoint, or an earlier one, whose weights are finite"
    )


def without_objects(sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
    """Drop opaque objects (TransformerEngine's ``_extra_state``), because they are pickles."""
    _, tensors = extract_matching_values(
        sharded_state_dict, lambda value: isinstance(value, ShardedObject)
    )
    return tensors


def is_optimizer_state(name: str) -> bool:
    """Tell by Megatron's naming convention whether a stored tensor belongs to an optimizer."""
    return re.match(r"(chained_\d+\.)?optimizer\.", name) is not None


# Reading the format torch_dist: a few files with the shards of all tensors, and an index.

# Value of ``sharded_backend`` in metadata.json for this format.
TORCH_DIST = "torch_dist"


class TorchDistStore(TensorStore):
    """Weights as megatron-core and torch.distributed.checkpoint write them.

    A rank reads only the shards that overlap its tensors. megatron-core's own load is not used,
    because it would read the index again, with ``pickle.load``, which can run code.
    """

    def __init__(self, folder: Path) -> None:
        """Read the index in ``folder``; CheckpointError if it is missing or unsafe."""
        self._metadata = read_metadata(folder)
        self._entries = {
            name: entry
            for name, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        super().__init__(
            folder,
            {
                name: (tuple(entry.size), entry.properties.dtype)
                for name, entry in self._entries.items()
            },
        )

    def check_data(self, *, read: bool, with_optimizer: bool = False) -> None:
        entries = self._select_entries(with_optimizer)
        check_shards(self.folder, self._metadata, entries, read=read)

    def _select_entries(self, with_optimizer: bool) -> dict[str, TensorStorageMetadata]:
        """Return the entries of all tensors, or of those that are not optimizer state."""
        return {
            name: entry
            for name, entry in self._entries.items()
            if with_optimizer or not is_optimizer_state(name)
        }

    def check_whole(self, *, with_optimizer: bool) -> None:
        """Read all weights once to find damaged ones; collective. Each rank reads an equal part.

        Args:
            with_optimizer: check the optimizer's state, too.

        Raises:
            CheckpointError: on every rank, if any rank finds damage.
        """
        part = dist.get_rank(), dist.get_world_size()
        entries = self._select_entries(with_optimizer)

        def check() -> None:
            try:
                check_shards(self.folder, self._metadata, entries, read=True, part=part)
                common = self.folder / COMMON_NAME
                if part[0] == 0 and common.is_file():
                    with common.open("rb", buffering=0) as stored:
                        check_zip(stored, str(common))
            except OSError as error:
                raise CheckpointError(f"{self.folder}: cannot be read: {short(error)}") from error

        raise_everywhere(check)

    def read_into(self, target: Tensor, key: str, offsets: Sequence[int]) -> int:
        box = ChunkStorageMetadata(Size(offsets), target.size())
        try:
            items = create_read_items_for_chunk_list(key, self._entries[key], [box])
            for item in items:
                self._read_item(item, target)
        except Exception as error:  # damaged data may raise anything
            raise CheckpointError(
                f"{self.folder}: {key}: cannot be read: {short(error)}"
            ) from error
        return sum(item.lengths.numel() for item in items)

    def _read_item(self, item: ReadItem, target: Tensor) -> None:
        info = (self._metadata.storage_data or {})[item.storage_index]
        check_untransformed(info)
        stored = self._entries[item.storage_index.fqn].chunks[item.storage_index.index or 0]
        box = target[slices_of(item.dest_offsets, item.lengths)]
        with (self.folder / info.relative_path).open("rb") as file:
            shard = BufferedReader(FileSlice(file, info.offset, info.offset + info.length))
            read_shard(shard, item.storage_offsets, stored.sizes, box)


class MeanStore(TensorStore):
    """The mean of the weights in several ``stores``, which have the same tensors.

    Each tensor is summed in float64 when it is read, and rounded once. So host memory needs room
    for one tensor, not for the sums of all. The mean of one store is that store.
    """

    def __init__(self, stores: Sequence[TensorStore]) -> None:
        super().__init__(stores[0].folder, stores[0].tensors)
        self._stores = stores

    def check_data(self, *, read: bool) -> None:
        for store in self._stores:
            store.check_data(read=read)

    def read_into(self, target: Tensor, key: str, offsets: Sequence[int]) -> int:
        if len(self._stores) == 1:
            return self._stores[0].read_into(target, key, offsets)
        # A mean of values of -0.0 stays -0.0 only if the sum starts there, too.
        total = torch.full(target.shape, -0.0, dtype=torch.float64)
        counts = []
        for store in self._stores:
            part = torch.zeros_like(target, device="cpu")
            counts.append(store.read_into(part, key, offsets))
            check_finite(part, f"{store.source}: {key}")
            total.add_(part)
        target.copy_(total.div_(len(self._stores)))
        return min(counts)


# Plain data next to the tensors. NeMo, megatron-core up to 0.16 and this package write it to
# ``common.pt``. Since 0.17, megatron-core itself stores it like a shard of a tensor.

COMMON_NAME = "common.pt"
# megatron-core's key for the shard with the plain data, which is a list with one object.
_COMMON_SHARD = "common_state/shard_0_1"


def write_common(common: dict[str, Any], folder: Path) -> None:
    """Write plain data next to the tensors in ``folder``. Raises OSError if that fails."""
    torch.save(common, folder / COMMON_NAME)


def read_common(folder: Path) -> dict[str, Any]:
    """Read the plain data that is stored next to the tensors in ``folder``.

    Objects of the classes that megatron-core lists as safe count as plain data;
    ``argparse.Namespace`` is one of them.
    """
    common = folder / COMMON_NAME
    if not common.exists() and (folder / INDEX_NAME).is_file():
        return _read_common_shard(folder)
    try:
        with common.open("rb") as stored:
            return _load_plain_or_refuse(stored, common)
    except OSError as error:
        raise CheckpointError(f"{common}: cannot be read safely: {short(error)}") from error


def _read_common_shard(folder: Path) -> dict[str, Any]:
    info = (read_metadata(folder).storage_data or {}).get(MetadataIndex(_COMMON_SHARD))
    if info is None:
        raise CheckpointError(
            f"{folder}: the checkpoint's plain data is missing: there is neither {COMMON_NAME} nor "
            f"{_COMMON_SHARD} in {INDEX_NAME}"
        )
    path = folder / info.relative_path
    try:
        with path.open("rb") as file:
            file.seek(info.offset)
            stored = file.read(info.length)
    except OSError as error:
        raise CheckpointError(f"{path}: {_COMMON_SHARD}: cannot be read: {error}") from error
    common = _load_plain_or_refuse(BytesIO(stored), f"{path}: {_COMMON_SHARD}")
    return common[0] if type(common) is list and len(common) == 1 else common


def _load_plain_or_refuse(stored: BinaryIO, name: Path | str) -> Any:
    try:
        return load_plain(stored)
    except Exception as error:
        raise CheckpointError(f"{name}: cannot be read safely: {short(error)}") from error
