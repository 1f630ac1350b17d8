"""Model weights of NeMo 1.21 to 1.23: a zarr array for each tensor.

Layers are stacked as in torch_dist, under the same names. megatron-core 0.16 reads no zarr; here
the ``zarr`` package does (extra ``[zarr]``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from nemo_aligner.checkpoint.untrusted import read_json
from nemo_aligner.checkpoint.weights.index import is_optimizer_state
from nemo_aligner.errors import CheckpointError, shown
from nemo_aligner.precision import zarr_dtypes

_HEADER = ".zarray"
_DTYPES = zarr_dtypes()


def stored_tensors(folder: Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name -> (global shape, dtype) of every array in ``folder`` but an optimizer's."""
    return {
        path.name: (tuple(header["shape"]), _DTYPES[header["dtype"]])
        for path, header in _arrays(folder)
    }


def check_data(folder: Path) -> None:
    """Refuse a folder that lacks a piece of an array, where zarr would read zeros.

    Raises:
        CheckpointError: it names the piece; or a header asks for more than plain numbers; or zarr
            is not installed.
    """
    _import_zarr(folder)
    for path, header in _arrays(folder):
        steps = header["chunks"]
        counts = [-(-size // step) for size, step in zip(header["shape"], steps, strict=True)]
        if math.prod(counts) >= len(list(path.iterdir())):  # the header is one more
            raise CheckpointError(f"{path}: it lacks some of its {math.prod(counts)} pieces")
        bytes_of_piece = math.prod(steps) * _DTYPES[header["dtype"]].itemsize
        for place in product(*map(range, counts)):
            piece = path / ".".join(map(str, place))
            if not piece.is_file():
                raise CheckpointError(f"{piece}: no such file, wanted a piece of {path.name}")
            if piece.stat().st_size != bytes_of_piece:
                raise CheckpointError(
                    f"{piece}: got {piece.stat().st_size} bytes, wanted {bytes_of_piece}"
                )


def load(tensors: dict[str, Any], folder: Path) -> dict[str, Any]:
    """``tensors`` with every ``ShardedTensor`` replaced by its tensor, filled from ``folder``."""

    def fill(entry: Any) -> Any:
        if not isinstance(entry, ShardedTensor):
            return entry
        stored = _read(folder / entry.key, entry.global_slice())
        target = entry.data.detach()
        if entry.allow_shape_mismatch:
            target[: len(stored)] = stored  # a padded vocabulary may have other rows
        else:
            target.copy_(stored.view(target.shape))
        return target

    return dict_list_map_inplace(fill, tensors)


def read(folder: Path, key: str, layer: int | None = None) -> Tensor:
    """The array ``key`` as it is stored; of stacked layers, one layer's."""
    return _read(folder / key, (...,) if layer is None else (layer,))


def _arrays(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for header in sorted(folder.glob(f"*/{_HEADER}")):
        if not is_optimizer_state(header.parent.name):
            yield header.parent, _read_header(header)


def _read_header(path: Path) -> dict[str, Any]:
    """What zarr will read, as megatron-core wrote it.

    zarr's other types and filters may be pickles, and what is compressed may unpack to anything.
    """
    header = read_json(path, str(path))
    sizes = header.get("shape"), header.get("chunks")
    if (
        header.get("zarr_format") != 2
        or header.get("dtype") not in tuple(_DTYPES)
        or header.get("filters")
        or header.get("compressor")
        or header.get("dimension_separator", ".") != "."
        or not all(isinstance(size, list) and all(map(_is_size, size)) for size in sizes)
        or len(header["shape"]) != len(header["chunks"])
    ):
        raise CheckpointError(f"{path}: got {shown(header)}, wanted a plain array of floats")
    return header


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**40


def _read(path: Path, place: tuple[Any, ...]) -> Tensor:
    try:
        values = _import_zarr(path.parent).open_array(str(path), mode="r")[place]
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if values.dtype.name == "bfloat16":
        return torch.from_numpy(values.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(values)


def _import_zarr(folder: Path) -> Any:
    try:
        import ml_dtypes  # noqa: F401  (numpy then knows bfloat16)
        import zarr
    except ImportError as error:
        raise CheckpointError(
            f"{folder}: weights in zarr need the packages zarr and ml_dtypes (extra [zarr])"
        ) from error
    return zarr
