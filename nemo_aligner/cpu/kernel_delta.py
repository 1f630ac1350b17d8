"""Linear attention (Gated DeltaNet) for scoring on a CPU, with ``gated_delta.c``.

It computes what ``models/linear_attention.py`` computes with torch, from the outputs of the input
projection to the inputs of the output projection, in one pass over memory. A token's output is
bit-identical in every batch, because every chunk is computed separately.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from nemo_aligner.cpu import kernels

# Constants of gated_delta.c: the most channels of a head, and taps of the convolution.
_MOST_CHANNELS, _MOST_TAPS = 256, 8


def can_advance(dtype: torch.dtype, keys: int, values: int, taps: int) -> bool:
    """Tell if the kernel is compiled and supports heads of these channels, and ``taps`` taps."""
    fits = max(keys, values) <= _MOST_CHANNELS and taps <= _MOST_TAPS
    return fits and all(
        kernels.supports_width(dtype, channels, source=kernels.GATED_DELTA)
        for channels in (keys, values)
    )


class Weights(NamedTuple):
    """A layer's weights, of h key heads with r value heads each, in fp32 or bf16.

    Attributes:
        convolution: ``[h * c, taps]``, with c channels (query, key and values) of each key head.
        a_log: ``[h * r]`` logarithm of the rates at which the states decay.
        dt_bias: ``[h * r]`` biases of the decays.
        norm: ``[v]`` weight of the output's norm.
    """

    convolution: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor


class _Layer(ctypes.Structure):
    """The C struct ``Layer`` of gated_delta.c."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("is_bf16", "heads", "repeats", "keys", "values")),
        ("taps", ctypes.c_int32),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("weights", "rates", "biases", "norm")),
        *((name, ctypes.c_void_p) for name in ("rows", "places", "mixed", "out")),
    )


class DeltaLayer:
    """A layer's computation for one pack of T tokens, level by level of the tree of chunks.

    Args:
        mixed: ``[at least T, 1, h * (c + r * (v + 2))]``, outputs of the input projection: for each
            key head its query and key, and for its value heads values, gates, strengths and decays.
        rows, places: of the ``ChunkTree``.
        weights: the layer's weights.
        keys: channels of a key.
        eps: epsilon of the output's norm.

    Attributes:
        output: ``[T, 1, h * r * v]`` in the dtype of ``mixed``; complete after the last level.
    """

    def __init__(
        self,
        mixed: Tensor,
        rows: Tensor,
        places: Tensor,
        weights: Weights,
        keys: int,
        eps: float,
    ) -> None:
        values, taps = weights.norm.size(0), weights.convolution.size(1)
        value_heads = weights.a_log.size(0)
        heads = (weights.convolution.size(0) - value_heads * values) // (2 * keys)
        self._states = (heads, value_heads // heads, keys, values)
        self.output = mixed.new_empty(places.size(0), 1, value_heads * values)
        # The struct has only addresses, so these tensors have to live as long as it.
        self._tensors = [
            weights.convolution.float().t().contiguous(),
            weights.a_log.float().exp(),
            weights.dt_bias.float(),
            weights.norm.float(),
            rows.contiguous(),
            places,
            mixed.contiguous(),
            self.output,
        ]
        numbers = (mixed.dtype is torch.bfloat16, *self._states, taps, eps)
        self._layer = _Layer(*numbers, *(tensor.data_ptr() for tensor in self._tensors))

    def advance(self, start: int, end: int, parents: Tensor, states: Tensor | None) -> Tensor:
        """Compute the chunks of a level, see ``Level``.

        Args:
            states: ``[n, h, r, k, v]`` fp32 states that ``parents`` counts; None if they are 0.

        Returns:
            States ``[end - start, h, r, k, v]`` after the chunks. They are uninitialised after a
            chunk that its sequence does not fill.
        """
        after = torch.empty(end - start, *self._states)
        kernels.call(
            "advance",
            ctypes.byref(self._layer),
            start,
            end - start,
            parents.data_ptr(),
            None if states is None else states.data_ptr(),
            after.data_ptr(),
            source=kernels.GATED_DELTA,
        )
        return after
