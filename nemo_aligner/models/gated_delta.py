"""Gated delta rule over a pack of sequences that share prefixes, by a tree of chunks.

Each value head has a state ``S [k, v]``. A token with query q, key k, value v, decay g <= 0 and
write strength beta changes it to ``S <- exp(g) S + k (beta (v - k^T exp(g) S))^T`` and reads
``o = q^T S`` (Yang et al. 2024, "Gated Delta Networks", arXiv:2412.06464). Chunks of 64 tokens are
computed by matmuls, as in section 3.3 there; only the state passes from a chunk to the next one.

Every chunk begins at a multiple of 64 tokens from the start of its sequence, so a token's output
does not depend on the other sequences of the pack. Sequences that share a prefix share the whole
chunks of that prefix, so the chunks of a pack form a tree. The last tokens of a prefix, which fill
no whole chunk, are computed again in a chunk of each sequence. A sequence that begins with a cached
prefix has its first chunk behind that prefix, and begins with the state from the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from nemo_aligner.batch.cache_use import NO_STATES, StateUse
from nemo_aligner.models.attention.segments import chains_of
from nemo_aligner.models.shapes.linear_attention import CHUNK_TOKENS
from nemo_aligner.utils.host_transfer import all_to_device, to_device

_EPSILON = 1e-6  # added to the squared L2 norm of queries and keys before the root


class Level(NamedTuple):
    """Chunks at the same depth of the tree, which are numbered consecutively.

    Attributes:
        start: number of the first chunk.
        end: number after the last chunk.
        parents: ``[end - start]`` int64: for each chunk the index, in the previous level, of the
            chunk that precedes it in its sequence. In the first level it is empty; but if the pack
            has cached prefixes, it is p + 1 for a sequence that begins with cached prefix p, and 0
            for a sequence without a cached prefix.
        stored: ``[m]`` int64, the chunks of this level, counted from ``start``, behind which the
            state is stored in the pool; None if there are none.
        slots: ``[m]`` int64 slots of the pool to store these states in.
    """

    start: int
    end: int
    parents: Tensor
    stored: Tensor | None = None
    slots: Tensor | None = None


@dataclass(frozen=True, eq=False)
class ChunkTree:
    """The chunks of a pack of T tokens, ordered by their depth.

    Attributes:
        rows: ``[N, previous + 64]`` int64 rows of the pack that each of the N chunks reads: the
            ``previous`` rows in front of the chunk, which the convolution needs, and the chunk's
            own 64; -1 where the sequence has no row. Rows from T on stand for the last
            ``previous`` tokens of each of the P cached prefixes.
        places: ``[T]`` int64 index of each token's output in the ``N * 64`` outputs of all chunks.
        levels: chunks by their depth in the tree, from the first chunks of the sequences on.
        taken: ``[P]`` int64 slots, in the pool, of the states behind the cached prefixes; None if
            the pack has no cached prefix.
    """

    rows: Tensor
    places: Tensor
    levels: tuple[Level, ...]
    taken: Tensor | None = None

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        prefixes: Sequence[int],
        previous: int,
        device: torch.device | str,
        states: StateUse = NO_STATES,
    ) -> ChunkTree:
        """Build the tree of a pack's segments (``PackedSegments.lengths`` and ``prefixes``).

        Args:
            previous: how many rows in front of a chunk the convolution reads: its taps minus 1.
            states: which states the pack reads from the pool, and which it stores there.
        """
        num_cached = len(states.taken)
        parts_by_level, parents_by_level = _list_chunks(lengths, prefixes, previous, num_cached)
        rows = np.stack([part for parts in parts_by_level for part in parts])
        places = np.zeros(sum(lengths), dtype=np.int64)
        of_chunks = rows[:, previous:].reshape(-1)
        # The last tokens of a shared prefix may be in the chunks of several sequences. Every one of
        # these chunks computes the same output for such a token, so ``places`` may point to any.
        places[of_chunks[of_chunks >= 0]] = np.flatnonzero(of_chunks >= 0)
        bounds = [0, *accumulate(map(len, parts_by_level))]
        host = [rows, places, *(np.array(parents, np.int64) for parents in parents_by_level)]
        on_device, of_tokens, *parents = all_to_device(list(map(torch.from_numpy, host)), device)
        levels = map(Level, bounds[:-1], bounds[1:], parents)
        tree = cls(on_device, of_tokens, tuple(levels))
        return _with_states(tree, places, states, device)


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
    taken = to_device(torch.tensor(states.taken), device) if states.taken else None
    return replace(tree, levels=tuple(levels), taken=taken)


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


class Inputs(NamedTuple):
    """Inputs of the gated delta rule for n chunks, in fp32.

    h is the number of key heads of this rank, and r the number of value heads per key head.

    Attributes:
        query, key: ``[n, h, 1, 64, k]``.
        value: ``[n, h, r, 64, v]``.
        decay: ``[n, h, r, 64]`` logarithm g of the factor that decays the state; at most 0.
        strength: ``[n, h, r, 64]`` write strength beta, from 0 to 1.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    strength: Tensor


