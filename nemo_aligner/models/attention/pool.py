"""A pool of keys and values that outlive their pack, so that others may begin with its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nemo_aligner.cache_use import CacheUse
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.parallel.layout import LayoutSizes


def pool_bytes(shape: ModelShape, layout: LayoutSizes, element_bytes: int, tokens: int) -> int:
    """What a pool for so many tokens takes on each rank, which has some layers and groups."""
    layers, groups = shape.num_layers // layout.pp, shape.num_query_groups // layout.tp
    return 2 * layers * groups * shape.kv_channels * element_bytes * tokens


class KeyValuePool:
    """For each layer of this rank, ``slots`` keys and values of one token, ``[groups, c]`` each.

    Taken once. Keys are rotated to their positions. What a slot has means something only to whoever
    had it stored.
    """

    def __init__(
        self,
        layer_numbers: Sequence[int],
        slots: int,
        groups: int,
        channels: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (slots, groups, channels)
        self._layers = {
            number: tuple(torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
            for number in layer_numbers
        }

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for layer in self._layers.values() for each in layer)

    def exchange(
        self, layer_number: int, key: Tensor, value: Tensor, use: CacheUse
    ) -> tuple[Tensor, Tensor]:
        """Store what ``use`` says of ``[T, groups, c]``; ``[C + T, groups, c]``, cached first."""
        keys, values = self._layers[layer_number]
        return _exchange(keys, key, use), _exchange(values, value, use)


def _exchange(kept: Tensor, fresh: Tensor, use: CacheUse) -> Tensor:
    if use.stored.numel():
        kept.index_copy_(0, use.slots, fresh.detach()[use.stored])
    if not use.lengths:
        return fresh
    return torch.cat([kept.index_select(0, use.taken), fresh])
