"""Read weights from zarr arrays, one for each tensor, as NeMo 1.21 to 1.23 wrote them.

Layers are stacked and tensors are named as in torch_dist. megatron-core 0.16 no longer reads the
format; the ``zarr`` package does (extra ``[zarr]``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.checkpoint.safe_load import read_json
from nemo_aligner.checkpoint.weights.shards import slices_of
from nemo_aligner.checkpoint.weights.store import TensorStore, is_optimizer_state
from nemo_aligner.config.dtypes import zarr_dtypes
from nemo_aligner.utils.errors import CheckpointError, short, shown

_HEADER = ".zarray"
_DTYPES = zarr_dtypes()


class ZarrStore(TensorStore):
    """Weights in zarr arrays, as megatron-core up to 0.15 could write them."""

    def __init__(self, folder: Path) -> None:
        """Read the headers of all arrays in ``folder``.

        Raises:
            CheckpointError: an array is compressed, filtered, or of a type other than floats.
        """
        self._headers = dict(_list_arrays(folder))
        super().__init__(
            folder,
            {
                path.name: (tuple(header["shape"]), _DTYPES[header["dtype"]])
                for path, header in self._headers.items()
            },
        )

    def check_data(self, *, read: bool) -> None:
        """Raise CheckpointError if a chunk of an array is missing, where zarr would read zeros.

        ``read`` has no effect: chunks have no checksums, so reading would not find damage.
        """
        _import_zarr(self.folder)
        for path, header in self._headers.items():
            _check_chunks(path, header)

    def read_into(self, target: Tensor, key: str, offsets: Sequence[int]) -> int:
        values = _read_array(self.folder / key, slices_of(offsets, target.size()))
        target[tuple(slice(length) for length in values.size())].copy_(values)
        return values.numel()


def _check_chunks(path: Path, header: dict[str, Any]) -> None:
    steps = header["chunks"]
    counts = [-(-size // step) for size, step in zip(header["shape"], steps, strict=True)]
    # Count the files before looping over the chunks, because a header may claim any number of
    # chunks.
    if math.prod(counts) >= len(list(path.iterdir())):  # >=: the folder also has the header file
        raise CheckpointError(f"{path}: some of its {math.prod(counts)} chunks are missing")
    chunk_bytes = math.prod(steps) * _DTYPES[header["dtype"]].itemsize
    for numbers in product(*map(range, counts)):
        chunk = path / ".".join(map(str, numbers))
        if not chunk.is_file():
            raise CheckpointError(f"{chunk}: no such file, wanted a chunk of {path.name}")
        if chunk.stat().st_size != chunk_bytes:
            raise CheckpointError(
                f"{chunk}: got {chunk.stat().st_size} bytes, wanted {chunk_bytes}"
            )


def _list_arrays(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the path and the header of each array, except those of an optimizer."""
    for header in sorted(folder.glob(f"*/{_HEADER}")):
        if not is_optimizer_state(header.parent.name):
            yield header.parent, _read_header(header)


def _read_header(path: Path) -> dict[str, Any]:
    """Read the header of an array, and check that it is of the kind that megatron-core wrote.

    Other types and filters of zarr may be pickles, and compressed data may expand to any size.
    """
    header = read_json(path)
    shapes = header.get("shape"), header.get("chunks")
    if (
        header.get("zarr_format") != 2
        or header.get("dtype") not in tuple(_DTYPES)
        or header.get("filters")
        or header.get("compressor")
        or header.get("dimension_separator", ".") != "."
        or not all(
            isinstance(shape, list)
            and all(type(length) is int and 0 < length < 2**40 for length in shape)
            for shape in shapes
        )
        or len(header["shape"]) != len(header["chunks"])
    ):
        raise CheckpointError(f"{path}: got {shown(header)}, wanted a plain array of floats")
    return header


def _read_array(path: Path, slices: tuple[slice, ...]) -> Tensor:
    try:
        values = _import_zarr(path.parent).open_array(str(path), mode="r")[slices]
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise CheckpointError(f"{path}: cannot be read: {short(error)}") from error
    if values.dtype.name == "bfloat16":
        # View as int16 first: torch does not accept numpy arrays of ml_dtypes' bfloat16.
        return torch.from_numpy(values.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(values)


def _import_zarr(folder: Path) -> Any:
    try:
        import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
        import zarr
    except ImportError as error:
        raise CheckpointError(
            f"{folder}: weights in zarr need the packages zarr and ml_dtypes (extra [zarr])"
        ) from error
    return zarr
