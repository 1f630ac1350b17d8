"""A pack's chunks of 64 tokens, as a tree, for layers that carry a state along a sequence.

Every chunk begins at a multiple of 64 tokens from the start of its sequence, so a token's output
does not depend on the other sequences of the pack. Sequences that share a prefix share the whole
chunks of that prefix, so the chunks of a pack form a tree. The last tokens of a prefix, which fill
no whole chunk, are computed again in a chunk of each sequence. In a sequence that begins with a
cached prefix, the first chunk comes after that prefix and starts from the state in the cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from nemo_aligner.batch.cache_use import NO_STATES, StateUse
from nemo_aligner.models.attention.segments import chains_of
from nemo_aligner.models.shapes.linear_attention import CHUNK_TOKENS
from nemo_aligner.utils.host_transfer import all_to_device, to_device


class Level(NamedTuple):
    """Chunks at the same depth of the tree, which are numbered consecutively.

    Attributes:
        start: number of the first chunk.
        end: number after the last chunk.
        parents: ``[end - start]`` int64: for each chunk the index, in the previous level, of the
            chunk that precedes it in its sequence. In the first level it is empty; but if the pack
            has cached prefixes, it is p + 1 for a sequence that begins with cached prefix p, and 0
            for a sequence without a cached prefix.
        stored: ``[m]`` int64, the chunks of this level, counted from ``start``, after which the
            state is stored in the pool; None if there are none.
        slots: ``[m]`` int64 slots of the pool to store these states in.
    """

    start: int
    end: int
    parents: Tensor
    stored: Tensor | None = None
    slots: Tensor | None = None


class RunLevel(NamedTuple):
    """Runs of chunks with the same number of branches before them, numbered consecutively.

    Attributes:
        start: number of the first run's first chunk.
        end: number after the last run's last chunk.
        bounds: ``[m + 1]`` int64, for each of the m runs its first token, counted from the level's
            first token, and the number of tokens of the level; the ``cu_seqlens`` of kernels.
        chunks: ``[end - start, 2]`` int64, for each chunk the index of its run in the level, and
            its index in the run.
        parents: ``[m]`` int64, for each run the index, in the previous level, of the run that
            precedes it; empty in the first level.
    """

    start: int
    end: int
    bounds: Tensor
    chunks: Tensor
    parents: Tensor


class Runs(NamedTuple):
    """The chunks of a tree, ordered so that those between two branches are adjacent.

    A kernel computes a whole run in one call, and all runs of a level in the same call. Pairs that
    share their prompts have two levels, however long they are.

    Attributes:
        rows, places: as in ``ChunkTree``, for this order of the chunks.
        levels: runs by the number of branches before them.
    """

    rows: Tensor
    places: Tensor
    levels: tuple[RunLevel, ...]


@dataclass(frozen=True, eq=False)
class ChunkTree:
    """The chunks of a pack of T tokens, ordered by their depth.

    Attributes:
        rows: ``[N, previous + 64]`` int64 rows of the pack that each of the N chunks reads: the
            ``previous`` rows before the chunk, which the convolution needs, and the chunk's own 64;
            -1 where the sequence has no row. Rows from T on stand for the last ``previous`` tokens
            of each of the P cached prefixes.
        places: ``[T]`` int64 index of each token's output in the ``N * 64`` outputs of all chunks.
        levels: chunks by their depth in the tree, from the first chunks of the sequences on.
        read_slots: ``[P]`` int64 slots, in the pool, of the states after the cached prefixes; None
            if the pack has no cached prefix.
        runs: the same chunks in another order, for kernels that compute them by runs; None if no
            such kernel is used.
    """

    rows: Tensor
    places: Tensor
    levels: tuple[Level, ...]
    read_slots: Tensor | None = None
    runs: Runs | None = None

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        prefixes: Sequence[int],
        previous: int,
        device: torch.device | str,
        states: StateUse = NO_STATES,
        *,
        has_runs: bool = False,
    ) -> ChunkTree:
        """Build the tree of a pack's segments (``PackedSegments.lengths`` and ``prefixes``).

        Args:
            previous: how many rows before a chunk the convolution reads: its taps minus 1.
            states: which states the pack reads from the pool, and which it stores there.
            has_runs: also list the runs, which a pack with cached prefixes cannot have.
        """
        num_cached, num_tokens = len(states.read_slots), sum(lengths)
        parts_by_level, parents_by_level = _list_chunks(lengths, prefixes, previous, num_cached)
        rows = np.stack([part for parts in parts_by_level for part in parts])
        places = _places_of_tokens(rows[:, previous:], num_tokens)
        bounds = [0, *accumulate(map(len, parts_by_level))]
        host = [rows, places, *(np.array(parents, np.int64) for parents in parents_by_level)]
        on_device, of_tokens, *parents = all_to_device(list(map(torch.from_numpy, host)), device)
        levels = map(Level, bounds[:-1], bounds[1:], parents)
        runs = None
        if has_runs:
            runs = _make_runs(rows, previous, num_tokens, bounds, parents_by_level, device)
        tree = cls(on_device, of_tokens, tuple(levels), runs=runs)
        return _with_states(tree, places, states, device)


def _places_of_tokens(of_chunks: np.ndarray, num_tokens: int) -> np.ndarray:
    """Return ``ChunkTree.places`` for the rows ``[N, 64]`` of N chunks.

    The last tokens of a shared prefix may be in the chunks of several sequences. Every one of these
    chunks computes the same output for such a token, so a place may be in any of them.
    """
    places, flat = np.zeros(num_tokens, dtype=np.int64), of_chunks.reshape(-1)
    places[flat[flat >= 0]] = np.flatnonzero(flat >= 0)
    return places


def _make_runs(
    rows: np.ndarray,
    previous: int,
    num_tokens: int,
    bounds: Sequence[int],
    parents_by_level: Sequence[Sequence[int]],
    device: torch.device | str,
) -> Runs:
    """Make the runs of the chunks with these ``rows``, whose levels begin at ``bounds``."""
    runs_by_level, run_parents = _list_runs(bounds, parents_by_level)
    order = [chunk for runs in runs_by_level for run in runs for chunk in run]
    ordered = rows[order]
    host = [ordered, _places_of_tokens(ordered[:, previous:], num_tokens)]
    sizes = [0]
    for runs, parents in zip(runs_by_level, run_parents, strict=True):
        lengths = list(map(len, runs))
        chunks = [(run, chunk) for run, length in enumerate(lengths) for chunk in range(length)]
        token_bounds = CHUNK_TOKENS * np.array([0, *accumulate(lengths)], np.int64)
        host += [token_bounds, np.array(chunks, np.int64), np.array(parents, np.int64)]
        sizes.append(sizes[-1] + len(chunks))
    on_device, of_tokens, *fields = all_to_device(list(map(torch.from_numpy, host)), device)
    by_kind = (fields[kind::3] for kind in range(3))
    return Runs(on_device, of_tokens, tuple(map(RunLevel, sizes[:-1], sizes[1:], *by_kind)))


def _list_runs(
    bounds: Sequence[int], parents_by_level: Sequence[Sequence[int]]
) -> tuple[list[list[list[int]]], list[list[int]]]:
    """List the chunks of every run and its parent's index, by the number of branches before it."""
    parent_of = {
        bounds[depth] + index: bounds[depth - 1] + parent
        for depth, parents in enumerate(parents_by_level)
        for index, parent in enumerate(parents)
    }
    num_children = Counter(parent_of.values())
    runs: list[list[list[int]]] = []
    parents: list[list[int]] = []
    run_of: dict[int, tuple[int, int]] = {}  # level, and index in the level, by chunk
    for chunk in range(bounds[-1]):  # in this order a parent comes before its children
        parent = parent_of.get(chunk)
        if parent is not None and num_children[parent] == 1:
            level, index = run_of[chunk] = run_of[parent]
            runs[level][index].append(chunk)
            continue
        level = 0 if parent is None else run_of[parent][0] + 1
        if level == len(runs):
            runs.append([])
            parents.append([])
        run_of[chunk] = level, len(runs[level])
        runs[level].append([chunk])
        if parent is not None:
            parents[level].append(run_of[parent][1])
    return runs, parents


