"""A checkpoint's weights, opened: as torch_dist or zarr, the two ways megatron-core wrote them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemo_aligner.checkpoint.untrusted import read_json
from nemo_aligner.checkpoint.weights.common import read_common
from nemo_aligner.checkpoint.weights.tensor_store import (
    ShardedStateDict,
    TensorStore,
    raise_everywhere,
)
from nemo_aligner.checkpoint.weights.torch_dist import TORCH_DIST, TorchDistStore
from nemo_aligner.checkpoint.weights.zarr import ZARR, ZarrStore
from nemo_aligner.errors import CheckpointError

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
