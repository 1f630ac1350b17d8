"""Read the weights of a checkpoint in every stored format, and save them.

- ``store``: the interface ``TensorStore``, and torch_dist, the format of distributed checkpoints.
  Its index is checked before use.
- ``shards``: the shards of torch_dist. Damaged ones are found before any tensor is used.
- ``zarr``: the same interface for zarr arrays, which NeMo 1.21 to 1.23 wrote.
- ``save``: distributed checkpoints written in the background (training runs) or one tensor at a
  time (conversions); and which weights of a run are saved, with and without LoRA.
- ``sums``: checksums that identify a model's weights, whatever its parallel layout.

The functions here choose the store: ``open_weights`` for any format, ``load_weights`` for the
checkpoints of a run, ``check_complete`` to look for missing files only.
"""

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
    read_common,
)
from nemo_aligner.checkpoint.weights.zarr import ZarrStore
from nemo_aligner.distributed.collectives import raise_everywhere
from nemo_aligner.utils.errors import CheckpointError

_STORES: dict[str, type[TorchDistStore] | type[ZarrStore]] = {
    TORCH_DIST: TorchDistStore,
    "zarr": ZarrStore,
}


class DamagedError(CheckpointError):
    """Stored weights are incomplete or damaged, so they must be restored from a copy."""


def open_weights(folder: Path) -> TensorStore:
    """Open the weights in ``folder``, in the format that they have, and read their index."""
    path = folder / "metadata.json"
    backend = read_json(path).get("sharded_backend")
    if not isinstance(backend, str) or backend not in _STORES:
        raise CheckpointError(f"{path}: got the format {backend!r}, wanted {TORCH_DIST!r}")
    return _STORES[backend](folder)


def load_weights(
    sharded_state_dict: ShardedStateDict, folder: Path, *, with_optimizer: bool = True
) -> dict[str, Any]:
    """Load a sharded state dict from ``folder``, and the plain data in ``common.pt``; collective.

    Raises:
        DamagedError: on every rank, if the data is incomplete or was changed (``open_checked``).
        CheckpointError: on every rank, if on any rank a tensor is missing, has another shape, or is
            stored in a file that would run code.
    """
    store, common = open_checked(folder, with_optimizer=with_optimizer)
    return store.load(sharded_state_dict, common)


def open_checked(folder: Path, *, with_optimizer: bool) -> tuple[TensorStore, dict[str, Any]]:
    """Open the weights in ``folder``, and read the plain data in ``common.pt``; collective.

    The CRC-32 of the weights is compared, and with ``with_optimizer`` that of the optimizer's
    state. Each rank checks an equal part, at about 3 GB a second on one core, which takes about as
    long as loading.

    Raises:
        DamagedError: on every rank, if the data is incomplete or was changed.
    """
    try:
        store, common = raise_everywhere(lambda: _open_with_common(folder))
        store.check_whole(with_optimizer=with_optimizer)
    except CheckpointError as error:
        raise DamagedError(str(error)) from error
    return store, common


def check_complete(folder: Path) -> None:
    """Raise CheckpointError if a file of weights is missing or cut off; reads no weights."""
    store, _ = _open_with_common(folder)
    store.check_data(read=False, with_optimizer=True)


def _open_with_common(folder: Path) -> tuple[TorchDistStore, dict[str, Any]]:
    store = open_weights(folder)
    # A run writes only torch_dist, and a folder of zarr arrays has no plain data of a run.
    if not isinstance(store, TorchDistStore):
        raise CheckpointError(
            f"{folder}: the weights are stored as zarr arrays; a run's checkpoint has the format "
            f"{TORCH_DIST!r}"
        )
    return store, read_common(folder)
