"""How a pack uses a server's pool of keys, values and states, which earlier packs stored.

``CachedPrefix`` and ``Stored`` say it of one sequence, ``CacheUse`` and ``StateUse`` of a pack.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, eq=False)
class CachedPrefix:
    """A prefix of h tokens whose keys and values are in ``slots [h]`` int64 of a server's pool.

    All sequences that begin with this prefix refer to the same object, so that a pack recognizes
    them by identity. ``state`` is the slot with the states of linear attention behind the prefix;
    None for a model without linear attention.
    """

    slots: Tensor
    state: int | None = None


@dataclass(frozen=True)
class Stored:
    """What to store of a sequence: keys and values of n tokens, and states of linear attention.

    Attributes:
        start: position of the first of the n tokens, which are adjacent.
        slots: ``[n]`` int64 slots of the pool for their keys and values.
        states: pairs ``(tokens, slot)``: the states behind the sequence's first ``tokens`` tokens,
            a multiple of 64, are stored in ``slot``.
    """

    start: int
    slots: Tensor
    states: tuple[tuple[int, int], ...] = ()


class StateUse(NamedTuple):
    """States of linear attention that a pack reads from a pool, and those that it stores there.

    A state is behind a whole number of chunks of 64 tokens of its sequence.

    Attributes:
        taken: slot of the state behind each of the pack's P cached segments.
        stored: indices, in the pack, of the tokens behind which the states to store are.
        slots: slots to store them in, none of which is in ``taken``.
    """

    taken: tuple[int, ...] = ()
    stored: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()


NO_STATES = StateUse()


@dataclass(frozen=True)
class CacheUse:
    """Keys, values and states that a pack reads from a pool, and those that it stores there.

    Attributes:
        lengths: number of tokens of each of the pack's P cached segments, C in all.
        taken: ``[C]`` int64 slots to read, segment by segment.
        stored: ``[M]`` int64 indices, in the pack, of the tokens whose keys and values to store.
        slots: ``[M]`` int64 slots to store them in, which are not in ``taken``.
        states: the same of states, in a model with linear attention. They stay on the host.
    """

    lengths: tuple[int, ...]
    taken: Tensor
    stored: Tensor
    slots: Tensor
    states: StateUse = field(default=NO_STATES, kw_only=True)

    def tensors(self) -> list[Tensor]:
        """List the tensors: ``taken``, ``stored`` and ``slots``."""
        return [self.taken, self.stored, self.slots]
