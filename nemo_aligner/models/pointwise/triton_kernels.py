"""The pointwise operations as Triton kernels.

Block sizes depend only on widths, and nothing is tuned at run time. So a row's result does not
depend on the number of rows, and after the first call of each shape the kernels can be captured in
a CUDA graph. The gradient of a norm's weight is summed in two stages, always in the same order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_aligner.config.kernels import PointwiseChoice
from nemo_aligner.models.pointwise import triton_experts
from nemo_aligner.models.pointwise.fused import fused_kernels

# Number of elements in a tile. Narrow rows share a tile, so that every thread has work.
_TILE = 1024
# Number of programs in a norm's backward pass, about one wave on a GPU with 132 multiprocessors.
# Each program handles every n-th tile of rows, and writes one row of partial sums.
_PROGRAMS, _PROGRAMS_OF_WIDE_ROWS = 1024, 512
_WIDE = 4096
# Largest number of heads that one program rotates.
_MOST_HEADS = 16


def _warps(elements: int) -> int:
    """Return how many warps a Triton program needs to reduce a tile of ``elements`` elements."""
    for max_elements, warps in ((1024, 4), (4096, 8), (16384, 16)):
        if elements <= max_elements:
            return warps
    return 32


class TritonKernels:
    """Implements ``fused.Kernels`` with the Triton kernels in this module and for experts."""

    sum_outputs = staticmethod(triton_experts.sum_outputs)
    output_gradients = staticmethod(triton_experts.output_gradients)

    @staticmethod
    def norm_forward(
        x: Tensor,
        added: Tensor | None,
        weight: Tensor,
        eps: float,
        offset: float,
        dtype: torch.dtype,
        alpha: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        width = x.size(-1)
        num_rows = x.numel() // width
        total = x if added is None else torch.empty_like(x)
        normed = torch.empty_like(x, dtype=dtype)
        scale = torch.empty(num_rows, dtype=torch.float32, device=x.device)
        block = triton.next_power_of_2(width)
        rows = max(1, _TILE // block)
        if num_rows:
            _norm_forward[(triton.cdiv(num_rows, rows),)](
                x,
                x if added is None else added,
                weight,
                total,
                normed,
                scale,
                num_rows,
                eps,
                alpha,
                offset,
                HAS_ADDED=added is not None,
                WIDTH=width,
                BLOCK=block,
                ROWS=rows,
                num_warps=_warps(rows * block),
            )
        return total, normed, scale

    @staticmethod
    def norm_backward(
        grad: Tensor,
        grad_sum: Tensor | None,
        total: Tensor,
        weight: Tensor,
        scale: Tensor,
        offset: float,
        needs_weight: bool,
    ) -> tuple[Tensor, Tensor | None]:
        width = total.size(-1)
        num_rows = total.numel() // width
        block = triton.next_power_of_2(width)
        rows = max(1, _TILE // block)
        max_programs = _PROGRAMS if block < _WIDE else _PROGRAMS_OF_WIDE_ROWS
        programs = min(triton.cdiv(num_rows, rows), max_programs)
        to_sum = torch.empty_like(total)
        partial = torch.empty(
            programs if needs_weight else 0, width, dtype=torch.float32, device=total.device
        )
        if num_rows:
            _norm_backward[(programs,)](
                grad,
                grad if grad_sum is None else grad_sum,
                total,
                weight,
                scale,
                to_sum,
                partial,
                num_rows,
                offset,
                HAS_SUM=grad_sum is not None,
                NEEDS_WEIGHT=needs_weight,
                WIDTH=width,
                BLOCK=block,
                ROWS=rows,
                num_warps=_warps(rows * block),
            )
        return to_sum, partial.sum(0).to(weight.dtype) if needs_weight else None

    @staticmethod
    def silu_forward(x: Tensor) -> Tensor:
        width = x.size(-1) // 2
        out = x.new_empty(*x.shape[:-1], width)
        if out.numel():
            grid = (out.numel() // width, triton.cdiv(width, _TILE))
            _silu_forward[grid](x, out, WIDTH=width, BLOCK=_TILE, num_warps=4)
        return out

    @staticmethod
    def silu_backward(grad: Tensor, x: Tensor) -> Tensor:
        width = grad.size(-1)
        to_x = torch.empty_like(x)
        if grad.numel():
            grid = (grad.numel() // width, triton.cdiv(width, _TILE))
            _silu_backward[grid](grad, x, to_x, WIDTH=width, BLOCK=_TILE, num_warps=4)
        return to_x

    @staticmethod
    def split_forward(
        mixed: Tensor, cos: Tensor, sin: Tensor, groups: int, channels: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens, repeats = mixed.size(0), mixed.size(-1) // (groups * channels) - 2
        query = mixed.new_empty(tokens, groups * repeats, channels)
        key, value = (mixed.new_empty(tokens, groups, channels) for _ in range(2))
        _launch_rotation(mixed, query, key, value, cos, sin, is_backward=False)
        return query, key, value

    @staticmethod
    def split_backward(
        query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor
    ) -> Tensor:
        tokens, groups, channels = key.shape
        mixed = key.new_empty(tokens, 1, (query.size(1) + 2 * groups) * channels)
        _launch_rotation(mixed, query, key, value, cos, sin, is_backward=True)
        return mixed


def _launch_rotation(
    mixed: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    is_backward: bool,
) -> None:
    tokens, groups, channels = key.shape
    half, heads = cos.size(-1), query.size(1) + 2 * groups
    heads_of_program = min(_MOST_HEADS, triton.next_power_of_2(heads))
    if not tokens:
        return
    _rotate[(tokens, triton.cdiv(heads, heads_of_program))](
        mixed,
        query,
        key,
        value,
        cos,
        sin,
        GROUPS=groups,
        REPEATS=query.size(1) // groups,
        CHANNELS=channels,
        HALF=half,
        HALF_BLOCK=triton.next_power_of_2(half),
        REST=channels - 2 * half,
        REST_BLOCK=triton.next_power_of_2(max(1, channels - 2 * half)),
        HEADS=heads_of_program,
        IS_BACKWARD=is_backward,
        num_warps=4,
    )


TRITON = fused_kernels(PointwiseChoice.triton.value, TritonKernels())


# Kernels. Triton must not specialize ``num_rows``, so that the same machine code runs for any
# number of rows.


@triton.jit(do_not_specialize=["num_rows"])
def _norm_forward(
    x_ptr,
    added_ptr,
    weight_ptr,
    total_ptr,
    normed_ptr,
    scale_ptr,
    num_rows,
    eps,
    alpha,
    offset,
    HAS_ADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
    places = rows[:, None] * WIDTH + columns[None, :]
    x = tl.load(x_ptr + places, mask=mask, other=0.0).to(tl.float32)
    if HAS_ADDED:
        x += alpha * tl.load(added_ptr + places, mask=mask, other=0.0).to(tl.float32)
        # Norm the sum as rounded for the residual stream, so that the norm sees what is stored.
        rounded = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + places, rounded, mask=mask)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)
    tl.store(scale_ptr + rows, scale, mask=rows < num_rows)
    weight = tl.load(weight_ptr + columns, mask=columns < WIDTH, other=0.0).to(tl.float32) + offset
    normed = x * scale[:, None] * weight[None, :]
    tl.store(normed_ptr + places, normed.to(normed_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _norm_backward(
    grad_ptr,
    grad_sum_ptr,
    total_ptr,
    weight_ptr,
    scale_ptr,
    to_sum_ptr,
    partial_ptr,
    num_rows,
    offset,
    HAS_SUM: tl.constexpr,
    NEEDS_WEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + columns, mask=columns < WIDTH, other=0.0).to(tl.float32) + offset
    to_weight = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(program * ROWS, num_rows, tl.num_programs(0) * ROWS):
        rows = first + tl.arange(0, ROWS)
        mask = (rows < num_rows)[:, None] & (columns < WIDTH)[None, :]
        places = rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
        grad = tl.load(grad_ptr + places, mask=mask, other=0.0).to(tl.float32)
        total = tl.load(total_ptr + places, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + rows, mask=rows < num_rows, other=0.0)
        normed = total * scale[:, None]
        if NEEDS_WEIGHT:
            to_weight += tl.sum(grad * normed, axis=0)
        weighted = grad * weight[None, :]
        mean = tl.sum(weighted * normed, axis=1) / WIDTH
        to_sum = (weighted - normed * mean[:, None]) * scale[:, None]
        if HAS_SUM:
            to_sum += tl.load(grad_sum_ptr + places, mask=mask, other=0.0).to(tl.float32)
        tl.store(to_sum_ptr + places, to_sum.to(to_sum_ptr.dtype.element_ty), mask=mask)
    if NEEDS_WEIGHT:
        tl.store(partial_ptr + program * WIDTH + columns, to_weight, mask=columns < WIDTH)


@triton.jit
def _silu_forward(x_ptr, out_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    gates = x_ptr + row * (2 * WIDTH) + columns
    gate = tl.load(gates, mask=mask, other=0.0).to(tl.float32)
    linear = tl.load(gates + WIDTH, mask=mask, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * linear
    tl.store(out_ptr + row * WIDTH + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _silu_backward(grad_ptr, x_ptr, to_x_ptr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < WIDTH
    places = row * (2 * WIDTH) + columns
    grad = tl.load(grad_ptr + row * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(x_ptr + places, mask=mask, other=0.0).to(tl.float32)
    linear = tl.load(x_ptr + places + WIDTH, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    to_gate = grad * linear * sigmoid * (1 + gate * (1 - sigmoid))
    to_linear = grad * gate * sigmoid
    tl.store(to_x_ptr + places, to_gate.to(to_x_ptr.dtype.element_ty), mask=mask)
    tl.store(to_x_ptr + places + WIDTH, to_linear.to(to_x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rotate(
    mixed_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    cos_ptr,
    sin_ptr,
    GROUPS: tl.constexpr,
    REPEATS: tl.constexpr,
    CHANNELS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    HEADS: tl.constexpr,
    IS_BACKWARD: tl.constexpr,
):
    """Split one token's ``mixed`` into heads with RoPE, or merge gradients if ``IS_BACKWARD``."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    group, place = head // (REPEATS + 2), head % (REPEATS + 2)
    is_head = group < GROUPS
    is_query, is_key = is_head & (place < REPEATS), is_head & (place == REPEATS)
    is_value = is_head & (place == REPEATS + 1)
    # Address of each head in ``mixed``, and in queries, keys or values.
    mixed = mixed_ptr + ((token * GROUPS * (REPEATS + 2) + head) * CHANNELS)[:, None]
    query = query_ptr + ((token * GROUPS * REPEATS + group * REPEATS + place) * CHANNELS)[:, None]
    key = key_ptr + ((token * GROUPS + group) * CHANNELS)[:, None]
    value = value_ptr + ((token * GROUPS + group) * CHANNELS)[:, None]
    heads, parts = (
        (mixed, query, key, value),
        (is_query[:, None], is_key[:, None], is_value[:, None]),
    )

    pair = tl.arange(0, HALF_BLOCK)
    cos = tl.load(cos_ptr + token * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + token * HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)
    if IS_BACKWARD:
        sin = -sin
    cos, sin, fits = cos[None, :], sin[None, :], (pair < HALF)[None, :]
    x = _load(heads, pair[None, :], parts, fits, IS_BACKWARD)
    y = _load(heads, pair[None, :] + HALF, parts, fits, IS_BACKWARD)
    turned_x = tl.where(is_value[:, None], x, x * cos - y * sin)
    turned_y = tl.where(is_value[:, None], y, y * cos + x * sin)
    _store(heads, pair[None, :], turned_x, parts, fits, IS_BACKWARD)
    _store(heads, pair[None, :] + HALF, turned_y, parts, fits, IS_BACKWARD)
    if REST > 0:
        # Copy the channels that are not rotated.
        unrotated = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
        fits = unrotated < CHANNELS
        _store(
            heads,
            unrotated,
            _load(heads, unrotated, parts, fits, IS_BACKWARD),
            parts,
            fits,
            IS_BACKWARD,
        )


