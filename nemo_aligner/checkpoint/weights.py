"""Model weights in and out of a distributed checkpoint, through megatron-core."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)

from nemo_aligner.checkpoint.safe_metadata import read_metadata, stored_tensors
from nemo_aligner.errors import CheckpointError
from nemo_aligner.parallel.collectives import barrier, gather_objects

ShardedStateDict = dict[str, Any]
_SHOWN_KEYS = 5


class InProcessSave(SaveShardedStrategy):
    """Writes torch_dist from this very process.

    megatron-core's own strategy starts a manager process and forks writers, which needs a
    ``__main__`` guard in every script and may hang after gloo's threads have run.
    """

    def __init__(self) -> None:
        super().__init__("torch_dist", 1)

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path | str) -> None:
        grouped, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, keep_only_main_replica=True
        )
        torch_checkpoint.save(
            mcore_to_pyt_state_dict(grouped),
            storage_writer=torch_checkpoint.FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def save_weights(sharded_state_dict: ShardedStateDict, folder: Path) -> None:
    """Write the tensors of ``sharded_state_dict`` into ``folder``; every rank calls it.

    ``folder`` is created and must be seen by all ranks. Opaque objects (TransformerEngine's
    ``_extra_state``) are left out: they are pickles, and a reader must not load them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    barrier()
    with _as_checkpoint_error(folder):
        dist_checkpointing.save(
            _without_objects(sharded_state_dict), str(folder), sharded_strategy=InProcessSave()
        )


def load_weights(sharded_state_dict: ShardedStateDict, folder: Path) -> dict[str, Any]:
    """Fill ``sharded_state_dict`` from ``folder`` and give it back as a plain state dict.

    Every rank calls it. The tensors keep the dtype and device that they have; ``ShardedObject``
    entries are left out.

    Raises:
        CheckpointError: on every rank, if any rank misses a tensor, finds another shape, or finds
            something in ``folder`` that would run as code; or if the data is damaged.
    """
    request = _without_objects(sharded_state_dict)
    _raise_everywhere(_problem(request, folder))
    with _as_checkpoint_error(folder):
        return dist_checkpointing.load(request, str(folder))


@contextmanager
def _as_checkpoint_error(folder: Path) -> Iterator[None]:
    """torch gathers every rank's failure into one exception, which is not an ``Exception``."""
    try:
        yield
    except (torch_checkpoint.CheckpointException, CheckpointingException) as error:
        raise CheckpointError(f"{folder}: {error}") from error


def _without_objects(sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
    _, kept = extract_matching_values(
        sharded_state_dict, lambda value: isinstance(value, ShardedObject)
    )
    return kept


def _problem(request: ShardedStateDict, folder: Path) -> str | None:
    try:
        check_format(folder)
        wanted, _, _ = load_preprocess(request)
        _check_tensors(nested_values(wanted), folder)
    except CheckpointError as error:
        return str(error)
    return None


def _raise_everywhere(problem: str | None) -> None:
    for found in gather_objects(problem):
        if found is not None:
            raise CheckpointError(found)


def check_format(folder: Path) -> None:
    """Refuse a ``folder`` that is not a torch_dist checkpoint with a harmless index."""
    path = folder / "metadata.json"
    try:
        backend = json.loads(path.read_text()).get("sharded_backend")
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: unreadable: {error}") from error
    if backend != "torch_dist":
        raise CheckpointError(f"{path}: got the format {backend!r}, wanted 'torch_dist'")
    read_metadata(folder)
    common = folder / "common.pt"
    try:
        torch.load(common, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{common}: refused or unreadable: {error}") from error


def _check_tensors(wanted: Iterable[Any], folder: Path) -> None:
    stored = stored_tensors(folder)
    tensors = [value for value in wanted if isinstance(value, ShardedTensor)]
    missing = sorted({tensor.key for tensor in tensors if tensor.key not in stored})
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} tensors are missing: {_some(missing)}; "
            f"it holds {len(stored)}: {_some(sorted(stored))}"
        )
    for tensor in tensors:
        got, wanted_shape = stored[tensor.key][0], tuple(tensor.global_shape)
        first = int(tensor.allow_shape_mismatch)  # a padded vocabulary may differ in its rows
        if len(got) != len(wanted_shape) or got[first:] != wanted_shape[first:]:
            raise CheckpointError(
                f"{folder}: {tensor.key}: got shape {list(got)}, wanted {list(wanted_shape)}"
            )


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN_KEYS} more" if len(names) > _SHOWN_KEYS else ""
    return ", ".join(names[:_SHOWN_KEYS]) + more
