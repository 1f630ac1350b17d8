"""TensorStore: a checkpoint's weights on disk; and torch_dist, the format that is written.

Each rank opens a checkpoint once and reads its index then, never again. Nothing in it is trusted:
the index is checked, and shards have to be whole.
"""

from __future__ import annotations

import math
import re
import sys
import zipfile
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BufferedReader, BytesIO, RawIOBase
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

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
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from nemo_aligner.checkpoint.safe_load import (
    INDEX_NAME,
    Outline,
    load_plain,
    outline_of,
    read_metadata,
    record_size,
    torch_archive,
)
from nemo_aligner.distributed.collectives import gather_objects
from nemo_aligner.utils.errors import CheckpointError, short

ShardedStateDict = dict[str, Any]
# Global shape and dtype by name.
StoredTensors = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
T = TypeVar("T")
_SHOWN_KEYS = 5


class TensorStore(ABC):
    """Weights in ``folder``; ``tensors`` has the global shape and dtype of each by name.

    ``source`` names them in errors about their values; ``folder`` may be a temporary one.
    """

    def __init__(self, folder: Path, tensors: StoredTensors) -> None:
        self.folder = self.source = folder
        self.tensors = tensors

    @abstractmethod
    def check_data(self, *, read: bool) -> None:
        """Find missing weights, and with ``read`` damaged ones, by reading all of them once."""

    @abstractmethod
    def read_into(self, target: Tensor, key: str, offsets: Sequence[int]) -> int:
        """Fill ``target`` from the tensor ``key`` at ``offsets``; returns the count of elements.

        ``target`` has the rank of the stored tensor, and may extend past its end.
        """

    def read(self, key: str, layer: int | None = None) -> Tensor:
        """Read the tensor ``key`` to the CPU; with ``layer``, one layer of a stacked tensor."""
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

        Tensors keep their dtype and device. ``ShardedObject`` entries are left out.

        Args:
            common: plain data stored beside the tensors, merged into the result.

        Raises:
            CheckpointError: on every rank, if any rank misses a tensor, finds another shape, or
                cannot read one.
        """
        # A factory stands for a tensor that is stored as several: SwiGLU's two halves, joined last.
        request, of_this_run, factories = load_preprocess(without_objects(sharded_state_dict))
        tensors, _ = extract_sharded_base(request)
        raise_everywhere(lambda: self._check(tensors))
        filled = raise_everywhere(lambda: dict_list_map_inplace(self._filled, tensors))
        try:
            state = merge(merge(common or {}, of_this_run), filled)
        except ValueError as error:
            raise CheckpointError(f"{self.folder}: beside the tensors: {error}") from error
        return apply_factory_merges(state, factories)

    def _filled(self, entry: ShardedTensor) -> Tensor:
        if entry.data is None:
            entry.init_data("cpu")
        data = entry.data.detach()
        # Layers are stacked under one key: a layer is stored with an axis more than it has here.
        target = data[(None,) * entry.prepend_axis_num]
        if entry.allow_shape_mismatch:
            target.zero_()  # rows of a padded vocabulary that are not stored
            self.read_into(target, entry.key, entry.global_offset)
        else:
            self._read_whole(target, entry.key, entry.global_offset)
        check_finite(target, f"{self.source}: {entry.key}")
        return data

    def _read_whole(self, target: Tensor, key: str, offsets: Sequence[int]) -> None:
        if self.read_into(target, key, offsets) != target.numel():
            raise CheckpointError(f"{self.folder}: {key}: got a part of it, wanted the whole")

    def _check(self, request: ShardedStateDict) -> None:
        stored = self.tensors
        wanted = [value for value in nested_values(request) if isinstance(value, ShardedTensor)]
        missing = sorted({tensor.key for tensor in wanted if tensor.key not in stored})
        if missing:
            raise CheckpointError(
                f"{self.folder}: {len(missing)} tensors are missing: {_some(missing)}; "
                f"it holds {len(stored)}: {_some(sorted(stored))}"
            )
        for tensor in wanted:
            got, shape = stored[tensor.key][0], tuple(tensor.global_shape)
            first = int(tensor.allow_shape_mismatch)  # a padded vocabulary may differ in rows
            if len(got) != len(shape) or got[first:] != shape[first:]:
                raise CheckpointError(
                    f"{self.folder}: {tensor.key}: got shape {list(got)}, wanted {list(shape)}"
                )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN_KEYS} more" if len(names) > _SHOWN_KEYS else ""
    return ", ".join(names[:_SHOWN_KEYS]) + more


def raise_everywhere(function: Callable[[], T]) -> T:
    """Run ``function`` on every rank, and return its result on this one; collective.

    Raises:
        CheckpointError: on every rank, if any raised one: that of the first such rank.
    """
    result, problem = None, None
    try:
        result = function()
    except CheckpointError as error:
        problem = str(error)
    for found in gather_objects(problem):
        if found is not None:
            raise CheckpointError(found)
    return result  # type: ignore[return-value]


def check_finite(tensor: Tensor, where: str) -> None:
    """Check that no value of a tensor is NaN or infinite; an error begins with ``where``.

    One such weight makes every reward NaN, or, in an embedding, those of the texts that have it.
    """
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return
    # torch's aminmax does not take 8-bit floats.
    values = tensor if tensor.element_size() > 1 else tensor.half()
    # NaN is both of the extremes. Unlike isfinite this needs no memory.
    if bool(torch.stack(values.aminmax()).isfinite().all()):
        return
    bad = (~values.isfinite()).nonzero()
    ends = ", which ends at 65504: try bf16" if tensor.dtype is torch.float16 else ""
    raise CheckpointError(
        f"{where}: got {len(bad)} of {tensor.numel()} values that are NaN or infinite in "
        f"{str(tensor.dtype).removeprefix('torch.')}{ends}, the first at {bad[0].tolist()}. "
        "Use a copy of the checkpoint, or an earlier one, whose weights are finite"
    )


def without_objects(sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
    """Drop opaque objects (TransformerEngine's ``_extra_state``): they are pickles."""
    _, kept = extract_matching_values(
        sharded_state_dict, lambda value: isinstance(value, ShardedObject)
    )
    return kept


def is_optimizer_state(name: str) -> bool:
    """Tell by Megatron's naming if a stored tensor belongs to an optimizer."""
    return re.match(r"(chained_\d+\.)?optimizer\.", name) is not None


# torch_dist: shards of all tensors in a few files, and an index.

# Value of sharded_backend in metadata.json.
TORCH_DIST = "torch_dist"


class TorchDistStore(TensorStore):
    """Weights as megatron-core and torch.distributed.checkpoint write them.

    A rank reads the shards that overlap its own tensors. megatron-core's load would read the index
    again, with ``pickle.load``.
    """

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError if the index is missing or unsafe."""
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
        check_shards(self.folder, self._metadata, read=read, with_optimizer=with_optimizer)

    def check_whole(self, *, with_optimizer: bool) -> None:
        """Read all weights once to find damaged ones, each rank an equal part; collective.

        Args:
            with_optimizer: check the optimizer's state, too.

        Raises:
            CheckpointError: on every rank, if any finds damage.
        """
        part = dist.get_rank(), dist.get_world_size()

        def check() -> None:
            try:
                check_shards(
                    self.folder, self._metadata, read=True, with_optimizer=with_optimizer, part=part
                )
                common = self.folder / COMMON_NAME
                if part[0] == 0 and common.is_file():
                    with common.open("rb", buffering=0) as stored:
                        check_zip(stored, str(common))
            except OSError as error:  # else the other ranks would wait for this one
                raise CheckpointError(f"{self.folder}: cannot be read: {short(error)}") from error

        raise_everywhere(check)

    def read_into(self, target: Tensor, key: str, offsets: Sequence[int]) -> int:
        wanted = ChunkStorageMetadata(Size(offsets), target.size())
        try:
            items = create_read_items_for_chunk_list(key, self._entries[key], [wanted])
            for item in items:
                self._read_item(item, target)
        except Exception as error:  # damaged data may raise anything
            raise CheckpointError(
                f"{self.folder}: {key}: cannot be read: {short(error)}"
            ) from error
        return sum(item.lengths.numel() for item in items)

    def _read_item(self, item: ReadItem, target: Tensor) -> None:
        info = (self._metadata.storage_data or {})[item.storage_index]
        if getattr(info, "transform_descriptors", None):
            raise ValueError("it is stored in another form than torch's own")
        stored = self._entries[item.storage_index.fqn].chunks[item.storage_index.index or 0]
        box = target[slices_of(item.dest_offsets, item.lengths)]
        with (self.folder / info.relative_path).open("rb") as file:
            shard = BufferedReader(FileSlice(file, info.offset, info.offset + info.length))
            read_shard(shard, item.storage_offsets, stored.sizes, box)


# Shards: whole, in bounds, undamaged.

_BLOCK_BYTES = 2**24
_STORAGES = {
    f"torch.{name}Storage": dtype
    for name, dtype in (
        ("Double", torch.float64), ("Float", torch.float32), ("Half", torch.float16),
        ("BFloat16", torch.bfloat16), ("Long", torch.int64), ("Int", torch.int32),
        ("Short", torch.int16), ("Char", torch.int8), ("Byte", torch.uint8), ("Bool", torch.bool),
    )
}  # fmt: skip


def check_shards(
    folder: Path,
    metadata: Metadata,
    *,
    read: bool,
    with_optimizer: bool = False,
    part: tuple[int, int] = (0, 1),
) -> None:
    """Find missing or damaged shards before any tensor is used.

    The index must lay each tensor out without gaps, within its files. ``read`` also checks contents
    by the CRC-32 of each shard, which is a zip file of torch's.

    Args:
        with_optimizer: check the optimizer's state, too. A model is loaded without it.
        part: (i, n) checks the contents of the i-th of n parts of about as many bytes.
    """
    shards = defaultdict(list)
    for name, entry in metadata.state_dict_metadata.items():
        is_checked = with_optimizer or not is_optimizer_state(name)
        if isinstance(entry, TensorStorageMetadata) and is_checked:
            try:
                for info, least in _shards(metadata, name, entry):
                    shards[info.relative_path].append((info, least, name))
            except (KeyError, ValueError) as error:
                raise CheckpointError(f"{folder}: .metadata: {name}: {error}") from error
    sizes = {file: sum(shard[0].length for shard in found) for file, found in shards.items()}
    index, count = part
    total = sum(sizes.values())
    to_read = range(total * index // count, total * (index + 1) // count) if read else range(0)
    start = 0
    # In the order of the ranks that wrote the files: at the same layout a rank reads its own, which
    # the system still has in memory when the tensors are loaded.
    for file in sorted(shards, key=_numbers_in):
        _check_file(folder / file, shards[file], start, to_read)
        start += sizes[file]


def _numbers_in(name: str) -> tuple[list[int], str]:
    return [int(digits) for digits in re.findall("[0-9]{1,9}", name)], name


def _shards(
    metadata: Metadata, name: str, entry: TensorStorageMetadata
) -> Iterator[tuple[Any, int]]:
    """Yield where each shard of a tensor is stored, and the least bytes that it takes."""
    size, item = tuple(entry.size), entry.properties.dtype.itemsize
    volumes = []
    for chunk in entry.chunks:
        bounds = zip(chunk.offsets, chunk.sizes, size, strict=True)
        if any(start + length > whole for start, length, whole in bounds):
            raise ValueError(f"a shard of shape {tuple(chunk.sizes)} lies outside {size}")
        volumes.append(math.prod(chunk.sizes))
        info = (metadata.storage_data or {})[MetadataIndex(name, chunk.offsets)]
        if getattr(info, "transform_descriptors", None):
            raise ValueError("it is stored in another form than torch's own")
        yield info, volumes[-1] * item
    starts = {tuple(chunk.offsets) for chunk in entry.chunks}
    if len(starts) < len(volumes) or sum(volumes) != math.prod(size):
        raise ValueError(f"its shards do not make up its shape {size}")


def _check_file(path: Path, shards: list[tuple[Any, int, str]], start: int, to_read: range) -> None:
    """Check the places of a file's shards, and the contents of those that begin in ``to_read``.

    Args:
        start: bytes in the shards of the files before, by which ``to_read`` counts.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file, wanted the data of {shards[0][2]}")
    end = 0
    with path.open("rb") as file:
        for info, least, name in sorted(shards, key=lambda shard: shard[0].offset):
            where = f"{path}: {name}"
            # Shards that overlap could name the same bytes a thousand times.
            if info.offset < end or least > info.length:
                raise CheckpointError(
                    f"{where}: got {info.length} bytes at {info.offset}, wanted at least {least} "
                    f"from {end} on"
                )
            end = info.offset + info.length
            if end > path.stat().st_size:
                raise CheckpointError(
                    f"{where}: the file ends at {path.stat().st_size}, wanted {end} bytes"
                )
            if start in to_read:
                check_zip(FileSlice(file, info.offset, end), where)
            start += info.length


def check_zip(stored: RawIOBase, where: str) -> None:
    """Compare a file of ``torch.save`` with its CRC-32; an error begins with ``where``."""
    try:
        with zipfile.ZipFile(BufferedReader(stored)) as shard:
            # testzip() would unpack it all, whatever its size.
            if any(member.compress_type for member in shard.infolist()):
                raise ValueError("it is compressed, wanted torch's own form")
            damaged = shard.testzip()
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError) as error:
        raise CheckpointError(f"{where}: damaged: {error}") from error
    if damaged is not None:
        raise CheckpointError(f"{where}: damaged: {damaged} has another CRC-32")


