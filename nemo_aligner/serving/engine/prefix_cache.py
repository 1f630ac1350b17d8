"""The prefix cache: which beginnings of texts are kept, where, and what a call has to compute.

Keys and values are kept in blocks of 16 tokens. A block is identified by the block before it and
its own token ids, which are compared themselves: no hash decides a score. The least recently used
blocks are evicted first, and a block before the one that it follows.

Where turns or steps of a text are scored, the head's outputs at tokens of kept blocks are kept
beside them, so that the next turn of a dialogue costs its own tokens.

Every rank has the block managers of all data parallel replicas and makes the same calls, so all of
them agree; keys and values are in the pool of each rank's model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from nemo_aligner.batch.packed import CachedPrefix, PackedBatch, Stored
from nemo_aligner.config.common import BLOCK_TOKENS
from nemo_aligner.contract.turns import find_marker
from nemo_aligner.data.packing import (
    PrefixGroup,
    SequenceReads,
    find_prefix_groups,
    pack_groups,
    uniform_rope,
)
from nemo_aligner.distributed.layout import ParallelLayout

_BLOCK_BYTES = BLOCK_TOKENS * 4  # of token ids as int32
_NONE = -1  # no block


@dataclass(frozen=True)
class BlockTable:
    """The blocks of one sequence: cached ones, and those to compute and keep from ``first`` on.

    Blocks between them are computed by another sequence of the same call. ``path`` is all of them.
    """

    found: tuple[int, ...]
    first: int
    new: tuple[int, ...]
    path: tuple[int, ...] = ()


def _before_first(rotation: int) -> int:
    """Stands for the block before the first: keys of one rotation are of no use to another."""
    return _NONE - rotation


def as_key(tokens: np.ndarray) -> bytes:
    """Token ids as the key that ``BlockManager`` looks up."""
    return tokens.astype(np.int32).tobytes()


class BlockManager:
    """Finds, places and evicts the blocks of a pool of ``capacity`` blocks."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.clear()

    def clear(self) -> None:
        """Evict all blocks."""
        self._blocks: dict[tuple[int, bytes], int] = {}
        # By block, the least recently used first; a block comes before the one that it follows.
        self._keys: OrderedDict[int, tuple[int, bytes]] = OrderedDict()
        # By block, and by the token's place in it.
        self._outputs: dict[int, dict[int, np.ndarray]] = {}
        self._free = list(range(self._capacity - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, key: bytes, reads: Sequence[int] = (), rotation: int = 0) -> tuple[int, ...]:
        """The cached blocks at a sequence's beginning; its last token is always computed.

        And so is the first of the places ``reads`` whose outputs are not known, and what follows.
        Blocks of sequences with another ``rotation`` (see ``ModelShape``) are others.
        """
        found: list[int] = []
        block = _before_first(rotation)
        wanted: dict[int, list[int]] = {}
        for place in reads:
            wanted.setdefault(place // BLOCK_TOKENS, []).append(place % BLOCK_TOKENS)
        # Without the block that ends with the last token, whose state the head reads.
        for start in range(0, len(key) - _BLOCK_BYTES, _BLOCK_BYTES):
            known = self._blocks.get((block, key[start : start + _BLOCK_BYTES]))
            if known is None:
                break
            inside = wanted.get(len(found))
            if inside is not None and not set(inside) <= set(self._outputs.get(known, ())):
                break
            block = known
            found.append(block)
        return tuple(found)

    def outputs_of(self, found: Sequence[int], reads: Sequence[int]) -> list[np.ndarray]:
        """The kept outputs of the first of ``reads``, which lie in the blocks ``found``."""
        places = (divmod(place, BLOCK_TOKENS) for place in reads)
        return [self._outputs[found[at]][place] for at, place in places if at < len(found)]

    def keep_outputs(self, path: Sequence[int], reads: Sequence[int], outputs: np.ndarray) -> None:
        """Keep ``outputs [s, K]`` at the places ``reads`` that blocks of ``path`` have."""
        for place, own in zip(reads, outputs, strict=True):
            at, place_in_block = divmod(place, BLOCK_TOKENS)
            if at < len(path):
                self._outputs.setdefault(path[at], {})[place_in_block] = own

    def use(
        self,
        keys: Sequence[bytes],
        reads: Sequence[Sequence[int]] | None = None,
        rotations: Sequence[int] | None = None,
    ) -> list[BlockTable]:
        """Look up the sequences of one call, and allocate blocks for what is new.

        Blocks that the call uses are not evicted by it. If the pool is too small for all of its
        blocks, the earliest of each sequence are kept.
        """
        reads = [()] * len(keys) if reads is None else reads
        rotations = [0] * len(keys) if rotations is None else rotations
        found = [self.find(*each) for each in zip(keys, reads, rotations, strict=True)]
        paths = [list(blocks) for blocks in found]
        pinned = {block for blocks in found for block in blocks}
        for block in pinned:
            self._keys.move_to_end(block)
        new = self._extend(keys, paths, pinned, rotations)
        # The last block of a path is marked first, so it is evicted before those that it follows,
        # without which it could never be found.
        for path in paths:
            for block in reversed(path):
                self._keys.move_to_end(block)
        return [
            BlockTable(known, min(its, default=0), tuple(its.values()), tuple(path))
            for known, its, path in zip(found, new, paths, strict=True)
        ]

    def _extend(
        self,
        keys: Sequence[bytes],
        paths: Sequence[list[int]],
        pinned: set[int],
        rotations: Sequence[int],
    ) -> list[dict[int, int]]:
        """Extend the paths as far as the pool allows, all of them by one block at a time.

        Returns:
            For each the blocks that it is the first to have, by their number in the sequence.
        """
        new: list[dict[int, int]] = [{} for _ in keys]
        # Breadth first: where the pool is too small, each sequence has its beginning in it, which
        # others are most likely to share.
        growing = [index for index, key in enumerate(keys) if len(key) >= _BLOCK_BYTES]
        depth = 0
        while growing:
            still = []
            for index in growing:
                path, start = paths[index], depth * _BLOCK_BYTES
                if depth >= len(path):
                    before = path[-1] if path else _before_first(rotations[index])
                    key = (before, keys[index][start : start + _BLOCK_BYTES])
                    block = self._blocks.get(key)
                    if block is None:
                        block = self._place(key, pinned)
                        if block is None:
                            continue
                        new[index][depth] = block
                    path.append(block)
                    pinned.add(block)
                if start + 2 * _BLOCK_BYTES <= len(keys[index]):
                    still.append(index)
            growing, depth = still, depth + 1
        return new

    def _place(self, key: tuple[int, bytes], pinned: set[int]) -> int | None:
        """A place for a new block, if need be the oldest one's; None where all are in use."""
        if self._free:
            block = self._free.pop()
        else:
            # Blocks in use were moved to the end: where the first is pinned, all are.
            block = next(iter(self._keys), _NONE)
            if block == _NONE or block in pinned:
                return None
            del self._blocks[self._keys.pop(block)]
            self._outputs.pop(block, None)
        self._blocks[key] = block
        self._keys[block] = key
        return block


@dataclass(frozen=True)
class CallPlan:
    """One call's work.

    Attributes:
        packs: of this replica.
        computed: tokens that all replicas compute.
        cached: tokens of all sequences that need no computing.
        known: kept outputs, by the row of the reward.
        keep: what to call with the outputs ``[S, K]`` of the call.
    """

    packs: list[PackedBatch]
    computed: int
    cached: int
    known: dict[int, np.ndarray] = field(default_factory=dict)
    keep: Callable[[np.ndarray], None] = lambda outputs: None


class PrefixCache:
    """Plans the calls of a model and its data parallel replicas; every rank plans all of them.

    ``slots`` is the size of each replica's pool in tokens, at most ``tokens``. For a model that
    reads the whole reply nothing from ``reply_marker`` on is kept, as its states are needed. Only
    sequences with the same ``rotation_by_length``, of ``ModelShape``, have blocks in common.
    """

    def __init__(
        self,
        tokens: int,
        layout: ParallelLayout,
        micro_batch_tokens: int,
        reply_marker: Sequence[int] | None = None,
        rotation_by_length: Callable[[int], int] = uniform_rope,
    ) -> None:
        blocks = tokens // BLOCK_TOKENS
        self._managers = [BlockManager(blocks) for _ in range(layout.dp)]
        self._spent = [0] * layout.dp
        self._replica = layout.dp_rank
        self._budget = micro_batch_tokens
        self._reply_marker = reply_marker
        self._rotation_by_length = rotation_by_length
        self.slots = blocks * BLOCK_TOKENS

    def reset_cache(self) -> None:
        """Evict all blocks: what was planned may not have been computed."""
        for manager in self._managers:
            manager.clear()

    def plan(
        self, sequences: Sequence[np.ndarray], reads: Sequence[SequenceReads] | None = None
    ) -> CallPlan:
        """Plan what to compute, in which packs; it counts as cached from here on.

        ``reads`` are places in each sequence, where turns or steps are scored.
        """
        keys = [as_key(self._kept(sequence)) for sequence in sequences]
        rotations = [self._rotation_by_length(len(sequence)) for sequence in sequences]
        places = [()] * len(keys) if reads is None else [own.places.tolist() for own in reads]
        packs: list[PackedBatch] = []
        computed = cached = 0
        known: dict[int, np.ndarray] = {}
        kept: list[tuple[BlockManager, BlockTable, SequenceReads]] = []
        for replica, members in enumerate(self._share_out(sequences, keys, places, rotations)):
            manager = self._managers[replica]
            uses = manager.use(
                [keys[member] for member in members],
                [places[member] for member in members],
                [rotations[member] for member in members],
            )
            rest = reads
            if reads is not None:
                rest = list(reads)
                for member, use in zip(members, uses, strict=True):
                    own = manager.outputs_of(use.found, places[member])
                    known |= dict(zip(reads[member].rows, own, strict=False))
                    rest[member] = SequenceReads(
                        reads[member].places[len(own) :], reads[member].rows[len(own) :]
                    )
                    kept.append((manager, use, reads[member]))
            prefixes = dict(zip(members, _prefixes_of(uses), strict=True))
            groups = self._groups(sequences, self._budget, prefixes)
            size = sum(group.size for group in groups)
            self._spent[replica] += size
            computed += size
            cached += BLOCK_TOKENS * sum(len(use.found) for use in uses)
            # Every rank knows what all replicas cache, and packs only its own part.
            if replica == self._replica:
                stored = dict(zip(members, map(_stored_of, uses), strict=True))
                packs = pack_groups(sequences, groups, self._budget, stored, rest)

        def keep(outputs: np.ndarray) -> None:
            for manager, use, own in kept:
                manager.keep_outputs(use.path, own.places.tolist(), outputs[own.rows])

        return CallPlan(packs, computed, cached, known, keep)

    def _groups(
        self,
        sequences: Sequence[np.ndarray],
        budget: int,
        cached: Mapping[int, CachedPrefix | None] | None = None,
    ) -> list[PrefixGroup]:
        return find_prefix_groups(sequences, budget, cached, self._rotation_by_length)

    def _kept(self, sequence: np.ndarray) -> np.ndarray:
        """The part of a sequence that may be cached, and one token, which is always computed."""
        if self._reply_marker is None:
            return sequence
        return sequence[: max(0, find_marker(sequence, self._reply_marker)) + 1]

    def _share_out(
        self,
        sequences: Sequence[np.ndarray],
        keys: Sequence[bytes],
        reads: Sequence[Sequence[int]],
        rotations: Sequence[int],
    ) -> list[list[int]]:
        """Assign sequences to replicas: the largest groups first, each where it ends soonest.

        A group larger than a replica's share of all tokens is split.
        """
        replicas = range(len(self._managers))
        if len(replicas) == 1:
            return [list(range(len(sequences)))]
        total = sum(group.size for group in self._groups(sequences, self._budget))
        share = min(self._budget, -(-total // len(replicas)))
        known = [
            [
                BLOCK_TOKENS * len(of.find(*each))
                for each in zip(keys, reads, rotations, strict=True)
            ]
            for of in self._managers
        ]
        parts: list[list[int]] = [[] for _ in replicas]
        loads = [0] * len(replicas)
        groups = self._groups(sequences, share)
        for group in sorted(groups, key=lambda group: (-group.size, group.members[0])):
            costs = [_cost(group, sequences, known[replica]) for replica in replicas]
            # Among equals the replica with less work so far: its pool has more room.
            chosen = min(replicas, key=lambda r: (loads[r] + costs[r], self._spent[r], r))
            loads[chosen] += costs[chosen]
            parts[chosen] += group.members
        return [sorted(part) for part in parts]


def _cost(group: PrefixGroup, sequences: Sequence[np.ndarray], known: Sequence[int]) -> int:
    """Tokens of a group to compute if so many of each sequence are cached."""
    prefix = max(0, group.prefix - max(known[member] for member in group.members))
    rests = (len(sequences[member]) - max(group.prefix, known[member]) for member in group.members)
    return prefix + sum(rests)


def _slots_of(blocks: Sequence[int]) -> torch.Tensor:
    slots = np.array(blocks, dtype=np.int64)[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)
    return torch.from_numpy(slots.ravel())


def _prefixes_of(uses: Sequence[BlockTable]) -> list[CachedPrefix | None]:
    """The cached prefix of each sequence, one object for the same blocks."""
    distinct = dict.fromkeys(use.found for use in uses if use.found)
    made = {found: CachedPrefix(_slots_of(found)) for found in distinct}
    return [made.get(use.found) for use in uses]


def _stored_of(use: BlockTable) -> Stored | None:
    return Stored(use.first * BLOCK_TOKENS, _slots_of(use.new)) if use.new else None
