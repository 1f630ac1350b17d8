"""TensorStore: a checkpoint's weights on disk, whatever the format.

Each rank opens a checkpoint once and reads its index then, never again.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
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
from torch import Tensor

from nemo_aligner.distributed.collectives import gather_objects
from nemo_aligner.utils.errors import CheckpointError

ShardedStateDict = dict[str, Any]
# Global shape and dtype by name.
StoredTensors = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
T = TypeVar("T")
_SHOWN_KEYS = 5


class TensorStore(ABC):
    """Weights in ``folder``; ``tensors`` has the global shape and dtype of each by name."""

    def __init__(self, folder: Path, tensors: StoredTensors) -> None:
        self.folder = folder
        self.tensors = tensors

    @abstractmethod
    def check_data(self, *, read: bool) -> None:
        """Find missing weights, and with ``read`` damaged ones, by reading all of them once.

        Raises:
            CheckpointError: a shard is missing, of another size, or damaged.
        """

    @abstractmethod
    def read_into(self, target: Tensor, key: str, offsets: Sequence[int]) -> int:
        """Fill ``target`` from the tensor ``key`` at ``offsets``; returns the count of elements.

        ``target`` has the rank of the stored tensor, and may extend past its end.

        Raises:
            CheckpointError: the data cannot be read.
        """

    def read(self, key: str, layer: int | None = None) -> Tensor:
        """Read the tensor ``key`` to the CPU; with ``layer``, one layer of a stacked tensor.

        Raises:
            CheckpointError: there is none, or the data is damaged.
        """
        if key not in self.tensors:
            raise CheckpointError(f"{self.folder}: the tensor {key} is missing")
        shape, dtype = self.tensors[key]
        offsets, sizes = [0] * len(shape), list(shape)
        if layer is not None:
            offsets[0], sizes[0] = layer, 1
        target = torch.empty(sizes, dtype=dtype)
        self._read_whole(target, key, offsets)
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
        target = data[(None,) * entry.prepend_axis_num]
        if entry.allow_shape_mismatch:
            target.zero_()  # rows of a padded vocabulary that are not stored
            self.read_into(target, entry.key, entry.global_offset)
        else:
            self._read_whole(target, entry.key, entry.global_offset)
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


def without_objects(sharded_state_dict: ShardedStateDict) -> ShardedStateDict:
    """Drop opaque objects (TransformerEngine's ``_extra_state``): they are pickles."""
    _, kept = extract_matching_values(
        sharded_state_dict, lambda value: isinstance(value, ShardedObject)
    )
    return kept


def is_optimizer_state(name: str) -> bool:
    """Tell by Megatron's naming if a stored tensor belongs to an optimizer."""
    return re.match(r"(chained_\d+\.)?optimizer\.", name) is not None