def read_shard(
    stored: BinaryIO, offsets: Sequence[int], shape: Sequence[int], target: Tensor
) -> None:
    """Copy a box of a shard into ``target``, reading only the rows of the box.

    Args:
        stored: the shard, as ``torch.save`` wrote it.
        offsets: of the box in the shard.
        shape: of the whole shard, by the index.
        target: of the box's shape, any dtype and any device.

    Raises:
        Exception: of many kinds, if the shard is damaged, has another shape, or would cost more to
            read than it should.
    """
    place = _place_of(stored, tuple(shape))
    if place is None:
        whole = load_plain(stored)
        if not isinstance(whole, Tensor) or whole.shape != torch.Size(shape):
            raise ValueError(f"got another shard than the index says, wanted {list(shape)}")
        target.copy_(whole[slices_of(offsets, target.shape)])
        return
    start, dtype = place
    # Without this, a layer of a stack would be read with the rows of all others.
    while target.dim() > 1 and target.size(0) == 1:  # one of stacked layers: narrow to its rows
        start += offsets[0] * math.prod(shape[1:]) * dtype.itemsize
        shape, offsets, target = shape[1:], offsets[1:], target[0]
    if target.dim() == 0:
        shape, offsets, target = (1,), (0,), target.view(1)
    row, inside = math.prod(shape[1:]) * dtype.itemsize, slices_of(offsets[1:], target.shape[1:])
    stored.seek(start + offsets[0] * row)
    for rows in target.split(max(1, _BLOCK_BYTES // max(1, row))) if target.numel() else ():
        # In blocks: a target on a GPU needs no copy of the whole shard in host memory.
        content = bytearray(rows.size(0) * row)
        if stored.readinto(content) != len(content):  # type: ignore[attr-defined]
            raise ValueError("the file ends within it")
        block = torch.frombuffer(content, dtype=dtype).view(rows.size(0), *shape[1:])
        rows.copy_(block[(slice(None), *inside)])


def slices_of(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    """Index of a box in a tensor."""
    bounds = zip(offsets, lengths, strict=True)
    return tuple(slice(start, start + length) for start, length in bounds)


def _place_of(stored: BinaryIO, shape: tuple[int, ...]) -> tuple[int, torch.dtype] | None:
    """Find the offset of a shard's data if it is contiguous, and its dtype.

    None for what torch must assemble: other byte orders, strides, or rare dtypes.
    """
    found = outline_of(stored)
    if not isinstance(found, Outline) or found.name != "torch._utils._rebuild_tensor_v2()":
        return None
    storage, first, size, stride, *_ = found.parts
    # A persistent id of torch.save: "storage", its class, its key in the zip, a device, its size.
    _, of_type, key, *_ = storage.parts[0]
    dtype = _STORAGES.get(getattr(of_type, "name", ""))
    archive, name = torch_archive(stored), f"data/{key}"
    row_by_row = tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    if (
        dtype is None
        or (size, stride) != (shape, row_by_row)
        or not archive.has_record("byteorder")
        or archive.get_record("byteorder") != sys.byteorder.encode()
    ):
        return None
    if type(first) is not int or first < 0:
        raise ValueError("it begins before its own numbers")
    if (first + math.prod(shape)) * dtype.itemsize > record_size(stored, archive, name):
        raise ValueError(f"it has fewer numbers than {list(shape)} takes")
    return archive.get_record_offset(name) + first * dtype.itemsize, dtype


class FileSlice(RawIOBase):
    """Bytes ``start`` to ``end`` of a file, as a file."""

    def __init__(self, file: BinaryIO, start: int, end: int) -> None:
        self._file, self._start, self._size = file, start, end - start
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = max(0, offset + (0, self._position, self._size)[whence])
        return self._position

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._position)
        block = self._file.read(min(len(buffer), max(0, self._size - self._position)))
        buffer[: len(block)] = block
        self._position += len(block)
        return len(block)


# Plain data beside the tensors: in ``common.pt``, as NeMo, megatron-core up to 0.16 and this
# package write it. Since 0.17 megatron-core itself stores it among the tensors' shards.

COMMON_NAME = "common.pt"
# megatron-core's key for an object in a single shard: a list of one.
_AMONG_SHARDS = "common_state/shard_0_1"


def write_common(common: dict[str, Any], folder: Path) -> None:
    """Write ``common`` beside the tensors. Raises OSError if that fails."""
    torch.save(common, folder / COMMON_NAME)


def read_common(folder: Path) -> dict[str, Any]:
    """Read the plain data that ``folder`` holds beside tensors.

    megatron-core's list of safe classes counts as plain, ``argparse.Namespace`` among them.
    """
    common = folder / COMMON_NAME
    if not common.exists() and (folder / INDEX_NAME).is_file():
        return _among_shards(folder)
    try:
        with common.open("rb") as stored:
            return _plain(stored, common)
    except OSError as error:
        raise CheckpointError(f"{common}: refused or unreadable: {short(error)}") from error


def _among_shards(folder: Path) -> dict[str, Any]:
    where = (read_metadata(folder).storage_data or {}).get(MetadataIndex(_AMONG_SHARDS))
    if where is None:
        raise CheckpointError(
            f"{folder}: got neither {COMMON_NAME} nor {_AMONG_SHARDS} in {INDEX_NAME}, "
            "wanted the plain data beside the tensors"
        )
    path = folder / where.relative_path
    try:
        with path.open("rb") as file:
            file.seek(where.offset)
            stored = file.read(where.length)
    except OSError as error:
        raise CheckpointError(f"{path}: {_AMONG_SHARDS}: cannot be read: {error}") from error
    found = _plain(BytesIO(stored), f"{path}: {_AMONG_SHARDS}")
    return found[0] if type(found) is list and len(found) == 1 else found


def _plain(stored: BinaryIO, name: Path | str) -> Any:
    try:
        return load_plain(stored)
    except Exception as error:
        raise CheckpointError(f"{name}: refused or unreadable: {short(error)}") from error