class ChunkProducts(NamedTuple):
    """What n chunks compute from their own tokens, without the state before them, in fp32.

    The first axes of all fields are ``[n, h, r]``. "First state" is the state in front of a chunk,
    and "last state" the state behind it.

    Attributes:
        query: ``[..., 64, k]`` queries, decayed from the chunk's start, that read the first state.
        inner: ``[..., 64, 64]`` weight with which each token reads the value that another token of
            the chunk writes.
        values: ``[..., 64, v]`` values that the tokens would write if the first state were 0.
        read_keys: ``[..., 64, k]`` keys; their product with the first state is subtracted from
            ``values``.
        write_keys: ``[..., 64, k]`` keys, decayed to the chunk's end, that write to the last state.
        decay: ``[..., 1, 1]`` factor of the first state in the last state.
    """

    query: Tensor
    inner: Tensor
    values: Tensor
    read_keys: Tensor
    write_keys: Tensor
    decay: Tensor

    @classmethod
    def of(cls, inputs: Inputs) -> ChunkProducts:
        """Compute the fields from the inputs of the chunks."""
        query, key = map(_normalize, (inputs.query, inputs.key))
        query = query * query.size(-1) ** -0.5
        total = inputs.decay.cumsum(-1)
        later = torch.ones(CHUNK_TOKENS, CHUNK_TOKENS, dtype=torch.bool, device=key.device).triu(1)
        # Mask before exp, because exp would overflow for pairs with a later token.
        between = total.unsqueeze(-1) - total.unsqueeze(-2)
        between = between.masked_fill(later, float("-inf")).exp()
        strength = inputs.strength.unsqueeze(-1)
        from_start = total.exp().unsqueeze(-1)
        # Token i writes strength_i * (v_i - k_i^T S), where S holds what the earlier tokens of the
        # chunk have written. That is a triangular system with ones on the diagonal.
        overlap = key @ key.mT * strength * between
        right = torch.cat([inputs.value * strength, key * strength * from_start], dim=-1)
        solved = cast(Tensor, _TriangularSolve.apply(overlap, right))
        values, read_keys = solved.split([inputs.value.size(-1), key.size(-1)], dim=-1)
        to_end = (total[..., -1:] - total).exp().unsqueeze(-1)
        return cls(
            query=query * from_start,
            inner=query @ key.mT * between,
            values=values,
            read_keys=read_keys,
            write_keys=key * to_end,
            decay=total[..., -1].exp()[..., None, None],
        )

    def split(self, sizes: Sequence[int]) -> list[ChunkProducts]:
        """Split the chunks into consecutive parts of ``sizes`` chunks, one for each tree level."""
        parts = zip(*(field.split(list(sizes)) for field in self), strict=True)
        return [ChunkProducts(*fields) for fields in parts]

    def advance(self, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Compute the outputs ``[..., 64, v]`` and the states behind the chunks ``[..., k, v]``.

        Args:
            state: ``[..., k, v]`` states in front of the chunks; None means 0.
        """
        if state is None:
            return self.inner @ self.values, self.write_keys.mT @ self.values
        written = self.values - self.read_keys @ state
        output = self.query @ state + self.inner @ written
        return output, state * self.decay + self.write_keys.mT @ written


class _TriangularSolve(Function):
    """Solve ``(1 + L) x = right``, with the strict lower triangle L of ``matrix [..., 64, 64]``.

    It keeps the inverse, because multiplying by a 64 x 64 inverse takes less time than solving for
    all columns of ``right [..., 64, c]``, above all in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, matrix: Tensor, right: Tensor) -> Tensor:
        ones = torch.eye(matrix.size(-1), dtype=matrix.dtype, device=matrix.device)
        inverse = torch.linalg.solve_triangular(
            matrix, ones.expand_as(matrix), upper=False, unitriangular=True
        )
        solved = inverse @ right
        ctx.save_for_backward(inverse, solved)
        return solved

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        inverse, solved = ctx.saved_tensors
        to_right = inverse.mT @ grads[0]
        return -(to_right @ solved.mT).tril(-1), to_right


def _normalize(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + _EPSILON)
