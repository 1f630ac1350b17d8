"""Convert weights in MXFP4, the format in which gpt-oss is published, to bf16.

The format is that of OCP's "Microscaling Formats (MX) Specification" 1.0: blocks of 32 values of 4
bits each, which share a scale, a power of two. A byte has two values, the first one in its low
bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from nemo_aligner.checkpoint.weights.save import LazyTensor
from nemo_aligner.utils.errors import CheckpointError, short

METHOD = "mxfp4"  # ``quant_method`` in config.json
_BLOCKS, _SCALES = "_blocks", "_scales"
# The values of FP4 (E2M1): a sign bit, two bits of exponent, one of mantissa.
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([sign * value for sign in (1, -1) for value in _POSITIVE])
_BIAS = 127  # a scale is 2 to the power of (stored byte - _BIAS)
_BYTES_OF_BLOCK = 16


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """Convert one matrix ``[rows, columns]`` of MXFP4 to bf16.

    The result is exact, except for values that are too large or too small for bf16.

    Args:
        blocks: ``[rows, columns / 32, 16]`` uint8.
        scales: ``[rows, columns / 32]`` uint8.
    """
    codes = torch.stack([blocks & 0x0F, blocks >> 4], dim=-1).flatten(2)
    factors = torch.exp2((scales.to(torch.int32) - _BIAS).double()).float()
    return (_VALUES[codes.int()] * factors.unsqueeze(-1)).flatten(1).to(torch.bfloat16)


def with_dequantized(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Replace the two stored tensors of each MXFP4 weight by one lazy tensor in bf16.

    ``NAME_blocks [E, out, in / 32, 16]`` and ``NAME_scales [E, out, in / 32]`` become ``NAME [E,
    in, out]``, the layout of gpt-oss in transformers. To save memory, one expert after the other is
    converted.

    Raises:
        CheckpointError: one of a weight's two tensors is missing, or they do not fit each other.
    """
    plain = dict(tensors)
    for name in [name for name in tensors if name.endswith(_BLOCKS)]:
        weight = name.removesuffix(_BLOCKS)
        blocks, scales = plain.pop(name), plain.pop(weight + _SCALES, None)
        if scales is None or blocks.shape != (*scales.shape, _BYTES_OF_BLOCK):
            actual = "none" if scales is None else f"shape {list(scales.shape)}"
            raise CheckpointError(
                f"tensor {short(weight + _SCALES)}: got {actual}, but {short(name)} has shape "
                f"{list(blocks.shape)}. Download the checkpoint again"
            )
        count, rows, groups, _ = blocks.shape
        size = (count, groups * 2 * _BYTES_OF_BLOCK, rows)
        plain[weight] = LazyTensor(
            size, torch.bfloat16, partial(_read_dequantized, blocks, scales, size)
        )
    return plain


def _read_dequantized(blocks: LazyTensor, scales: LazyTensor, size: tuple[int, ...]) -> Tensor:
    assert blocks.read_part is not None
    weight, all_scales = torch.empty(size, dtype=torch.bfloat16), scales.read()
    for expert, matrix in enumerate(weight):
        matrix.copy_(dequantize(blocks.read_part(expert), all_scales[expert]).t())
    return weight
