"""Dequantization of a matrix by one Triton kernel: a value of a table, times a scale.

The product of two fp32 numbers is rounded as torch rounds it, so the result is bit-identical to
that of torch's operations, which need about ten times the memory traffic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024  # number of codes that a program reads


def look_up_pairs(codes: Tensor, scales: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize two values in each byte, of which the high bits have the first.

    Args:
        codes: ``[out, in / 2]`` uint8.
        scales: ``[out, blocks]``, one for each block of adjacent values in a row.
        table: ``[16]`` fp32: the value of each code.

    Returns:
        ``[out, in]`` in ``dtype``.
    """
    rows, pairs = codes.shape
    weight = torch.empty(rows, 2 * pairs, dtype=dtype, device=codes.device)
    _look_up_pairs[(triton.cdiv(codes.numel(), _BLOCK),)](
        codes.contiguous(),
        scales.contiguous(),
        table,
        weight,
        codes.numel(),
        PAIRS=pairs // scales.size(1),
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return weight


def look_up_rows(codes: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    """Dequantize one value in each byte.

    Args:
        codes: ``[out, in]`` uint8.
        scales: ``[out]``, one for each row.
        table: ``[256]`` fp32: the value of each code.

    Returns:
        ``[out, in]`` in the dtype of ``scales``.
    """
    rows, columns = codes.shape
    weight = torch.empty(rows, columns, dtype=scales.dtype, device=codes.device)
    _look_up_rows[(rows, triton.cdiv(columns, _BLOCK))](
        codes.contiguous(),
        scales.contiguous(),
        table,
        weight,
        COLUMNS=columns,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return weight


@triton.jit
def _look_up_pairs(
    codes_ptr,
    scales_ptr,
    table_ptr,
    weight_ptr,
    num_bytes,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    places = first + tl.arange(0, BLOCK)
    is_there = places < num_bytes
    codes = tl.load(codes_ptr + places, mask=is_there, other=0).to(tl.int32)
    scales = tl.load(scales_ptr + places // PAIRS, mask=is_there, other=0.0).to(tl.float32)
    high = tl.load(table_ptr + (codes >> 4)) * scales
    low = tl.load(table_ptr + (codes & 15)) * scales
    values = tl.interleave(high, low).to(weight_ptr.dtype.element_ty)
    places = 2 * first + tl.arange(0, 2 * BLOCK)
    # Not places < 2 * num_bytes, which overflows int32 for a matrix of 2^31 values.
    tl.store(weight_ptr + places, values, mask=places // 2 < num_bytes)


@triton.jit
def _look_up_rows(
    codes_ptr, scales_ptr, table_ptr, weight_ptr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = columns < COLUMNS
    codes = tl.load(codes_ptr + row * COLUMNS + columns, mask=is_there, other=0).to(tl.int32)
    scale = tl.load(scales_ptr + row).to(tl.float32)
    values = (tl.load(table_ptr + codes) * scale).to(weight_ptr.dtype.element_ty)
    tl.store(weight_ptr + row * COLUMNS + columns, values, mask=is_there)
