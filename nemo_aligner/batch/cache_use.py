"""How a pack uses a server's pool of keys, values and states, which earlier packs stored.

``CachedPrefix`` and ``Stored`` describe what one sequence reads and stores; ``CacheUse`` and
``StateUse`` what a whole pack does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, eq=False)
class CachedPrefix:
    """A prefix of h tokens whose keys and values are in ``slots [h]`` int64 of a server's pool.

    All sequences that begin with this prefix refer to the same object, so that a pack recognizes
    them by identity. ``state`` is the slot with linear attention's recurrent states after the
    prefix's last token; None for a model without linear attention.
    """

    slots: Tensor
    state: int | None = None


@dataclass(frozen=True)
class Stored:
    """What a pack stores of one sequence: keys and values of n tokens, states of linear attention.

    Attributes:
        start: position of the first of the n tokens, which are adjacent.
        slots: ``[n]`` int64 slots of the pool for their keys and values.
        states: pairs ``(tokens, slot)``: the states after the sequence's first ``tokens`` tokens, a
            multiple of 64, are stored in ``slot``.
    """

    start: int
    slots: Tensor
    states: tuple[tuple[int, int], ...] = ()


class StateUse(NamedTuple):
    """States of linear attention that a pack reads from a pool, and those that it stores there.

    A state sums up the first tokens of its sequence; their number is a multiple of 64, the chunk
    size.

    Attributes:
        read_slots: slots of the states after the pack's P cached segments (prefixes that are not
            computed again).
        stored: indices in the pack of the last tokens that the stored states sum up.
        slots: slots in which the states are stored, none of which is in ``read_slots``.
    """

    read_slots: tuple[int, ...] = ()
    stored: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()


NO_STATES = StateUse()


@dataclass(frozen=True)
class CacheUse:
    """Keys, values and states that a pack reads from a pool, and those that it stores there.

    Attributes:
        lengths: number of tokens of each of the pack's P cached segments (prefixes that are not
            computed again); their sum is C.
        read_slots: ``[C]`` int64 slots to read, segment by segment.
        stored: ``[M]`` int64 indices, in the pack, of the tokens whose keys and values to store.
        slots: ``[M]`` int64 slots in which these are stored, none of which is in ``read_slots``.
        states: the states of linear attention that the pack reads and stores; empty for a model
            without linear attention.
    """

    lengths: tuple[int, ...]
    read_slots: Tensor
    stored: Tensor
    slots: Tensor
    states: StateUse = field(default=NO_STATES, kw_only=True)

    def tensors(self) -> list[Tensor]:
        """List the tensors that are copied to the device: ``read_slots``, ``stored``, ``slots``."""
        return [self.read_slots, self.stored, self.slots]
