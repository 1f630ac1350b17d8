"""The prefix cache: it knows which prefixes of samples are cached, and plans what to compute.

Keys and values (in latent attention: latents) are cached in blocks of 16 tokens. A block is
identified by its preceding block and its own token ids. The ids themselves are compared, so no hash
collision can change a score. The least recently used blocks are evicted first, and within a
sequence the last block.

A layer with linear attention has a recurrent state instead of keys and values. The states of all
such layers after a token are a "snapshot". It is as large as the keys and values of many tokens, so
snapshots are cached only where a sample ended or where samples branched, each time after the last
whole chunk of 64 tokens. A model with such layers continues a sample from the last snapshot in its
cached blocks, and computes all later tokens again. Snapshots have their own capacity, and the least
recently used one is evicted first. If a snapshot was stored at a sample's end, its first use does
not make it recently used: that use is mostly the next turn of a dialogue, which stores a later
snapshot.

If turns or steps of a sample are scored, the head's outputs at tokens of cached blocks are also
cached, so that the next turn of a dialogue costs only its own tokens.

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
    attention_copies_keys,
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
        path: all blocks of the sequence. Blocks after ``cached`` that are not in ``new`` are
            computed by another sequence of the same call, or are cached, but no snapshot follows
            them.
        state: slot of the snapshot at the end of ``cached``; None if ``cached`` is empty, or in a
            model without linear attention.
        new_states: pairs ``(tokens, slot)``: the sequence stores a snapshot after its first
            ``tokens`` tokens in ``slot``.
    """

    cached: tuple[int, ...]
    first_new: int
    new: tuple[int, ...]
    path: tuple[int, ...] = ()
    state: int | None = None
    new_states: tuple[tuple[int, int], ...] = ()


def _root_of(rotation: int) -> int:
    """Return the id that stands for "no preceding block" in the key of a sequence's first block.

    The id depends on ``rotation``, the number that selects a sequence's RoPE, so that sequences
    with different RoPE share no blocks.
    """
    return _NONE - rotation


def as_key(tokens: np.ndarray) -> bytes:
    """Convert token ids to the bytes with which ``BlockManager`` identifies them."""
    return tokens.astype(np.int32).tobytes()


class BlockManager:
    """Decides where each block of tokens is stored in a pool of ``capacity`` blocks.

    ``states`` is the number of snapshots for which the pool has room; None for a model without
    linear attention.
    """

    def __init__(self, capacity: int, states: int | None = None) -> None:
        self._capacity = capacity
        self._state_capacity = states
        self.clear()

    def clear(self) -> None:
        """Evict all blocks."""
        self._blocks: dict[tuple[int, bytes], int] = {}
        # block -> (id of the preceding block, token ids), in the order of eviction: the least
        # recently used first, and a block before its preceding block
        self._keys: OrderedDict[int, tuple[int, bytes]] = OrderedDict()
        # block -> position in the block -> outputs of the head at that token
        self._outputs: dict[int, dict[int, np.ndarray]] = {}
        self._free = list(range(self._capacity - 1, -1, -1))
        # last block before a snapshot -> the snapshot's slot, the least recently used first
        self._states: OrderedDict[int, int] = OrderedDict()
        self._free_states = list(range((self._state_capacity or 0) - 1, -1, -1))
        # the keys of ``_states`` whose snapshots count as used: samples branched there, or one was
        # read
        self._branches: set[int] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, key: bytes, reads: Sequence[int] = (), rotation: int = 0) -> tuple[int, ...]:
        """Find the cached blocks at the beginning of a sequence, which need not be computed.

        The block with the last token is not included, because the last token is always computed.
        The blocks end before the first position of ``reads`` whose outputs are not cached.
        Sequences with another ``rotation`` (see ``ModelShape``) have other blocks. In a model with
        linear attention, only blocks up to the last snapshot are returned.
        """
        return self._until_state(self._match(key, reads, rotation))

    def _until_state(self, cached: tuple[int, ...]) -> tuple[int, ...]:
        if self._state_capacity is None:
            return cached
        ends = range(len(cached) // _CHUNK_BLOCKS * _CHUNK_BLOCKS, 0, -_CHUNK_BLOCKS)
        return cached[: next((end for end in ends if cached[end - 1] in self._states), 0)]

    def _match(self, key: bytes, reads: Sequence[int], rotation: int) -> tuple[int, ...]:
        """Find the cached blocks as ``find`` does, but do not require a snapshot at their end."""
        cached: list[int] = []
        block = _root_of(rotation)
        positions: dict[int, list[int]] = {}
        for position in reads:
            positions.setdefault(position // BLOCK_TOKENS, []).append(position % BLOCK_TOKENS)
        # Stop before the block with the last token: the head reads this token's hidden state, so it
        # is always computed.
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
        # Mark a path's last block as used first, so that it is evicted before its preceding blocks:
        # without these, no lookup could find it.
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
        """Choose where each sequence stores snapshots: where it branches, and at its end.

        A snapshot is stored after the last whole chunk of 64 tokens before that point, if the
        sequence computes this chunk. Branches come first: if there is no room for all, they are
        more likely to be used again.

        Args:
            keys, cached, paths, new: for each sequence its token ids, its cached blocks
                (``_until_state``), all its blocks, and the blocks that it adds (``_extend``).

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
        # If a sample's last chunk ends exactly with the sample, store snapshots before and after
        # it: the same sample, scored again, needs the first (its last token is computed), a longer
        # one the second.
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
        """Reserve a slot for the snapshot after ``block``; evict another one if necessary.

        Returns:
            The slot. None if there is a snapshot after ``block`` already, or if the call itself
            uses all snapshots (those after the blocks ``pinned``).
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
        """Evict the snapshot after ``block``, if there is one."""
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
            # This call has moved all blocks that it uses to the end. So if even the first block is
            # pinned, all blocks are.
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
    """What one call of the model computes, and what it reads from the cache.

    A call reads the head's K outputs at S positions: its result is ``[S, K]``.

    Attributes:
        packs: packs of sequences that this replica computes.
        num_computed: tokens that all replicas compute.
        num_cached: tokens of all sequences that are not computed, because they are cached.
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
        """Evict all blocks: a failed call may not have computed those that it was to add."""
        for manager in self._managers:
            manager.clear()

    def plan(
        self, sequences: Sequence[np.ndarray], reads: Sequence[SequenceReads] | None = None
    ) -> CallPlan:
        """Plan which packs (sequences concatenated for one forward pass) this replica computes.

        From now on, later plans treat the blocks that these packs compute as cached.

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
            groups = find_prefix_groups(
                sequences,
                self._budget,
                prefixes,
                self._length_dependent_rope,
                attention_copies_keys(),
            )
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

    def _find_groups(self, sequences: Sequence[np.ndarray], budget: int) -> list[PrefixGroup]:
        """Group sequences as if none of them had a cached prefix."""
        return find_prefix_groups(
            sequences, budget, length_dependent_rope=self._length_dependent_rope
        )

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
