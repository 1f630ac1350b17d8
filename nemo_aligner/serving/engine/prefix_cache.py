"""The prefix cache: it knows which prefixes of samples are cached, and plans what to compute.

Keys and values are cached in blocks of 16 tokens. A block is identified by its preceding block and
its own token ids. The ids themselves are compared, so no hash collision can change a score. The
least recently used blocks are evicted first. Of one sequence, the last block is evicted first.

A layer with linear attention has no keys and values but a state, which is as large as those of many
tokens. So states are cached only behind chunks of 64 tokens where a sample ended or where samples
branched: "snapshots". A model with such layers continues a sample from the last snapshot in its
cached blocks, and computes the blocks behind the snapshot again. Snapshots have their own capacity;
the least recently used ones are evicted first. The first use of a snapshot where a sample ended
does not count, because it is mostly the next turn of a dialogue, which leaves its own snapshot.

If turns or steps of a sample are scored, the head's outputs at tokens of cached blocks are cached,
too, so that the next turn of a dialogue costs only its own tokens.

Every rank has the block managers of all data parallel replicas and makes the same calls, so all
ranks agree. The keys and values themselves are in the pool of each rank's model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from nemo_aligner.batch.cache_use import CachedPrefix, Stored
from nemo_aligner.batch.packed import PackedBatch
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
from nemo_aligner.models.shapes.linear_attention import CHUNK_TOKENS

_TOKEN_BYTES = 4  # bytes of a token id as int32
_BLOCK_BYTES = BLOCK_TOKENS * _TOKEN_BYTES
_CHUNK_BLOCKS = CHUNK_TOKENS // BLOCK_TOKENS
_NONE = -1  # the id that stands for no block


@dataclass(frozen=True)
class BlockTable:
    """The blocks of one sequence in one call.

    Attributes:
        cached: cached blocks at the beginning of the sequence, which need not be computed.
        first_new: index in the sequence of the first block that it computes and caches.
        new: blocks that the sequence computes and caches, from ``first_new`` on.
        path: all blocks of the sequence. Blocks between ``cached`` and ``new`` are computed by
            another sequence of the same call, or are cached but have no snapshot behind them.
        state: slot of the snapshot behind ``cached``; None in a model without linear attention.
        new_states: ``(tokens, slot)`` of each snapshot that the sequence computes and caches,
            behind its first ``tokens`` tokens.
    """

    cached: tuple[int, ...]
    first_new: int
    new: tuple[int, ...]
    path: tuple[int, ...] = ()
    state: int | None = None
    new_states: tuple[tuple[int, int], ...] = ()


def _root_of(rotation: int) -> int:
    """Return the id that a first block has as its preceding block.

    The id depends on ``rotation``, which selects the RoPE of a sequence, so that sequences with
    different RoPE share no blocks.
    """
    return _NONE - rotation


def as_key(tokens: np.ndarray) -> bytes:
    """Convert token ids to the bytes with which ``BlockManager`` identifies them."""
    return tokens.astype(np.int32).tobytes()


class BlockManager:
    """Looks up, places and evicts the blocks of a pool of ``capacity`` blocks.

    ``states`` is the number of snapshots in the pool; None for a model without linear attention.
    """

    def __init__(self, capacity: int, states: int | None = None) -> None:
        self._capacity = capacity
        self._state_capacity = states
        self.clear()

    def clear(self) -> None:
        """Evict all blocks."""
        self._blocks: dict[tuple[int, bytes], int] = {}
        # block -> (id of the preceding block, token ids), the least recently used first; in this
        # order, a block comes before its preceding block, so that it is evicted first
        self._keys: OrderedDict[int, tuple[int, bytes]] = OrderedDict()
        # block -> position in the block -> outputs of the head at that token
        self._outputs: dict[int, dict[int, np.ndarray]] = {}
        self._free = list(range(self._capacity - 1, -1, -1))
        # the block in front of a snapshot -> the snapshot's slot, the least recently used first
        self._states: OrderedDict[int, int] = OrderedDict()
        self._free_states = list(range((self._state_capacity or 0) - 1, -1, -1))
        # blocks in front of snapshots behind which samples branched
        self._branches: set[int] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, key: bytes, reads: Sequence[int] = (), rotation: int = 0) -> tuple[int, ...]:
        """Find the cached blocks at the beginning of a sequence, which it need not compute.

        The block with the last token is not included, because the last token is always computed.
        The blocks end before the first position of ``reads`` whose outputs are not cached.
        Sequences with another ``rotation`` (see ``ModelShape``) have other blocks. In a model with
        linear attention, the blocks end at a snapshot.
        """
        return self._until_state(self._match(key, reads, rotation))

    def _until_state(self, cached: tuple[int, ...]) -> tuple[int, ...]:
        if self._state_capacity is None:
            return cached
        ends = range(len(cached) // _CHUNK_BLOCKS * _CHUNK_BLOCKS, 0, -_CHUNK_BLOCKS)
        return cached[: next((end for end in ends if cached[end - 1] in self._states), 0)]

    def _match(self, key: bytes, reads: Sequence[int], rotation: int) -> tuple[int, ...]:
        """Find what ``find`` finds, but whether or not there is a snapshot."""
        cached: list[int] = []
        block = _root_of(rotation)
        positions: dict[int, list[int]] = {}
        for position in reads:
            positions.setdefault(position // BLOCK_TOKENS, []).append(position % BLOCK_TOKENS)
        # The block with the last token is skipped, because the head reads the hidden state of that
        # token, so it must be computed.
        for start in range(0, len(key) - _BLOCK_BYTES, _BLOCK_BYTES):
            child = self._blocks.get((block, key[start : start + _BLOCK_BYTES]))
            if child is None:
                break
            inside = positions.get(len(cached))
            if inside is not None and not set(inside) <= set(self._outputs.get(child, ())):
                break
            block = child
            cached.append(block)
        return tuple(cached)

    def outputs_of(self, cached: Sequence[int], reads: Sequence[int]) -> list[np.ndarray]:
        """Return the cached head outputs, each ``[K]``, at positions ``reads`` in cached blocks."""
        places = (divmod(position, BLOCK_TOKENS) for position in reads)
        return [
            self._outputs[cached[number]][place] for number, place in places if number < len(cached)
        ]

    def keep_outputs(self, path: Sequence[int], reads: Sequence[int], outputs: np.ndarray) -> None:
        """Cache the head's outputs at those positions of ``reads`` that are in the blocks ``path``.

        ``outputs`` is ``[s, K]``, one row for each of the s positions in ``reads``.
        """
        for position, row in zip(reads, outputs, strict=True):
            number, place = divmod(position, BLOCK_TOKENS)
            if number < len(path):
                self._outputs.setdefault(path[number], {})[place] = row

    def allocate(
        self,
        keys: Sequence[bytes],
        reads: Sequence[Sequence[int]] | None = None,
        rotations: Sequence[int] | None = None,
    ) -> list[BlockTable]:
        """Look up the sequences of one call, and allocate blocks for tokens that are not cached.

        A call does not evict blocks that it uses itself. If the pool is too small for all blocks,
        the first ones of each sequence are cached.

        Args:
            keys: token ids of each sequence, as bytes (``as_key``).
            reads: positions in each sequence at which turns or steps are scored.
            rotations: for each sequence, the value that selects its RoPE; see ``find``.

        Returns:
            The blocks of each sequence.
        """
        reads = [()] * len(keys) if reads is None else reads
        rotations = [0] * len(keys) if rotations is None else rotations
        matched = [self._match(*args) for args in zip(keys, reads, rotations, strict=True)]
        cached = [self._until_state(blocks) for blocks in matched]
        paths = [list(blocks) for blocks in matched]
        pinned = {block for blocks in matched for block in blocks}
        for block in pinned:
            self._keys.move_to_end(block)
        new = self._extend(keys, paths, pinned, rotations)
        # The last block of a path is marked as used first, so it is evicted before its preceding
        # blocks. Without those, no lookup could find it any more.
        for path in paths:
            for block in reversed(path):
                self._keys.move_to_end(block)
        states = self._place_states(keys, cached, paths, new)
        return [
            BlockTable(
                blocks,
                min(added, default=0),
                tuple(added.values()),
                tuple(path),
                self._states[blocks[-1]] if blocks and self._state_capacity is not None else None,
                tuple(placed),
            )
            for blocks, added, path, placed in zip(cached, new, paths, states, strict=True)
        ]

    def _place_states(
        self,
        keys: Sequence[bytes],
        cached: Sequence[tuple[int, ...]],
        paths: Sequence[Sequence[int]],
        new: Sequence[Mapping[int, int]],
    ) -> list[list[tuple[int, int]]]:
        """Place a snapshot where each sequence leaves a path of others, and where it ends.

        A snapshot is behind the last whole chunk there. It is on the sequence's path and behind
        the sequence's cached blocks, so that the sequence computes it. Branches are placed first:
        if there is too little room for all, they are more probably read again.

        Args:
            keys, cached, paths, new: for each sequence its token ids, what ``_until_state`` and
                ``_extend`` return, and its path.

        Returns:
            For each sequence ``BlockTable.new_states``.
        """
        placed: list[list[tuple[int, int]]] = [[] for _ in keys]
        if self._state_capacity is None:
            return placed
        used = [blocks[-1] for blocks in cached if blocks]
        for block in used:
            if block in self._branches:
                self._states.move_to_end(block)
            self._branches.add(block)
        pinned = set(used)
        branches = [[min(added, default=0) // _CHUNK_BLOCKS] for added in new]
        # A sample's last chunk may end with the sample. Then the same sample, scored again, needs
        # the snapshot in front of that chunk, and a longer sample the one behind it.
        lengths = [len(key) // _TOKEN_BYTES for key in keys]
        ends = [[(length - 1) // CHUNK_TOKENS, length // CHUNK_TOKENS] for length in lengths]
        for is_branch, chunks_of in ((True, branches), (False, ends)):
            for index, (chunks, path) in enumerate(zip(chunks_of, paths, strict=True)):
                for chunk in chunks:
                    end = chunk * _CHUNK_BLOCKS
                    if not len(cached[index]) < end <= len(path):
                        continue
                    block = path[end - 1]
                    if is_branch:
                        self._branches.add(block)
                    slot = self._place_state(block, pinned)
                    if slot is not None:
                        placed[index].append((chunk * CHUNK_TOKENS, slot))
        return placed

    def _place_state(self, block: int, pinned: set[int]) -> int | None:
        """Place the snapshot behind ``block``, evicting the least recently used one if necessary.

        Returns:
            Its slot; None if there is a snapshot already, or if the call uses all slots: those of
            the snapshots behind ``pinned``.
        """
        if block in self._states:
            return None
        if not self._free_states:
            oldest = next((block for block in self._states if block not in pinned), None)
            if oldest is None:
                return None
            self._evict_state(oldest)
        slot = self._states[block] = self._free_states.pop()
        pinned.add(block)
        return slot

    def _evict_state(self, block: int) -> None:
        """Evict the snapshot behind ``block``, if there is one."""
        if block in self._states:
            self._free_states.append(self._states.pop(block))
        self._branches.discard(block)

    def _extend(
        self,
        keys: Sequence[bytes],
        paths: Sequence[list[int]],
        pinned: set[int],
        rotations: Sequence[int],
    ) -> list[dict[int, int]]:
        """Add blocks to each path (a sequence's blocks) until it is complete or the pool is full.

        Returns:
            For each path, a dict from a block's index in the sequence to the block, with the blocks
            that were placed for this path.
        """
        new: list[dict[int, int]] = [{} for _ in keys]
        # Breadth first: if the pool is too small, it holds the beginning of every sequence, which
        # is what sequences most probably share.
        growing = [index for index, key in enumerate(keys) if len(key) >= _BLOCK_BYTES]
        depth = 0
        while growing:
            unfinished = []
            for index in growing:
                path, start = paths[index], depth * _BLOCK_BYTES
                if depth >= len(path):
                    preceding = path[-1] if path else _root_of(rotations[index])
                    key = (preceding, keys[index][start : start + _BLOCK_BYTES])
                    block = self._blocks.get(key)
                    if block is None:
                        block = self._place(key, pinned)
                        if block is None:
                            continue
                        new[index][depth] = block
                    path.append(block)
                    pinned.add(block)
                if start + 2 * _BLOCK_BYTES <= len(keys[index]):
                    unfinished.append(index)
            growing, depth = unfinished, depth + 1
        return new

    def _place(self, key: tuple[int, bytes], pinned: set[int]) -> int | None:
        """Add a block, and evict the least recently used one if the pool is full.

        ``key`` has the preceding block and the token ids.

        Returns:
            The block; None if the call itself uses all blocks of the pool (``pinned``).
        """
        if self._free:
            block = self._free.pop()
        else:
            # The blocks that this call uses were moved to the end, so if the first one is among
            # them, all are.
            block = next(iter(self._keys), _NONE)
            if block == _NONE or block in pinned:
                return None
            del self._blocks[self._keys.pop(block)]
            self._outputs.pop(block, None)
            self._evict_state(block)
        self._blocks[key] = block
        self._keys[block] = key
        return block


@dataclass(frozen=True)
class CallPlan:
    """What one call of the model computes, and what it takes from the cache.

    A call reads the head's K outputs at S positions: its result is ``[S, K]``.

    Attributes:
        packs: packs of sequences that this replica computes.
        num_computed: tokens that all replicas compute.
        num_cached: tokens of all sequences that need not be computed.
        cached_outputs: row of the result -> the cached outputs ``[K]`` for it.
        keep: function that stores the result ``[S, K]`` in the cache.
    """

    packs: list[PackedBatch]
    num_computed: int
    num_cached: int
    cached_outputs: dict[int, np.ndarray] = field(default_factory=dict)
    keep: Callable[[np.ndarray], None] = lambda outputs: None


class PrefixCache:
    """Plans the calls of a model and its data parallel replicas; every rank plans all of them.

    Attributes:
        slots: size of each replica's pool in tokens: ``tokens``, rounded down to whole blocks.

    ``states`` is the number of snapshots in each pool; None for a model without linear attention.

    A model with a ``reply_marker`` (token ids at which a reply begins) reads the hidden states of
    the whole reply, so nothing from the marker on is cached. Sequences share blocks only if they
    have the same ``length_dependent_rope`` (see ``ModelShape``).
    """

    def __init__(
        self,
        tokens: int,
        layout: ParallelLayout,
        micro_batch_tokens: int,
        reply_marker: Sequence[int] | None = None,
        length_dependent_rope: Callable[[int], int] = uniform_rope,
        states: int | None = None,
    ) -> None:
        blocks = tokens // BLOCK_TOKENS
        self._managers = [BlockManager(blocks, states) for _ in range(layout.dp)]
        self._computed_tokens = [0] * layout.dp
        self._replica = layout.dp_rank
        self._budget = micro_batch_tokens
        self._reply_marker = reply_marker
        self._length_dependent_rope = length_dependent_rope
        self.slots = blocks * BLOCK_TOKENS

    def reset_cache(self) -> None:
        """Evict all blocks, because a planned call may have failed to compute them."""
        for manager in self._managers:
            manager.clear()

    def plan(
        self, sequences: Sequence[np.ndarray], reads: Sequence[SequenceReads] | None = None
    ) -> CallPlan:
        """Plan which packs (sequences concatenated for one forward pass) this replica computes.

        The blocks that they compute count as cached from now on.

        Args:
            sequences: ``[tokens]`` token ids of each sample.
            reads: positions in each sequence at which turns or steps are scored.
        """
        keys = [as_key(self._cacheable_part(sequence)) for sequence in sequences]
        rotations = [self._length_dependent_rope(len(sequence)) for sequence in sequences]
        positions = [()] * len(keys) if reads is None else [read.places.tolist() for read in reads]
        packs: list[PackedBatch] = []
        num_computed = num_cached = 0
        cached_outputs: dict[int, np.ndarray] = {}
        tables: list[tuple[BlockManager, BlockTable, SequenceReads]] = []
        assignment = self._assign_replicas(sequences, keys, positions, rotations)
        for replica, members in enumerate(assignment):
            manager = self._managers[replica]
            member_tables = manager.allocate(
                [keys[member] for member in members],
                [positions[member] for member in members],
                [rotations[member] for member in members],
            )
            uncached_reads = None if reads is None else list(reads)
            if reads is not None and uncached_reads is not None:
                for member, table in zip(members, member_tables, strict=True):
                    places, rows = reads[member].places, reads[member].rows
                    outputs = manager.outputs_of(table.cached, positions[member])
                    cached_outputs |= dict(zip(rows, outputs, strict=False))
                    uncached_reads[member] = SequenceReads(
                        places[len(outputs) :], rows[len(outputs) :]
                    )
                    tables.append((manager, table, reads[member]))
            prefixes = dict(zip(members, _cached_prefixes(member_tables), strict=True))
            groups = self._find_groups(sequences, self._budget, prefixes)
            size = sum(group.size for group in groups)
            self._computed_tokens[replica] += size
            num_computed += size
            num_cached += BLOCK_TOKENS * sum(len(table.cached) for table in member_tables)
            # Every rank knows what all replicas cache, but packs only for its own replica.
            if replica == self._replica:
                stored = dict(zip(members, map(_stored_of, member_tables), strict=True))
                packs = pack_groups(sequences, groups, self._budget, stored, uncached_reads)

        def keep(outputs: np.ndarray) -> None:
            for manager, table, read in tables:
                manager.keep_outputs(table.path, read.places.tolist(), outputs[read.rows])

        return CallPlan(packs, num_computed, num_cached, cached_outputs, keep)

    def _find_groups(
        self,
        sequences: Sequence[np.ndarray],
        budget: int,
        cached: Mapping[int, CachedPrefix | None] | None = None,
    ) -> list[PrefixGroup]:
        return find_prefix_groups(sequences, budget, cached, self._length_dependent_rope)

    def _cacheable_part(self, sequence: np.ndarray) -> np.ndarray:
        """Return the tokens of a sequence that may be cached, and one more token.

        The extra token is needed because ``BlockManager`` never counts the last one as cached.
        """
        if self._reply_marker is None:
            return sequence
        return sequence[: max(0, find_marker(sequence, self._reply_marker)) + 1]

    def _assign_replicas(
        self,
        sequences: Sequence[np.ndarray],
        keys: Sequence[bytes],
        reads: Sequence[Sequence[int]],
        rotations: Sequence[int],
    ) -> list[list[int]]:
        """Assign groups with a shared prefix to replicas: largest first, to the least loaded one.

        A group that is larger than a replica's share of all tokens is split.
        """
        replicas = range(len(self._managers))
        if len(replicas) == 1:
            return [list(range(len(sequences)))]
        total = sum(group.size for group in self._find_groups(sequences, self._budget))
        share = min(self._budget, -(-total // len(replicas)))
        num_cached = [
            [
                BLOCK_TOKENS * len(manager.find(*args))
                for args in zip(keys, reads, rotations, strict=True)
            ]
            for manager in self._managers
        ]
        parts: list[list[int]] = [[] for _ in replicas]
        loads = [0] * len(replicas)
        groups = self._find_groups(sequences, share)
        for group in sorted(groups, key=lambda group: (-group.size, group.members[0])):
            costs = [_count_uncached(group, sequences, num_cached[rank]) for rank in replicas]
            # Among replicas with equal load, choose the one that has computed fewer tokens so far,
            # because its pool has more room.
            chosen = min(replicas, key=lambda r: (loads[r] + costs[r], self._computed_tokens[r], r))
            loads[chosen] += costs[chosen]
            parts[chosen] += group.members
        return [sorted(part) for part in parts]


def _count_uncached(
    group: PrefixGroup, sequences: Sequence[np.ndarray], num_cached: Sequence[int]
) -> int:
    """Count the tokens that a group with a shared prefix must compute.

    ``num_cached`` has the number of cached tokens of each sequence in ``sequences``.
    """
    prefix = max(0, group.prefix - max(num_cached[member] for member in group.members))
    suffixes = (
        len(sequences[member]) - max(group.prefix, num_cached[member]) for member in group.members
    )
    return prefix + sum(suffixes)


def _slots_of(blocks: Sequence[int]) -> torch.Tensor:
    slots = np.array(blocks, dtype=np.int64)[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)
    return torch.from_numpy(slots.ravel())


def _cached_prefixes(tables: Sequence[BlockTable]) -> list[CachedPrefix | None]:
    """Return the cached prefix of each sequence; sequences with equal prefixes share an object."""
    distinct = {table.cached: table.state for table in tables if table.cached}
    prefixes = {
        blocks: CachedPrefix(_slots_of(blocks), state) for blocks, state in distinct.items()
    }
    return [prefixes.get(table.cached) for table in tables]


def _stored_of(table: BlockTable) -> Stored | None:
    if not table.new and not table.new_states:
        return None
    return Stored(table.first_new * BLOCK_TOKENS, _slots_of(table.new), table.new_states)