def _with_states(
    tree: ChunkTree, places: np.ndarray, states: StateUse, device: torch.device | str
) -> ChunkTree:
    """Add to a tree which states are read and stored; ``places`` is ``tree.places`` on the host."""
    levels = list(tree.levels)
    chunks = places[list(states.stored)] // CHUNK_TOKENS
    slots = np.array(states.slots, np.int64)
    depths = np.searchsorted([level.end for level in levels], chunks, side="right")
    for depth in set(depths.tolist()):
        of_level = depths == depth
        host = chunks[of_level] - levels[depth].start, slots[of_level]
        stored, to_slots = all_to_device([*map(torch.from_numpy, host)], device)
        levels[depth] = levels[depth]._replace(stored=stored, slots=to_slots)
    read_slots = to_device(torch.tensor(states.read_slots), device) if states.read_slots else None
    return replace(tree, levels=tuple(levels), read_slots=read_slots)


def _list_chunks(
    lengths: Sequence[int], prefixes: Sequence[int], previous: int, num_cached: int
) -> tuple[list[list[np.ndarray]], list[list[int]]]:
    """List the rows ``[previous + 64]`` of every chunk and its parent's index, level by level."""
    starts = [0, *accumulate(lengths)]
    in_front = starts[-1] + np.arange(num_cached * previous).reshape(num_cached, previous)
    shared = set(prefixes)
    parts: list[list[np.ndarray]] = []
    parents: list[list[int]] = []
    places: dict[int, int] = {}  # maps the last row of a chunk to the chunk's index in its level
    for segment, chain in enumerate(chains_of(prefixes, num_cached)):
        if segment + num_cached in shared:
            continue  # this segment is a prefix, so it is listed as a part of longer sequences
        local = [*(number - num_cached for number in chain if number >= num_cached), segment]
        spans = [np.arange(starts[number], starts[number + 1]) for number in local]
        count = sum(map(len, spans))
        cached = chain[0] if chain and chain[0] < num_cached else -1
        first = in_front[cached] if cached >= 0 else np.full(previous, -1)
        sequence = np.concatenate([first, *spans, np.full(-count % CHUNK_TOKENS, -1)])
        parent = cached + 1
        for level, start in enumerate(range(0, count, CHUNK_TOKENS)):
            # The last row identifies a chunk, because a row has one position, in one sequence or
            # in a prefix that several sequences share.
            last = int(sequence[previous + min(start + CHUNK_TOKENS, count) - 1])
            if level == len(parts):
                parts.append([])
                parents.append([])
            if last not in places:
                places[last] = len(parts[level])
                parts[level].append(sequence[start : start + previous + CHUNK_TOKENS])
                if level or num_cached:
                    parents[level].append(parent)
            parent = places[last]
    return parts, parents


def decays_of_chunk(decay: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the logarithms of the factors by which the tokens of a chunk decay its state.

    Args:
        decay: ``[..., 64]`` logarithm of each token's factor; at most 0.

    Returns:
        The logarithms ``[..., 64]`` of the decay from the chunk's start to each token, and the
        factors ``[..., 64, 64]`` by which what a token (last axis) writes has decayed when another
        one reads it; 0 for a token that reads before the write.
    """
    total = decay.cumsum(-1)
    later = torch.ones(CHUNK_TOKENS, CHUNK_TOKENS, dtype=torch.bool, device=decay.device).triu(1)
    # Mask before exp, because exp would overflow for pairs with a later token.
    between = total.unsqueeze(-1) - total.unsqueeze(-2)
    return total, between.masked_fill(later, float("-inf")).exp()
