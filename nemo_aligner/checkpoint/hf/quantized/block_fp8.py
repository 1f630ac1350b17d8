"""Dequantise the fp8 weights of DeepSeek-V3's releases, which have a scale for each block.

A weight ``name`` of dtype ``F8_E4M3`` has the scales ``name_scale_inv``: one fp32 number for each
block of 128 x 128 elements, by which the block is multiplied (DeepSeek-V3, arXiv:2412.19437,
section 3.3.2). Blocks at the end of an axis may be smaller.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from nemo_aligner.checkpoint.hf.quantized.stored import (
    WHAT_TO_DO,
    Options,
    QuantizedFormat,
    Tensors,
    compute_lazily,
)
from nemo_aligner.checkpoint.weights.save import LazyTensor
from nemo_aligner.utils.errors import CheckpointError, short, shown

METHOD = "fp8"
DTYPES = {"F8_E4M3": torch.float8_e4m3fn}
_SCALES = "_scale_inv"

Block = tuple[int, int]
"""Rows and columns of a block."""


def read_format(options: Options, dtype: torch.dtype | None) -> QuantizedFormat:
    """Read the rows and columns of a block; the weights become bf16, whatever ``dtype`` is.

    Raises:
        CheckpointError: there is no size of a block, or the elements are not E4M3.
    """
    value, kind = options.fields.get("weight_block_size"), options.fields.get("fmt", "e4m3")
    block = read_block(value)
    if block is None or kind != "e4m3":
        raise CheckpointError(
            f"quantization_config: got fp8 with weight_block_size={shown(value)} and "
            f"fmt={shown(kind)}; only two positive numbers (rows and columns of a block) and "
            f"e4m3 are supported. {WHAT_TO_DO}"
        )
    return QuantizedFormat("fp8", DTYPES, partial(_dequantize, block=block))


def read_block(value: object) -> Block | None:
    """Return the rows and columns of a block; None if ``value`` is not a list of them."""
    sizes = value if isinstance(value, list) else []
    are_counts = all(type(size) is int and size > 0 for size in sizes)
    return (sizes[0], sizes[1]) if len(sizes) == 2 and are_counts else None


def _dequantize(tensors: Tensors, block: Block) -> list[str]:
    names = [name for name, tensor in tensors.items() if tensor.dtype in DTYPES.values()]
    for name in names:
        weight, scales = tensors[name], tensors.pop(name + _SCALES, None)
        size = tuple(-(-rows // per) for rows, per in zip(weight.shape, block, strict=False))
        if scales is None or len(weight.shape) != 2 or scales.shape != size:
            raise CheckpointError(
                f"tensor {short(name)}: got fp8 of shape {list(weight.shape)} with the scales "
                f"{None if scales is None else list(scales.shape)}, wanted a matrix with a scale "
                f"for each block of {block[0]} x {block[1]}"
            )
        read = partial(_read_dequantized, weight, scales, block)
        tensors[name] = compute_lazily(name, weight.shape, torch.bfloat16, read)
    return names


def _read_dequantized(weight: LazyTensor, scales: LazyTensor, block: Block) -> Tensor:
    return dequantize(weight.read(), scales.read(), block)


def dequantize(weight: Tensor, scales: Tensor, block: Block) -> Tensor:
    """Multiply each block of ``weight [rows, columns]`` by its scale; the result is fp32."""
    rows, columns = weight.shape
    by_row = scales.float().repeat_interleave(block[0], 0)[:rows]
    return weight.float() * by_row.repeat_interleave(block[1], 1)[:, :columns]
