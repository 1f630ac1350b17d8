"""Rotary position embeddings (RoPE): a pack's cosines and sines, and the rotation of heads.

A model has one ``Rotation``, or two if layers with a window have another RoPE. ``GPTRewardModel``
computes the tables of cosines and sines once for each pack, and attention rotates queries and keys
by these tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from nemo_aligner.models.internals import scale_rotary_frequencies
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.gemma4 import Gemma4Shape
from nemo_aligner.models.shapes.rope import (
    FP32_PRODUCTS,
    FP32_TABLES,
    QueryScaling,
    YarnScaling,
)

Tables = tuple[Tensor, Tensor]
"""Cosines and sines ``[T, 1, 1, r]``, in the model's dtype or in fp32."""

ByLength = tuple[list[int], Tensor]
"""Which RoPE each token of a pack has, in a model whose RoPE depends on the sequence's length.

First the distinct numbers that ``ModelShape.length_dependent_rope`` returns for the sequences, then
``[T]`` int64: for each token the index of its number among these.
"""


@dataclass(frozen=True)
class Rotation:
    """A rotary embedding: ``frequencies [r]`` fp32, by which positions are multiplied.

    Attributes:
        stretch: divisor of positions (linear position interpolation); None is 1.
        scale: factor by which cosines and sines are multiplied; None is 1.
        of_longer: returns the frequencies ``[r]`` of long sequences, given the number above 0 that
            ``ModelShape.length_dependent_rope`` returns; None if they are the same for all lengths.
        fp32: what stays in fp32 in a 16-bit model, see ``ModelShape.rope_fp32``.
    """

    frequencies: Tensor
    stretch: float | None = None
    scale: float | None = None
    of_longer: Callable[[int], Tensor] | None = None
    fp32: str | None = None

    def tables(
        self, position_ids: Tensor, dtype: torch.dtype, by_length: ByLength | None = None
    ) -> Tables:
        """Compute cosines and sines ``[T, 1, 1, r]`` at ``position_ids [T]``.

        Args:
            dtype: the model's dtype. The tables have it, too, unless ``fp32`` is set.
            by_length: the RoPE of every token, if it depends on the length of its sequence.
        """
        # Compute in fp32 until the end: bf16 has 8 significant bits, so positions above 256 would
        # collide.
        positions = position_ids.float()
        if self.stretch is not None:
            positions = positions / self.stretch
        frequencies = self.frequencies.to(positions.device)
        if by_length is not None and self.of_longer is not None:
            numbers, index = by_length
            variants = [self.of_longer(number) if number else frequencies for number in numbers]
            frequencies = torch.stack([row.to(positions.device) for row in variants])[index]
        angles = (positions[:, None] * frequencies)[:, None, None]
        cos, sin = angles.cos(), angles.sin()
        if self.scale is not None:
            cos, sin = cos * self.scale, sin * self.scale
        if self.fp32 == FP32_TABLES:
            return cos, sin
        cos, sin = cos.to(dtype), sin.to(dtype)
        return (cos.float(), sin.float()) if self.fp32 == FP32_PRODUCTS else (cos, sin)


def rotations(shape: ModelShape, rope: Any) -> tuple[Rotation, ...]:
    """Build a model's rotary embeddings.

    Args:
        rope: megatron-core's rotary embedding, with the frequencies of ``rotary_base``.

    Returns:
        One rotation, or two if layers with a window have another RoPE; see ``rotation_of``.
    """
    return tuple(
        replace(rotation, fp32=shape.rope_fp32) for rotation in _build_rotations(shape, rope)
    )


def _build_rotations(shape: ModelShape, rope: Any) -> tuple[Rotation, ...]:
    if shape.gemma4 is not None:
        return _gemma4_rotations(shape, shape.gemma4, rope.inv_freq.device)
    frequencies, scale, of_longer = rope.inv_freq, None, None
    if shape.rope_scaling is not None:
        frequencies = scale_rotary_frequencies(rope, shape.rope_scaling)
    if shape.yarn is not None:
        channels, scale = 2 * len(frequencies), shape.yarn.attention_factor
        frequencies = _yarn_frequencies(frequencies, channels, shape.rotary_base, shape.yarn)
    if shape.longrope is not None:
        powers = shape.rotary_base ** _exponents(len(frequencies))
        short, long = (
            (1.0 / (torch.tensor(factors) * powers)).to(frequencies.device)
            for factors in (shape.longrope.short, shape.longrope.long or shape.longrope.short)
        )
        # A config without ``long`` factors is rejected before longer sequences get here.
        frequencies, scale, of_longer = short, shape.longrope.attention_factor, lambda _: long
    elif shape.dynamic_rope_factor is not None:
        exponents = _exponents(len(frequencies)).to(frequencies.device)
        of_longer = partial(_dynamic_frequencies, shape, exponents)
    of_all = Rotation(frequencies, rope.seq_len_interpolation_factor, scale, of_longer)
    if shape.rotary_base_local is None:
        return (of_all,)
    exponents = torch.arange(len(frequencies), dtype=torch.float32) / len(frequencies)
    local = 1.0 / shape.rotary_base_local**exponents
    return of_all, Rotation(local.to(frequencies.device))


