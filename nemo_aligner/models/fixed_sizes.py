"""Pad packs to a few fixed sizes, so that a CUDA graph that was captured for one runs for others.

A graph's kernels have the shapes of the pack that it was captured with. All that shapes depend on
is therefore rounded up: tokens in steps of an eighth, and the rest, which costs next to nothing, in
coarser ones. What is added computes nothing that anybody reads.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from nemo_aligner.batch.packed import CacheUse, FixedSizes, PackedBatch
from nemo_aligner.models.attention.segments import chains_of

_TOKEN_STEP = 128
# Empty segments, and lengths that no segment has, only start blocks that end at once.
_FEWEST_SEGMENTS, _SHORTEST, _COARSE_FACTOR = 16, 512, 4


def round_up_tokens(count: int) -> int:
    """Round up to a multiple of 128 with at most four significant bits: at most an eighth more."""
    octave = 1 << max(count - 1, 1).bit_length()
    step = max(_TOKEN_STEP, octave // 16)
    return -(-count // step) * step


def round_up_rows(count: int) -> int:
    """Round up the rows that a head reads: 16, 64 or 256, and above as tokens."""
    coarse = _coarse(count, _FEWEST_SEGMENTS)
    return coarse if coarse <= 2 * _TOKEN_STEP else round_up_tokens(count)


def pad_to_fixed_sizes(batch: PackedBatch) -> PackedBatch:
    """Pad a pack on the host, whose ``FixedSizes`` ``PackedSegments.of`` then fills up to.

    Filler segments are behind the pack's own, and none is longer than ``FixedSizes.length``.
    """
    if batch.cached is not None:
        batch = _with_fixed_cache(batch, batch.cached)
    longest, _ = _key_counts(batch)
    length = _coarse(longest, _SHORTEST)
    tokens = round_up_tokens(batch.num_tokens)
    filled = batch.filled_to(tokens, length)
    _, keys = _key_counts(filled)
    segments, padded_keys = len(filled.prefixes), None
    if int(filled.prefixes.max()) >= 0:
        step = tokens // 2
        padded_keys = -(-keys // step) * step
        # A kernel writes the gradients only of keys that are in a segment: they get some.
        segments += -(-(padded_keys - keys) // length)
    sizes = FixedSizes(_coarse(segments, _FEWEST_SEGMENTS), padded_keys, length)
    return replace(filled, sizes=sizes)


def _coarse(count: int, least: int) -> int:
    size = least
    while size < count:
        size *= _COARSE_FACTOR
    return size


def _key_counts(batch: PackedBatch) -> tuple[int, int]:
    """Count the keys, prefixes included, of the longest segment and of all segments."""
    cached = () if batch.cached is None else batch.cached.lengths
    lengths = [*cached, *batch.cu_seqlens.diff().tolist()]
    chains = chains_of(batch.prefixes.tolist(), len(cached))
    counts = [
        lengths[number] + sum(lengths[part] for part in chain)
        for number, chain in enumerate(chains, len(cached))
    ]
    return max(counts), sum(counts)


def _with_fixed_cache(batch: PackedBatch, use: CacheUse) -> PackedBatch:
    """Take and store fixed numbers of tokens: one more cached segment, and stores that repeat."""
    taken, missing = use.taken, 0
    if use.lengths:
        missing = _power_of_two(len(taken)) - len(taken)
    stored, slots = use.stored, use.slots
    if len(stored):
        # The last one again: whichever of them is written last, the slot has the same values.
        more = _power_of_two(len(stored)) - len(stored)
        stored, slots = (torch.cat([each, each[-1:].expand(more)]) for each in (stored, slots))
    lengths, prefixes = use.lengths, batch.prefixes
    if missing:
        lengths, taken = (*lengths, missing), torch.cat([taken, taken.new_zeros(missing)])
        prefixes = torch.where(prefixes >= len(use.lengths), prefixes + 1, prefixes)
    return replace(batch, cached=CacheUse(lengths, taken, stored, slots), prefixes=prefixes)


def _power_of_two(count: int) -> int:
    return max(_TOKEN_STEP, 1 << (count - 1).bit_length())
