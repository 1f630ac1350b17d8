"""Convert weights in MXFP4, the format in which gpt-oss is published, to bf16.

The format is that of OCP's "Microscaling Formats (MX) Specification" 1.0: blocks of 32 values of 4
bits each, which share a scale, a power of two. A byte has two values, the first one in its low
bits.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from nemo_aligner.checkpoint.hf.quantized.stored import Options, QuantizedFormat, Tensors
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


def read_format(options: Options, dtype: torch.dtype | None) -> QuantizedFormat:
    """Return the format, which has no options; the weights become bf16, whatever ``dtype`` is."""
    return QuantizedFormat("mxfp4", {"U8": torch.uint8}, _dequantize)


def _dequantize(tensors: Tensors) -> list[str]:
    """Replace the two stored tensors of each weight by one.

    ``NAME_blocks [E, out, in / 32, 16]`` and ``NAME_scales [E, out, in / 32]`` become ``NAME [E,
    in, out]``, the layout of gpt-oss in transformers. To save memory, one expert after the other is
    converted.
    """
    names = [name.removesuffix(_BLOCKS) for name in tensors if name.endswith(_BLOCKS)]
    for name in names:
        blocks, scales = tensors.pop(name + _BLOCKS), tensors.pop(name + _SCALES, None)
        if scales is None or blocks.shape != (*scales.shape, _BYTES_OF_BLOCK):
            actual = "none" if scales is None else f"shape {list(scales.shape)}"
            raise CheckpointError(
                f"tensor {short(name + _SCALES)}: got {actual}, but {short(name + _BLOCKS)} has "
                f"shape {list(blocks.shape)}. Download the checkpoint again"
            )
        count, rows, groups, _ = blocks.shape
        size = (count, groups * 2 * _BYTES_OF_BLOCK, rows)
        tensors[name] = LazyTensor(
            size, torch.bfloat16, partial(_read_dequantized, blocks, scales, size)
        )
    return names


def _read_dequantized(blocks: LazyTensor, scales: LazyTensor, size: tuple[int, ...]) -> Tensor:
    assert blocks.read_part is not None
    weight, all_scales = torch.empty(size, dtype=torch.bfloat16), scales.read()
    for expert, matrix in enumerate(weight):
        matrix.copy_(dequantize(blocks.read_part(expert), all_scales[expert]).t())
    return weight
