"""The model in a training run's checkpoints: all of it, or with LoRA what is trained."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from torch import Tensor

from nemo_aligner.checkpoint.decoder_tensors import HEAD_PREFIX
from nemo_aligner.errors import CheckpointError
from nemo_aligner.models.lora import is_of_adapter
from nemo_aligner.parallel.collectives import gather_objects

_PREFIX = "model."
# Layers under keys of their own, not stacked in one tensor: frozen layers have no optimizer state,
# and a stack with holes cannot be saved.
_PER_LAYER = {"non_homogeneous_layers": True}


class ShardedModel(Protocol):
    """A Megatron module."""

    def sharded_state_dict(
        self, prefix: str = ..., sharded_offsets: tuple = ..., metadata: dict | None = ...
    ) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = ...) -> Any: ...


def sharded_weights(model: ShardedModel) -> dict[str, Any]:
    """Megatron's sharded view of what a checkpoint has of ``model``.

    Beside adapters the weights are those of the pretrained checkpoint, and are not written again.
    """
    entries = model.sharded_state_dict(prefix=_PREFIX, metadata=dict(_PER_LAYER))
    if not any(map(is_of_adapter, entries)):
        return entries
    return {key: entry for key, entry in entries.items() if is_of_adapter(key) or _is_head(key)}


def put_weights(model: ShardedModel, state: Mapping[str, Any], path: Path) -> None:
    """Put what was loaded for ``sharded_weights`` into the model.

    Raises:
        CheckpointError: something is missing, or has no place in it; it names the checkpoint.
    """
    plain = {key.removeprefix(_PREFIX): value for key, value in state.items()}
    missing, unexpected = model.load_state_dict(plain, strict=False)
    is_partial = any(map(is_of_adapter, plain))
    wanted = [key for key in missing if not is_partial or is_of_adapter(key) or _is_head(key)]
    # TransformerEngine's opaque state is never saved.
    lost = [key for key in wanted if "_extra_state" not in key]
    if lost or unexpected:
        raise CheckpointError(f"{path}: not loaded: {', '.join([*lost, *unexpected])}")


def frozen_digest(model: ShardedModel) -> str:
    """What tells the weights beside adapters from others, at any layout; every rank calls it.

    It is a sum over all tensors of the bits of their numbers, times what their names are worth;
    rows of zeros, which pad a vocabulary, add nothing.
    """
    entries = model.sharded_state_dict(prefix=_PREFIX, metadata=dict(_PER_LAYER))
    total = 0
    for name, entry in entries.items():
        is_tensor = isinstance(entry, ShardedTensor | ShardedTensorFactory)
        is_trained = is_of_adapter(name) or _is_head(name)
        if is_tensor and not is_trained and is_main_replica(entry.replica_id):
            total += zlib.crc32(entry.key.encode()) * _sum_of_bits(entry.data.detach())
    return f"{sum(gather_objects(total)) % 2**64:016x}"


def _sum_of_bits(values: Tensor) -> int:
    integers = {2: torch.int16, 4: torch.int32}[values.element_size()]
    return int(values.view(integers).sum(dtype=torch.int64))


def _is_head(key: str) -> bool:
    return key.removeprefix(_PREFIX).startswith(HEAD_PREFIX)