def rotation_of(shape: ModelShape, layer_number: int) -> int | None:
    """Return the index in ``rotations`` of a layer's RoPE; None if the layer has no RoPE.

    Args:
        layer_number: number of the layer, from 1.
    """
    if not shape.rotates(layer_number):
        return None
    is_own = shape.rotary_base_local is not None or shape.gemma4 is not None
    has_local = is_own and shape.window_of(layer_number) is not None
    return int(has_local)


def _gemma4_rotations(
    shape: ModelShape, gemma4: Gemma4Shape, device: torch.device
) -> tuple[Rotation, ...]:
    """Build the rotary embeddings of a Gemma 4's layers without a window, and of those with one.

    Without a window some pairs of channels are not rotated: their frequency is 0. The exponents of
    the others are those of a head whose channels are all rotated ("proportional" RoPE).
    """
    pairs = gemma4.global_channels // 2
    rotated = int(gemma4.global_rotary * gemma4.global_channels // 2)
    frequencies = torch.zeros(pairs)
    frequencies[:rotated] = 1.0 / shape.rotary_base ** _exponents(pairs)[:rotated]
    local_base = shape.rotary_base_local or shape.rotary_base
    local = 1.0 / local_base ** _exponents(shape.kv_channels // 2)
    return Rotation(frequencies.to(device)), Rotation(local.to(device))


def query_scale(scaling: QueryScaling, position_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute factors ``[T, 1, 1]`` of queries at ``position_ids [T]``; see ``QueryScaling``."""
    lengths = torch.floor(position_ids.float() / scaling.old_context_len)
    return (1 + scaling.beta * torch.log1p(lengths)).to(dtype)[:, None, None]


def _exponents(count: int) -> Tensor:
    """Compute the exponents ``[count]`` of RoPE's base, by the same operations as transformers.

    Other operations would round differently, which changes RoPE visibly at positions in the
    thousands.
    """
    return torch.arange(0, 2 * count, 2).float() / (2 * count)


def _dynamic_frequencies(shape: ModelShape, exponents: Tensor, tokens: int) -> Tensor:
    """Compute the frequencies ``[r]`` of a sequence of ``tokens`` by dynamic NTK-aware scaling.

    It multiplies RoPE's base, as transformers does for the first sequence of a process, by
    ``(factor tokens / original - (factor - 1)) ** (channels / (channels - 2))``.
    """
    assert shape.dynamic_rope_factor is not None
    factor, channels = shape.dynamic_rope_factor, 2 * len(exponents)
    # Compute in fp32, as transformers does.
    grown = factor * torch.tensor(tokens) / shape.max_position_embeddings - (factor - 1)
    base = shape.rotary_base * grown ** (channels / (channels - 2))
    return 1.0 / base**exponents


def _yarn_frequencies(frequencies: Tensor, channels: int, base: float, yarn: YarnScaling) -> Tensor:
    """Scale frequencies as YaRN does: section 3.2 of Peng et al. 2023, "NTK-by-parts"."""

    def channel(turns: float) -> float:
        """Return the index of the frequency that makes ``turns`` full turns in the old context."""
        wavelength = yarn.old_context_len / (turns * 2 * math.pi)
        return channels * math.log(wavelength) / (2 * math.log(base))

    first, last = channel(yarn.beta_fast), channel(yarn.beta_slow)
    if yarn.rounded:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, channels - 1)
    steps = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device)
    ramp = ((steps - first) / (last - first or 0.001)).clamp(0, 1)
    return frequencies / yarn.factor * ramp + frequencies * (1 - ramp)


# Application of RoPE to heads, as an autograd function that saves only the tables.


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding (RoFormer, Su et al. 2021) to the first ``2 r`` channels.

    Channel ``i`` is paired with channel ``i + r``, as in GPT-NeoX and Llama. The result has the
    dtype of ``x``; tables of a wider dtype are multiplied in theirs, and the result is rounded.

    Args:
        x: ``[T, ..., heads, c]``, 4-dimensional, ``c >= 2 r``.
        cos: ``[T, 1, 1, r]`` in the dtype of ``x``, or in a wider one.
        sin: like ``cos``.
    """
    return _Rotate.apply(x, cos, sin) if torch.is_grad_enabled() else _rotate_channels(x, cos, sin)


class _Rotate(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate_channels(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate_channels(grads[0], cos, -sin), None, None


def _rotate_channels(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if cos.dtype is not x.dtype:
        return _rotate_channels(x.to(cos.dtype), cos, sin).to(x.dtype)
    half, channels = cos.size(-1), x.size(-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    first, second = x[..., :half], x[..., half : 2 * half]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half : 2 * half]).addcmul_(first, sin)
    if channels > 2 * half:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out
