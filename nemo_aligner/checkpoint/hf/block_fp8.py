"""Dequantise the fp8 weights of DeepSeek-V3's releases, which have a scale for each block.

A weight ``name`` of dtype ``F8_E4M3`` has the scales ``name_scale_inv``: one fp32 number for each
block of 128 x 128 elements, by which the block is multiplied (DeepSeek-V3, arXiv:2412.19437,
section 3.3.2). Blocks at the end of an axis may be smaller.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.checkpoint.weights.save import LazyTensor
from nemo_aligner.checkpoint.weights.store import check_finite
from nemo_aligner.utils.errors import CheckpointError, short, shown

METHOD = "fp8"
# torch's dtype by its name in safetensors files. ``source.py`` accepts it in addition to the dtypes
# of unquantized checkpoints.
DTYPES = {"F8_E4M3": torch.float8_e4m3fn}
_SCALES = "_scale_inv"

Block = tuple[int, int]
"""Rows and columns of a block."""


def read_block(quantization: Any) -> Block | None:
    """Return the rows and columns of a block from ``quantization_config``; None if it is not fp8.

    Raises:
        CheckpointError: the method is fp8, but there is no size of a block, or the elements are not
            E4M3.
    """
    if not isinstance(quantization, dict) or quantization.get("quant_method") != METHOD:
        return None
    block, kind = quantization.get("weight_block_size"), quantization.get("fmt", "e4m3")
    sizes = block if isinstance(block, list) else []
    are_counts = all(type(size) is int and size > 0 for size in sizes)
    if len(sizes) != 2 or not are_counts or kind != "e4m3":
        raise CheckpointError(
            f"quantization_config: got fp8 with weight_block_size={shown(block)} and "
            f"fmt={shown(kind)}; only two positive numbers (rows and columns of a block) and "
            "e4m3 are supported. Use a copy of the model in bf16"
        )
    return sizes[0], sizes[1]


def with_dequantized(
    tensors: Mapping[str, LazyTensor], block: Block
) -> tuple[dict[str, LazyTensor], int]:
    """Replace each fp8 weight and its scales by one lazy bf16 weight.

    Returns:
        All tensors by name, and the number of fp8 weights.

    Raises:
        CheckpointError: a weight has no scales, or scales of another shape.
    """
    plain = dict(tensors)
    names = [name for name, tensor in tensors.items() if tensor.dtype in DTYPES.values()]
    for name in names:
        weight, scales = plain[name], plain.pop(name + _SCALES, None)
        size = tuple(-(-rows // per) for rows, per in zip(weight.shape, block, strict=False))
        if scales is None or len(weight.shape) != 2 or scales.shape != size:
            raise CheckpointError(
                f"tensor {short(name)}: got fp8 of shape {list(weight.shape)} with the scales "
                f"{None if scales is None else list(scales.shape)}, wanted a matrix with a scale "
                f"for each block of {block[0]} x {block[1]}"
            )
        read = partial(_read_dequantized, name, weight, scales, block)
        plain[name] = LazyTensor(weight.shape, torch.bfloat16, read)
    return plain, len(names)


def _read_dequantized(name: str, weight: LazyTensor, scales: LazyTensor, block: Block) -> Tensor:
    product = dequantize(weight.read(), scales.read(), block).bfloat16()
    check_finite(product, name)
    return product


def dequantize(weight: Tensor, scales: Tensor, block: Block) -> Tensor:
    """Multiply each block of ``weight [rows, columns]`` by its scale; the result is fp32."""
    rows, columns = weight.shape
    by_row = scales.float().repeat_interleave(block[0], 0)[:rows]
    return weight.float() * by_row.repeat_interleave(block[1], 1)[:, :columns]
