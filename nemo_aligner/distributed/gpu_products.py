"""Matrix products on a GPU: the same bits for a row in any number of rows; weight gradients.

cuBLAS chooses a kernel, and with it the order in which a row's products are summed, by the shape of
a GEMM: few rows are split along the summed dimension, many are not. A batch invariant model
therefore multiplies in chunks of a few sizes, for which a trial on this GPU gave every row the same
bits at every place of the chunk. The trial is made once for each shape of a weight.

That a trial settles a shape rests on three properties of cuBLAS. It chooses by shapes, strides,
dtypes, the workspace (one size for all of torch's streams) and the alignment of the addresses,
never by values. It is deterministic as torch calls it. Kernels ask for addresses at multiples of 16
bytes; here they are at multiples of 128, because chunks begin at multiples of 64 rows.
"""

from __future__ import annotations

import logging
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.cpu.products import that_cancel

logger = logging.getLogger(__name__)

STEP = 64
"""Every chunk has a multiple of so many rows."""
_MOST_ROWS = 8192
# Eight sizes for each doubling, so that two chunks are enough for any multiple of a sixteenth.
_SIZES = tuple(
    sorted(
        {
            size
            for low in (512, 1024, 2048, 4096)
            for size in range(low, 2 * low + 1, max(STEP, low // 8))
        }
        | set(range(STEP, 513, STEP))
    )
)
_PADDED_SHARE = 16
_FREE_ROWS, _ROWS_OF_A_LAUNCH = 256, 64
_HOPPER = 9
_ALIGNMENT = 16


def default_rows() -> int:
    """Rows of a product on this GPU unless set: 1,024 from Hopper on, where 256 were slower."""
    return 1024 if torch.cuda.get_device_capability()[0] >= _HOPPER else 256


def invariant_linear_on_gpu(
    input: Tensor, weight: Tensor, bias: Tensor | None, rows: int
) -> Tensor:
    """Compute ``input [..., i]`` by ``weight [o, i]`` -> ``[..., o]``, batch invariant.

    Every chunk writes into its rows of the result. The host does not wait for the GPU, except for
    the trial of a shape that ``chunk_sizes`` meets for the first time.

    Args:
        rows: the size whose bits count, see ``chunk_sizes``.
    """
    sizes = chunk_sizes(weight, bias, rows)
    given = _aligned(input.reshape(-1, input.size(-1)))
    count = given.size(0)
    out = given.new_empty(count, weight.size(0))
    start = 0
    for size in cut(count, sizes):
        end = start + size
        if end <= count:
            _multiply(given[start:end], weight, bias, out[start:end])
        else:
            # What is in the padding does not matter: no row of a product depends on another.
            filled = given.new_empty(size, given.size(1))
            filled[: count - start] = given[start:]
            more = given.new_empty(size, weight.size(0))
            _multiply(filled, weight, bias, more)
            out[start:] = more[: count - start]
        start = end
    return out.view(*input.shape[:-1], weight.size(0))


def _aligned(rows: Tensor) -> Tensor:
    """``rows`` contiguous, and at an address as those that the trial had."""
    rows = rows.contiguous()
    is_aligned = rows.storage_offset() * rows.element_size() % _ALIGNMENT == 0
    return rows if is_aligned else rows.clone()


def _multiply(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)


@lru_cache(maxsize=4096)
def cut(count: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Cut ``count`` rows into chunks of these ``sizes``, the largest first.

    The last chunk is longer than what is left for it where that is cheaper, or no size fits.
    """
    largest = max(sizes)
    whole, left = (largest,) * (count // largest), count % largest
    if left == 0:
        return whole
    ways: list[tuple[int, ...]] = [(min(size for size in sizes if size >= left),)]
    shorter = [size for size in sizes if size <= left]
    if shorter:
        ways.append((max(shorter), *cut(left - max(shorter), sizes)))
    return (*whole, *min(ways, key=_cost))


def _cost(chunks: tuple[int, ...]) -> int:
    """Estimate the time of products of so many rows, in that of a row.

    Fewer than 256 take as long as 256: the time in which a weight is read, on an H100 from 295 rows
    on shorter than that of the arithmetic. Each has a share that does not depend on its rows: in
    chunks of 256 an H200 scored a quarter slower than in larger ones.
    """
    return sum(max(_FREE_ROWS, size) + _ROWS_OF_A_LAUNCH for size in chunks)


def row_multiple(count: int, smallest: int) -> int:
    """Multiple to which ``count`` rows are padded: a sixteenth of them at most, or ``smallest``.

    So that all products of a pack have a few chunks, none of them padded. ``smallest`` is the
    smallest size of a chunk.
    """
    share = 1 << max(0, count // _PADDED_SHARE).bit_length() >> 1
    return smallest * max(1, share // smallest)


# Weight gradients.


@cache
def adds_to_fp32() -> bool:
    """Tell if a product of 16 bits can add to an fp32 sum on this GPU: torch 2.8 and 2.9 refuse."""
    ones = torch.ones(16, 16, device="cuda", dtype=torch.float16)
    try:
        add_weight_gradient(torch.zeros(16, 16, device="cuda"), ones, ones)
    except (RuntimeError, TypeError):
        return False
    return True


def add_weight_gradient(to: Tensor, input: Tensor, grad: Tensor) -> None:
    """Accumulate into ``to [o, i]`` the weight gradient of ``input [T, i]`` and ``grad [T, o]``.

    ``to`` is in fp32 or of the inputs' dtype. In fp32 the sums of a product of 16 bits are never
    rounded to 16 bits; on an H100 that is up to 15% faster than a product and a sum.
    """
    if to.dtype is input.dtype:
        to.addmm_(grad.t(), input)
    else:
        torch.addmm(to, grad.t(), input, out_dtype=to.dtype, out=to)


# The trial.

_DRAWN = 16  # different rows, so that even a chunk of 64 has each of them at several places
_TRIED: dict[tuple[Any, ...], tuple[int, ...]] = {}


def chunk_sizes(weight: Tensor, bias: Tensor | None, rows: int) -> tuple[int, ...]:
    """Numbers of rows in which to multiply by a weight of this shape, from a trial on this GPU.

    All of them give a row the same bits. Of several sets of sizes that agree, it is the one by
    which packs of all lengths are multiplied in the least time; of equally good ones the one with
    ``rows``, rounded up to a multiple of 64.
    """
    key = (*weight.shape, weight.dtype, weight.device.index, bias is None, rows)
    sizes = _TRIED.get(key)
    if sizes is None:
        sizes = _TRIED[key] = _try_sizes(weight, bias, rows)
    return sizes


def _try_sizes(weight: Tensor, bias: Tensor | None, rows: int) -> tuple[int, ...]:
    rows += -rows % STEP
    orders = [order for order in orders_of_sums(weight, bias, sorted({rows, *_SIZES})) if order]
    if not orders:
        logger.warning(
            "model.batch_invariant may not hold: no product of a weight of %s in %s gives a row "
            "the same bits at every place; please report the GPU and the version of cuBLAS",
            tuple(weight.shape),
            weight.dtype,
        )
        return (rows,)

    def cost(order: tuple[int, ...]) -> tuple[float, bool]:
        packs = [size for size in _SIZES if size >= _FREE_ROWS]
        return sum(_cost(cut(size, order)) / _cost((size,)) for size in packs), rows not in order

    return min(orders, key=cost)


@torch.no_grad()
def orders_of_sums(weight: Tensor, bias: Tensor | None, sizes: list[int]) -> list[tuple[int, ...]]:
    """Group ``sizes``, multiples of 64, by the bits that a product of so many rows gives to a row.

    Sizes whose products give a row other bits at another place are left out.
    """
    drawn, drawn_weight, drawn_bias = that_cancel(weight, bias, _DRAWN)
    firsts, are_alike = [], []
    for size in sizes:
        given = drawn.repeat(size // _DRAWN, 1)
        out = given.new_empty(size, weight.size(0))
        _multiply(given, drawn_weight, drawn_bias, out)
        # Rows repeat, so that the first ones tell what all others have to be.
        firsts.append(out[:_DRAWN].clone())
        are_alike.append((out.view(-1, _DRAWN, weight.size(0)) == firsts[-1]).all())
    left = [index for index, alike in enumerate(torch.stack(are_alike).tolist()) if alike]
    orders = []
    while left:
        equal = torch.stack([(firsts[index] == firsts[left[0]]).all() for index in left]).tolist()
        same = [index for index, is_equal in zip(left, equal, strict=True) if is_equal]
        orders.append(tuple(sizes[index] for index in same))
        left = [index for index in left if index not in same]
    return orders
