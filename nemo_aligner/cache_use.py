"""What sequences and packs have to do with a pool of keys and values that were computed before."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_aligner.transfer import to_device


@dataclass(frozen=True, eq=False)
class CachedPrefix:
    """A beginning whose keys and values lie in ``slots [h]`` int64 of a pool.

    Sequences that begin with it have the same object.
    """

    slots: Tensor


@dataclass(frozen=True)
class Stored:
    """A sequence's tokens from ``start`` on, whose keys and values are to lie in ``slots [n]``."""

    start: int
    slots: Tensor


@dataclass(frozen=True)
class CacheUse:
    """What a pack takes from a pool of keys and values, and what it leaves there.

    Attributes:
        lengths: tokens of the pack's P cached segments, C in all.
        taken: ``[C]`` int64 slots of their tokens, segment by segment.
        stored: ``[M]`` int64 index of the pack's own tokens whose keys and values are to be stored.
        slots: ``[M]`` int64, where; none of them is in ``taken``.
    """

    lengths: tuple[int, ...]
    taken: Tensor
    stored: Tensor
    slots: Tensor

    def to(self, device: torch.device | str) -> CacheUse:
        taken, stored, slots = (
            to_device(each, device) for each in (self.taken, self.stored, self.slots)
        )
        return CacheUse(self.lengths, taken, stored, slots)
