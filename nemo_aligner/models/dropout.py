"""Dropout of what LoRA reads, without a generator's state.

Whether a number is left out is a function of the seed, the step, the token's record and position,
the linear layer and the channel. So it is the same at any layout, for a layer that is computed
again, and for a run that goes on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nemo_aligner.batch import PackedBatch
from nemo_aligner.transfer import to_device

_KEYS = "dropout keys"
_MASK = 2**64 - 1
# Odd, and without a pattern in their bits: those of SplitMix64 (Steele et al. 2014), and two of
# 31 bits by the same measure.
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_SHORT_FIRST, _SHORT_SECOND = 0x2C1B3C6D, 0x297A2D39


class LoraDropout:
    """Sets a share ``rate`` of what every A reads to zero, in training (Srivastava et al. 2014).

    ``step`` is the trainer's.
    """

    def __init__(self, rate: float, seed: int) -> None:
        self.rate = rate
        self.step = 0
        self._seed = seed
        self._keys = self._keys_of_rows = torch.zeros(0, dtype=torch.int32)

    def begin(self, batch: PackedBatch, segments: Any) -> None:
        """Before a pack's forward pass; ``segments`` are its ``PackedSegments``."""
        segments.remembered(_KEYS, lambda: self._token_keys(batch))

    def enter(self, segments: Any) -> None:
        """Before a layer's forward pass on a pack: others may be between that and its backward."""
        self._keys = segments.remembered(_KEYS, _not_begun)
        self._keys_of_rows = self._keys[segments.last_token]

    def apply(
        self, x: Tensor, linear: int, reads_rows: bool, first_token: int, first_channel: int
    ) -> Tensor:
        """``x [T, 1, in]`` without what is left out; the rest is not scaled up.

        Args:
            linear: a number of the linear layer's own in the model.
            reads_rows: T are the rows that the head reads, and not the pack's tokens.
            first_token: which of them all ``x`` begins with, where the ranks share them.
            first_channel: the same of channels.
        """
        keys = self._keys_of_rows if reads_rows else self._keys
        keys = keys[first_token : first_token + x.size(0)]
        numbers = torch.arange(first_channel, first_channel + x.size(-1), device=x.device)
        channels = _mixed(numbers, _mixed_number(self._seed, linear))
        bits = keys[:, None] + channels
        for shift, factor in ((15, _SHORT_FIRST), (12, _SHORT_SECOND)):
            bits ^= _shifted(bits, shift, 32)
            bits *= factor
        left_out = bits < int(-(2**31) + self.rate * 2**32)
        return x.masked_fill(left_out[:, None], 0.0)

    def _token_keys(self, batch: PackedBatch) -> Tensor:
        """``[T]`` int32 of every token, on its device."""
        lengths = batch.cu_seqlens.diff()
        prefixes = batch.prefixes.tolist()
        records = batch.records
        sizes = records.sizes.tolist()
        owners = [
            (record, place)
            for record, size in zip(records.ids.tolist(), sizes, strict=True)
            for place in range(size)
        ]
        # Sequences end with segments that none begins with, in order; then there may be a filler.
        begun = set(prefixes)
        ends = [number for number in range(len(prefixes)) if number not in begun]
        of_segment = [0] * len(prefixes)
        for number, (record, place) in reversed(list(zip(ends, owners, strict=False))):
            key = _mixed_number(self._seed, self.step, record, place)
            of_segment[number] = key
            if prefixes[number] >= 0:  # the first that begins with it gives it its key
                of_segment[prefixes[number]] = _mixed_number(key)
        keys = torch.tensor(of_segment, dtype=torch.int64).repeat_interleave(lengths)
        return _mixed(batch.position_ids, to_device(keys, batch.position_ids.device))


def _not_begun() -> Tensor:
    raise RuntimeError("a layer with dropout was run on a pack that the model has not begun")


def _mixed_number(*numbers: int) -> int:
    """An int64 in which every bit of every number counts, by SplitMix64."""
    mixed = 0
    for number in numbers:
        mixed = ((mixed ^ number) + _STEP) & _MASK
        mixed = ((mixed ^ mixed >> 30) * _FIRST) & _MASK
        mixed = ((mixed ^ mixed >> 27) * _SECOND) & _MASK
        mixed ^= mixed >> 31
    return _signed(mixed)


def _mixed(numbers: Tensor, keys: Tensor | int) -> Tensor:
    """int32 of int64 ``numbers`` and their ``keys``, in the same way."""
    mixed = numbers * _signed(_STEP) + keys
    mixed = (mixed ^ _shifted(mixed, 30, 64)) * _signed(_FIRST)
    mixed = (mixed ^ _shifted(mixed, 27, 64)) * _signed(_SECOND)
    return (mixed >> 32).to(torch.int32)


def _shifted(numbers: Tensor, by: int, bits: int) -> Tensor:
    """``numbers >> by`` as if they had no sign, of which torch would fill in copies."""
    return (numbers >> by).bitwise_and_((1 << (bits - by)) - 1)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
