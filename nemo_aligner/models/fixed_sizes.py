"""Pad packs to a few fixed sizes, so that a CUDA graph captured for one pack runs for others.

A graph's kernels have the shapes of the pack that it was captured with. So all sizes that determine
shapes are rounded up: the number of tokens by at most an eighth, and the others in coarser steps,
because their padding costs next to nothing. Nothing reads the outputs of padding.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from nemo_aligner.batch.cache_use import CacheUse
from nemo_aligner.batch.packed import FixedSizes, PackedBatch
from nemo_aligner.models.attention.segments import chains_of

_TOKEN_STEP = 128
# An attention kernel launches as many thread blocks for every segment as the longest one needs: one
# for each 128 tokens. Blocks without work end at once, but take time to launch, so padding adds
# only a few.
_FEWEST_SEGMENTS, _SHORTEST = 16, 512
_FEWEST_ROWS, _ROW_FACTOR = 16, 4


def round_up_tokens(count: int) -> int:
    """Round up a number of tokens to a multiple of 128; above 1024 by at most an eighth."""
    octave = 1 << max(count - 1, 1).bit_length()
    step = max(_TOKEN_STEP, octave // 16)
    return -(-count // step) * step


def round_up_rows(count: int) -> int:
    """Round up the number of rows that a head reads: to 16, 64 or 256.

    Above 256 it is rounded up by ``round_up_tokens``.
    """
    rows = _FEWEST_ROWS
    while rows < min(count, 2 * _TOKEN_STEP):
        rows *= _ROW_FACTOR
    return rows if count <= rows else round_up_tokens(count)


def pad_to_fixed_sizes(batch: PackedBatch, multiple: int = 1) -> PackedBatch:
    """Pad a pack on the host to fixed sizes, which ``PackedSegments.of`` reads from its ``sizes``.

    Filler segments come after the pack's own, and none is longer than ``FixedSizes.length``.

    Args:
        multiple: the padded number of tokens is a multiple of it, so that batch invariant matmuls
            need no padding of their own.
    """
    if batch.cached is not None:
        batch = _pad_cache_use(batch, batch.cached)
    longest, _ = _key_counts(batch)
    length = _round_up_to_power_of_two(longest, _SHORTEST)
    tokens = -(-round_up_tokens(batch.num_tokens) // multiple) * multiple
    filled = batch.filled_to(tokens, length)
    _, keys = _key_counts(filled)
    segments, padded_keys = len(filled.prefixes), None
    if int(filled.prefixes.max()) >= 0:
        step = tokens // 2
        padded_keys = -(-keys // step) * step
        # Kernels write gradients only for keys that are in a segment, so the added keys need
        # segments.
        segments += -(-(padded_keys - keys) // length)
    sizes = FixedSizes(_round_up_segments(segments), padded_keys, length)
    return replace(filled, sizes=sizes)


def _round_up_segments(count: int) -> int:
    """Round up a number of segments to a power of two, or to three quarters of one."""
    octave = _round_up_to_power_of_two(count, _FEWEST_SEGMENTS)
    return octave * 3 // 4 if octave > _FEWEST_SEGMENTS and count <= octave * 3 // 4 else octave


def _key_counts(batch: PackedBatch) -> tuple[int, int]:
    """Count the keys, prefixes included, of the longest segment and of all segments together."""
    cached = () if batch.cached is None else batch.cached.lengths
    lengths = [*cached, *batch.cu_seqlens.diff().tolist()]
    chains = chains_of(batch.prefixes.tolist(), len(cached))
    counts = [
        lengths[number] + sum(lengths[part] for part in chain)
        for number, chain in enumerate(chains, len(cached))
    ]
    return max(counts), sum(counts)


def _pad_cache_use(batch: PackedBatch, use: CacheUse) -> PackedBatch:
    """Pad to fixed sizes the lists of tokens that a pack reads from the cache and stores in it.

    The list of tokens to read gets one more cached segment. The list of tokens to store repeats
    its last token.
    """
    read_slots, missing = use.read_slots, 0
    if use.lengths:
        missing = _round_up_to_power_of_two(len(read_slots), _TOKEN_STEP) - len(read_slots)
    stored, slots = use.stored, use.slots
    if len(stored):
        # The last token is stored several times in its slot, each time with the same values.
        num_repeats = _round_up_to_power_of_two(len(stored), _TOKEN_STEP) - len(stored)
        stored, slots = (
            torch.cat([index, index[-1:].expand(num_repeats)]) for index in (stored, slots)
        )
    lengths, prefixes = use.lengths, batch.prefixes
    if missing:
        lengths, read_slots = (
            (*lengths, missing),
            torch.cat([read_slots, read_slots.new_zeros(missing)]),
        )
        prefixes = torch.where(prefixes >= len(use.lengths), prefixes + 1, prefixes)
    return replace(batch, cached=CacheUse(lengths, read_slots, stored, slots), prefixes=prefixes)


def _round_up_to_power_of_two(count: int, minimum: int) -> int:
    return max(minimum, 1 << (count - 1).bit_length())
