"""Weights of a checkpoint: reading every stored format, safely, and saving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nemo_aligner.distributed  # noqa: F401 - before the first import of megatron-core
from nemo_aligner.checkpoint.safe_load import read_json
from nemo_aligner.checkpoint.weights.store import (
    TORCH_DIST,
    ShardedStateDict,
    TensorStore,
    TorchDistStore,
    raise_everywhere,
    read_common,
)
from nemo_aligner.checkpoint.weights.zarr import ZarrStore
from nemo_aligner.utils.errors import CheckpointError

_STORES: dict[str, type[TorchDistStore] | type[ZarrStore]] = {
    TORCH_DIST: TorchDistStore,
    "zarr": ZarrStore,
}


class DamagedError(CheckpointError):
    """Stored weights are incomplete or damaged: only a copy of them helps."""


def open_weights(folder: Path) -> TensorStore:
    """Open the weights in ``folder``; their index is read once, here."""
    path = folder / "metadata.json"
    backend = read_json(path).get("sharded_backend")
    if not isinstance(backend, str) or backend not in _STORES:
        raise CheckpointError(f"{path}: got the format {backend!r}, wanted {TORCH_DIST!r}")
    return _STORES[backend](folder)


def load_weights(
    sharded_state_dict: ShardedStateDict, folder: Path, *, with_optimizer: bool = True
) -> dict[str, Any]:
    """Load a sharded state dict from ``folder``, with the plain data beside it (``common.pt``).

    Collective; see ``TensorStore.load``. All data is compared with its CRC-32 first, the
    optimizer's only ``with_optimizer``. The ranks share that work, which on one core is done at
    some 3 GB a second, about as fast as loading.

    Raises:
        DamagedError: on every rank, if the data is incomplete or not what was written.
        CheckpointError: on every rank, if any rank misses a tensor, finds another shape, or finds
            something that would run code.
    """
    try:
        store, common = raise_everywhere(lambda: _open_with_common(folder))
        store.check_whole(with_optimizer=with_optimizer)
    except CheckpointError as error:
        raise DamagedError(str(error)) from error
    return store.load(sharded_state_dict, common)


def check_complete(folder: Path) -> None:
    """Raise CheckpointError if a file of weights is missing or cut off; reads no weights."""
    store, _ = _open_with_common(folder)
    store.check_data(read=False, with_optimizer=True)


def _open_with_common(folder: Path) -> tuple[TorchDistStore, dict[str, Any]]:
    store = open_weights(folder)
    # A run writes torch_dist alone; zarr has no plain data beside its arrays.
    if not isinstance(store, TorchDistStore):
        raise CheckpointError(f"{folder}: got another format, wanted {TORCH_DIST!r}")
    return store, read_common(folder)
