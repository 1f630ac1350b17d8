"""The weighted sum of the outputs of each token's experts as Triton kernels.

As in ``triton_kernels.py``, block sizes depend only on the width, so a token's result does not
depend on the other tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Number of channels that a program handles at a time.
_BLOCK = 1024


def _block_of(width: int) -> int:
    return min(_BLOCK, triton.next_power_of_2(width))


def sum_outputs(rows: Tensor, weights: Tensor, places: Tensor) -> Tensor:
    """Compute ``eager.sum_outputs``: ``[T * k, c] -> [T, c]``, in fp32."""
    tokens, top_k = places.shape
    width, block = rows.size(1), _block_of(rows.size(1))
    total = rows.new_empty(tokens, width, dtype=torch.float32)
    if total.numel():
        _sum_outputs[(tokens, triton.cdiv(width, block))](
            rows, weights, places, total, TOP_K=top_k, WIDTH=width, BLOCK=block, num_warps=4
        )
    return total


def output_gradients(
    grad: Tensor, rows: Tensor, weights: Tensor, places: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the gradients of ``rows [T * k, c]`` and of ``weights [T, k]``."""
    tokens, top_k = places.shape
    width, block = rows.size(1), _block_of(rows.size(1))
    to_rows, to_weights = torch.empty_like(rows), torch.empty_like(weights)
    if to_rows.numel():
        _output_gradients[(tokens * top_k,)](
            grad,
            rows,
            weights,
            places,
            to_rows,
            to_weights,
            TOP_K=top_k,
            WIDTH=width,
            BLOCK=block,
            num_warps=4,
        )
    return to_rows, to_weights


@triton.jit
def _sum_outputs(
    rows_ptr,
    weights_ptr,
    places_ptr,
    total_ptr,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum the outputs of one token's experts, in one block of its channels."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = columns < WIDTH
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    for number in range(TOP_K):
        place = tl.load(places_ptr + token * TOP_K + number)
        weight = tl.load(weights_ptr + token * TOP_K + number)
        row = tl.load(rows_ptr + place * WIDTH + columns, mask=is_there, other=0.0)
        sums += row.to(tl.float32) * weight
    tl.store(total_ptr + token * WIDTH + columns, sums, mask=is_there)


@triton.jit
def _output_gradients(
    grad_ptr,
    rows_ptr,
    weights_ptr,
    places_ptr,
    to_rows_ptr,
    to_weights_ptr,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the gradients of one expert's output of one token, and of its weight."""
    number = tl.program_id(0).to(tl.int64)
    token = number // TOP_K
    place = tl.load(places_ptr + number)
    weight = tl.load(weights_ptr + number)
    products = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        is_there = columns < WIDTH
        of_token = tl.load(grad_ptr + token * WIDTH + columns, mask=is_there, other=0.0)
        row = tl.load(rows_ptr + place * WIDTH + columns, mask=is_there, other=0.0)
        products += of_token * row.to(tl.float32)
        gradient = (of_token * weight).to(to_rows_ptr.dtype.element_ty)
        tl.store(to_rows_ptr + place * WIDTH + columns, gradient, mask=is_there)
    tl.store(to_weights_ptr + number, tl.sum(products, axis=0))
