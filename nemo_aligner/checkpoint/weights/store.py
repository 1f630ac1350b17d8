"""A checkpoint's weights, opened: as torch_dist or zarr, the two ways megatron-core wrote them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.base import LoadShardedStrategy

from nemo_aligner.checkpoint.untrusted import read_json
from nemo_aligner.checkpoint.weights import torch_dist, zarr
from nemo_aligner.checkpoint.weights.common import read_common
from nemo_aligner.checkpoint.weights.tensor_store import (
    ShardedStateDict,
    TensorStore,
    raise_everywhere,
    without_objects,
)
from nemo_aligner.checkpoint.weights.torch_dist import TorchDistStore
from nemo_aligner.checkpoint.weights.zarr import ZarrStore
from nemo_aligner.errors import CheckpointError

_STORES: dict[str, type[TorchDistStore] | type[ZarrStore]] = {
    torch_dist.FORMAT: TorchDistStore,
    zarr.FORMAT: ZarrStore,
}


def open_weights(folder: Path) -> TensorStore:
    """The weights in ``folder``; their index is read here, and never again.

    Raises:
        CheckpointError: it is another format, or no distributed checkpoint with a harmless index.
    """
    path = folder / "metadata.json"
    backend = read_json(path, str(path)).get("sharded_backend")
    if not isinstance(backend, str) or backend not in _STORES:
        raise CheckpointError(f"{path}: got the format {backend!r}, wanted {torch_dist.FORMAT!r}")
    return _STORES[backend](folder)


def load_weights(sharded_state_dict: ShardedStateDict, folder: Path) -> dict[str, Any]:
    """``TensorStore.load`` from ``folder``, and what lies beside the tensors (``common.pt``).

    Every rank calls it.

    Raises:
        CheckpointError: on every rank, if any rank misses a tensor, finds another shape, or finds
            something in ``folder`` that would run as code; or if the data is damaged.
    """
    store = raise_everywhere(lambda: _open_with_common(folder))
    try:
        return dist_checkpointing.load(
            without_objects(sharded_state_dict), str(folder), sharded_strategy=_FromStore(store)
        )
    except (OSError, CheckpointingException) as error:
        raise CheckpointError(f"{folder}: {error}") from error


def _open_with_common(folder: Path) -> TensorStore:
    store = open_weights(folder)
    if not isinstance(store, TorchDistStore):
        raise CheckpointError(f"{folder}: got another format, wanted {torch_dist.FORMAT!r}")
    read_common(folder)  # megatron-core reads it below
    return store


class _FromStore(LoadShardedStrategy):
    """How megatron-core reads tensors of a checkpoint that is open already."""

    def __init__(self, store: TensorStore) -> None:
        super().__init__()
        self._store = store

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Any) -> dict[str, Any]:
        return self._store.fill(sharded_state_dict)

    def load_tensors_metadata(self, checkpoint_dir: Any) -> dict[str, Any]:
        raise NotImplementedError  # for loads that put up with missing tensors

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        pass  # the store was chosen by it

    def check_version_compatibility(self, loaded_version: int) -> None:
        pass

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True  # there are none