@triton.jit
def _load(heads, columns, parts, fits, IS_BACKWARD: tl.constexpr):
    """Load ``columns`` of each head as fp32 from ``mixed``.

    If ``IS_BACKWARD``, load them from the gradients of queries, keys and values.
    """
    mixed, query, key, value = heads
    is_query, is_key, is_value = parts
    if not IS_BACKWARD:
        mask = (is_query | is_key | is_value) & fits
        return tl.load(mixed + columns, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(query + columns, mask=is_query & fits, other=0.0).to(tl.float32)
    y = tl.load(key + columns, mask=is_key & fits, other=0.0).to(tl.float32)
    z = tl.load(value + columns, mask=is_value & fits, other=0.0).to(tl.float32)
    return tl.where(is_query, x, tl.where(is_key, y, z))


@triton.jit
def _store(heads, columns, x, parts, fits, IS_BACKWARD: tl.constexpr):
    """Store ``columns`` of each head to queries, keys and values.

    If ``IS_BACKWARD``, store them to the gradient of ``mixed``.
    """
    mixed, query, key, value = heads
    is_query, is_key, is_value = parts
    x = x.to(mixed.dtype.element_ty)
    if IS_BACKWARD:
        tl.store(mixed + columns, x, mask=(is_query | is_key | is_value) & fits)
    else:
        tl.store(query + columns, x, mask=is_query & fits)
        tl.store(key + columns, x, mask=is_key & fits)
        tl.store(value + columns, x, mask=is_value & fits)
