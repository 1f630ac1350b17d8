"""A checkpoint's weights, opened: as torch_dist or zarr, the two ways megatron-core wrote them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.checkpoint.safe_load import read_json
from nemo_aligner.checkpoint.weights.tensor_store import (
    ShardedStateDict,
    TensorStore,
    is_optimizer_state,
    raise_everywhere,
)
from nemo_aligner.checkpoint.weights.torch_dist import TORCH_DIST, TorchDistStore, read_common
from nemo_aligner.config.dtypes import zarr_dtypes
from nemo_aligner.utils.errors import CheckpointError, shown

# Model weights of NeMo 1.21 to 1.23: a zarr array for each tensor.
#
# Layers are stacked as in torch_dist, under the same names. megatron-core 0.16 reads no zarr; here
# the ``zarr`` package does (extra ``[zarr]``).

ZARR = "zarr"
_HEADER = ".zarray"
_DTYPES = zarr_dtypes()


class ZarrStore(TensorStore):
    """Weights as megatron-core up to 0.15 could write them."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError where a header asks for more than plain numbers."""
        self._headers = dict(_arrays(folder))
        super().__init__(
            folder,
            {
                path.name: (tuple(header["shape"]), _DTYPES[header["dtype"]])
                for path, header in self._headers.items()
            },
        )

    def check_data(self, *, read: bool) -> None:
        """Refuse a folder that lacks a piece of an array, where zarr would read zeros.

        Nothing is to be found by reading: the pieces have no checksums.

        Raises:
            CheckpointError: it names the piece; or zarr is not installed.
        """
        _import_zarr(self.folder)
        for path, header in self._headers.items():
            _check_pieces(path, header)

    def read_into(self, target: Tensor, key: str, offsets: Sequence[int]) -> int:
        bounds = zip(offsets, target.size(), strict=True)
        slices = tuple(slice(start, start + length) for start, length in bounds)
        values = _read(self.folder / key, slices)
        target[tuple(slice(length) for length in values.size())].copy_(values)
        return values.numel()


def _check_pieces(path: Path, header: dict[str, Any]) -> None:
    steps = header["chunks"]
    counts = [-(-size // step) for size, step in zip(header["shape"], steps, strict=True)]
    if math.prod(counts) >= len(list(path.iterdir())):  # the header is one more
        raise CheckpointError(f"{path}: it lacks some of its {math.prod(counts)} pieces")
    bytes_of_piece = math.prod(steps) * _DTYPES[header["dtype"]].itemsize
    for numbers in product(*map(range, counts)):
        piece = path / ".".join(map(str, numbers))
        if not piece.is_file():
            raise CheckpointError(f"{piece}: no such file, wanted a piece of {path.name}")
        if piece.stat().st_size != bytes_of_piece:
            raise CheckpointError(
                f"{piece}: got {piece.stat().st_size} bytes, wanted {bytes_of_piece}"
            )


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


def _read(path: Path, slices: tuple[slice, ...]) -> Tensor:
    try:
        values = _import_zarr(path.parent).open_array(str(path), mode="r")[slices]
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


_STORES: dict[str, type[TorchDistStore] | type[ZarrStore]] = {
    TORCH_DIST: TorchDistStore,
    ZARR: ZarrStore,
}


def open_weights(folder: Path) -> TensorStore:
    """The weights in ``folder``; their index is read here, and never again.

    Raises:
        CheckpointError: it is another format, or no distributed checkpoint with a harmless index.
    """
    path = folder / "metadata.json"
    backend = read_json(path, str(path)).get("sharded_backend")
    if not isinstance(backend, str) or backend not in _STORES:
        raise CheckpointError(f"{path}: got the format {backend!r}, wanted {TORCH_DIST!r}")
    return _STORES[backend](folder)


def load_weights(sharded_state_dict: ShardedStateDict, folder: Path) -> dict[str, Any]:
    """``TensorStore.load`` from ``folder``, and what lies beside the tensors (``common.pt``).

    Every rank calls it.

    Raises:
        CheckpointError: on every rank, if any rank misses a tensor, finds another shape, or finds
            something in ``folder`` that would run as code; or if the data is damaged.
    """
    store, common = raise_everywhere(lambda: _open_with_common(folder))
    return store.load(sharded_state_dict, common)


def _open_with_common(folder: Path) -> tuple[TensorStore, dict[str, Any]]:
    store = open_weights(folder)
    if not isinstance(store, TorchDistStore):
        raise CheckpointError(f"{folder}: got another format, wanted {TORCH_DIST!r}")
    return store, read_common(folder)
