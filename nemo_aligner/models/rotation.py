"""Tables of rotary embeddings: cosines and sines of a pack's positions, for each kind of layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.models.internals import scale_rotary_frequencies
from nemo_aligner.models.rope_shape import QueryScaling, YarnScaling
from nemo_aligner.models.shape import ModelShape

Tables = tuple[Tensor, Tensor]
"""Cosines and sines ``[T, 1, 1, r]`` in the model's dtype."""


@dataclass(frozen=True)
class Rotation:
    """A rotary embedding: ``frequencies [r]`` fp32, by which positions are multiplied.

    Attributes:
        stretch: positions are divided by it first.
        scale: factor of cosines and sines.
    """

    frequencies: Tensor
    stretch: float | None = None
    scale: float | None = None

    def tables(self, position_ids: Tensor, dtype: torch.dtype) -> Tables:
        """Compute the tables at ``position_ids [T]``."""
        positions = position_ids.float()
        if self.stretch is not None:
            positions = positions / self.stretch
        angles = torch.outer(positions, self.frequencies.to(positions.device))[:, None, None]
        cos, sin = angles.cos(), angles.sin()
        if self.scale is not None:
            cos, sin = cos * self.scale, sin * self.scale
        return cos.to(dtype), sin.to(dtype)


def rotations(shape: ModelShape, rope: Any) -> tuple[Rotation, ...]:
    """Build the rotations of a model: that of its layers, and that of layers with a window.

    Args:
        rope: megatron-core's, with the frequencies of ``rotary_base``.

    Returns:
        One, or two if layers with a window have another; see ``rotation_of``.
    """
    frequencies, scale = rope.inv_freq, None
    if shape.rope_scaling is not None:
        frequencies = scale_rotary_frequencies(rope, shape.rope_scaling)
    if shape.yarn is not None:
        channels, scale = 2 * len(frequencies), shape.yarn.attention_factor
        frequencies = _yarn(frequencies, channels, shape.rotary_base, shape.yarn)
    if shape.longrope is not None:
        # As in transformers: what rounds otherwise would differ at positions in the thousands.
        exponents = torch.arange(0, 2 * len(frequencies), 2).float() / (2 * len(frequencies))
        factors = torch.tensor(shape.longrope.short)
        by_factors = 1.0 / (factors * shape.rotary_base**exponents)
        frequencies, scale = by_factors.to(frequencies.device), shape.longrope.attention_factor
    of_all = Rotation(frequencies, rope.seq_len_interpolation_factor, scale)
    if shape.rotary_base_local is None:
        return (of_all,)
    exponents = torch.arange(len(frequencies), dtype=torch.float32) / len(frequencies)
    local = 1.0 / shape.rotary_base_local**exponents
    return of_all, Rotation(local.to(frequencies.device))


def rotation_of(shape: ModelShape, layer_number: int) -> int | None:
    """Tell which of ``rotations`` layer 1 to ``num_layers`` has; None if it has none."""
    if not shape.rotates(layer_number):
        return None
    has_local = shape.rotary_base_local is not None and shape.window_of(layer_number) is not None
    return int(has_local)


def query_scale(scaling: QueryScaling, position_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the factors ``[T, 1, 1]`` of queries at ``position_ids [T]``."""
    lengths = torch.floor(position_ids.float() / scaling.old_context_len)
    return (1 + scaling.beta * torch.log1p(lengths)).to(dtype)[:, None, None]


def _yarn(frequencies: Tensor, channels: int, base: float, yarn: YarnScaling) -> Tensor:
    """Scale frequencies as YaRN does: section 3.2 of Peng et al. 2023, "NTK-by-parts"."""

    def channel(turns: float) -> float:
        """Half the channel whose frequency turns so often in the original length."""
        wavelength = yarn.old_context_len / (turns * 2 * math.pi)
        return channels * math.log(wavelength) / (2 * math.log(base))

    first, last = channel(yarn.beta_fast), channel(yarn.beta_slow)
    if yarn.rounded:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, channels - 1)
    steps = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device)
    ramp = ((steps - first) / (last - first or 0.001)).clamp(0, 1)
    return frequencies / yarn.factor * ramp + frequencies * (1 - ramp)
