"""Batch-invariant linear layers and weight gradients on a GPU.

cuBLAS chooses a kernel by the shape of a GEMM. The kernel determines the order in which the
products of a row are summed: with few rows, a kernel splits the summed dimension; with many rows,
it does not. So a row's result may depend on the number of rows. A batch-invariant model therefore
multiplies in chunks of a few sizes. A trial on this GPU selects sizes that give bit-identical
results for a row at every position in the chunk. It runs once for each shape of a weight.

The result of the trial is valid for all later calls because of three properties of cuBLAS:

- It chooses kernels by shapes, strides, dtypes, the workspace (one size for all of torch's streams)
  and the alignment of addresses, never by values.
- As torch calls it, it is deterministic.
- Its kernels distinguish addresses by their alignment to 16 bytes. Here all addresses are aligned
  to 128 bytes, because chunks start at multiples of 64 rows.
"""

from __future__ import annotations

import logging
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.cpu.matmuls import that_cancel

logger = logging.getLogger(__name__)

STEP = 64
"""Every chunk has a multiple of this many rows."""
_MOST_ROWS = 8192
# Chunk sizes to try. From 512 on there are eight sizes per power of two, so that two chunks are
# enough for any number of rows that ``row_multiple`` pads to.
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
    """Return the default number of rows of a chunk: 1,024 on Hopper and newer GPUs, else 256.

    On Hopper, chunks of 256 rows were slower.
    """
    return 1024 if torch.cuda.get_device_capability()[0] >= _HOPPER else 256


def invariant_linear_on_gpu(
    input: Tensor, weight: Tensor, bias: Tensor | None, rows: int
) -> Tensor:
    """Compute ``input [..., i] @ weight [o, i].T + bias`` -> ``[..., o]``, batch-invariant.

    The host waits for the GPU only when a weight's shape is new and ``chunk_sizes`` runs its trial.

    Args:
        input: activations.
        weight: the weight of a linear layer, of the same dtype.
        bias: ``[o]``, or None.
        rows: the preferred number of rows of a chunk; see ``chunk_sizes``.
    """
    sizes = chunk_sizes(weight, bias, rows)
    inputs = _align(input.reshape(-1, input.size(-1)))
    count = inputs.size(0)
    out = inputs.new_empty(count, weight.size(0))
    start = 0
    for size in split_rows(count, sizes):
        end = start + size
        if end <= count:
            _multiply(inputs[start:end], weight, bias, out[start:end])
        else:
            # Padding rows are left uninitialised, because no row of a matmul depends on another.
            padded = inputs.new_empty(size, inputs.size(1))
            padded[: count - start] = inputs[start:]
            padded_out = inputs.new_empty(size, weight.size(0))
            _multiply(padded, weight, bias, padded_out)
            out[start:] = padded_out[: count - start]
        start = end
    return out.view(*input.shape[:-1], weight.size(0))


def _align(rows: Tensor) -> Tensor:
    """Return ``rows`` unchanged or as a copy, contiguous and aligned as in the trial.

    cuBLAS may choose another kernel for another alignment of the address.
    """
    rows = rows.contiguous()
    is_aligned = rows.storage_offset() * rows.element_size() % _ALIGNMENT == 0
    return rows if is_aligned else rows.clone()


def _multiply(rows: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)


@lru_cache(maxsize=4096)
def split_rows(count: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Split ``count`` rows into chunks of the given ``sizes``, the largest first.

    The last chunk may have more rows than remain, if this is cheaper or no size fits. The caller
    pads it.
    """
    largest = max(sizes)
    full, remaining = (largest,) * (count // largest), count % largest
    if remaining == 0:
        return full
    splits: list[tuple[int, ...]] = [(min(size for size in sizes if size >= remaining),)]
    shorter = [size for size in sizes if size <= remaining]
    if shorter:
        splits.append((max(shorter), *split_rows(remaining - max(shorter), sizes)))
    return (*full, *min(splits, key=_estimate_cost))


def _estimate_cost(chunks: tuple[int, ...]) -> int:
    """Estimate the time of one matmul per chunk, in units of the time that one row takes.

    Fewer than 256 rows take as long as 256, because reading the weight then takes longer than the
    arithmetic (on an H100 for up to 295 rows). Each launch also costs as much as 64 rows: an H200
    scored a quarter slower in chunks of 256 rows than in larger chunks.
    """
    return sum(max(_FREE_ROWS, size) + _ROWS_OF_A_LAUNCH for size in chunks)


def row_multiple(count: int, smallest: int) -> int:
    """Return the multiple to which the ``count`` rows (tokens) of a pack are padded.

    With padding, all matmuls of a pack consist of a few full chunks. The multiple is at most a
    sixteenth of ``count``, so that padding costs little, but at least ``smallest``, the smallest
    chunk size.
    """
    share = 1 << max(0, count // _PADDED_SHARE).bit_length() >> 1
    return smallest * max(1, share // smallest)


# Gradients of the weights of linear layers.


@cache
def adds_to_fp32() -> bool:
    """Tell whether torch can add a 16-bit matmul to an fp32 tensor on this GPU.

    torch 2.8 and 2.9 cannot.
    """
    ones = torch.ones(16, 16, device="cuda", dtype=torch.float16)
    try:
        add_weight_gradient(torch.zeros(16, 16, device="cuda"), ones, ones)
    except (RuntimeError, TypeError):
        return False
    return True


def add_weight_gradient(to: Tensor, input: Tensor, grad: Tensor) -> None:
    """Add the gradient of a linear layer's weight, ``grad [T, o].T @ input [T, i]``, to ``to``.

    ``to [o, i]`` is fp32 or has the dtype of ``input``. With fp32, the gradient of 16-bit values is
    never rounded to 16 bits. On an H100 this is up to 15% faster than a matmul and an addition.
    """
    if to.dtype is input.dtype:
        to.addmm_(grad.t(), input)
    else:
        torch.addmm(to, grad.t(), input, out_dtype=to.dtype, out=to)


# A trial finds the chunk sizes with which every row of a matmul is bit-identical.

# Number of different rows in the trial. They repeat, so even a chunk of 64 rows has each row at
# four positions, whose results are compared.
_DRAWN = 16
_TRIED: dict[tuple[Any, ...], tuple[int, ...]] = {}


def chunk_sizes(weight: Tensor, bias: Tensor | None, rows: int) -> tuple[int, ...]:
    """Return the chunk sizes for a weight of this shape, from a trial on this GPU.

    A row's result is bit-identical in chunks of all these sizes. If several sets of sizes have this
    property, the set that is fastest over packs of all lengths is chosen. Of equally fast sets, it
    is the one that contains ``rows``, rounded up to a multiple of 64.
    """
    key = (*weight.shape, weight.dtype, weight.device.index, bias is None, rows)
    sizes = _TRIED.get(key)
    if sizes is None:
        sizes = _TRIED[key] = _try_sizes(weight, bias, rows)
    return sizes


def _try_sizes(weight: Tensor, bias: Tensor | None, rows: int) -> tuple[int, ...]:
    rows += -rows % STEP
    groups = [
        group for group in group_identical_sizes(weight, bias, sorted({rows, *_SIZES})) if group
    ]
    if not groups:
        logger.warning(
            "model.batch_invariant may not hold: rewards may depend on the other samples in a "
            "batch, because with a weight of shape %s in %s no chunk size gives bit-identical "
            "rows. Please report the GPU and the version of cuBLAS",
            tuple(weight.shape),
            weight.dtype,
        )
        return (rows,)

    def cost(group: tuple[int, ...]) -> tuple[float, bool]:
        packs = [size for size in _SIZES if size >= _FREE_ROWS]
        slowdowns = (
            _estimate_cost(split_rows(size, group)) / _estimate_cost((size,)) for size in packs
        )
        return sum(slowdowns), rows not in group

    return min(groups, key=cost)


@torch.no_grad()
def group_identical_sizes(
    weight: Tensor, bias: Tensor | None, sizes: list[int]
) -> list[tuple[int, ...]]:
    """Group chunk sizes: a row's result is bit-identical in chunks of all sizes of a group.

    All ``sizes`` are multiples of 64. A size is in no group if a row's result depends on the row's
    position in the chunk.
    """
    drawn, drawn_weight, drawn_bias = that_cancel(weight, bias, _DRAWN)
    firsts, are_alike = [], []
    for size in sizes:
        chunk = drawn.repeat(size // _DRAWN, 1)
        out = chunk.new_empty(size, weight.size(0))
        _multiply(chunk, drawn_weight, drawn_bias, out)
        # The chunk repeats the same 16 rows, so every repetition must have the same results.
        firsts.append(out[:_DRAWN].clone())
        are_alike.append((out.view(-1, _DRAWN, weight.size(0)) == firsts[-1]).all())
    remaining = [index for index, alike in enumerate(torch.stack(are_alike).tolist()) if alike]
    groups = []
    while remaining:
        first = firsts[remaining[0]]
        equal = torch.stack([(firsts[index] == first).all() for index in remaining]).tolist()
        same = [index for index, is_equal in zip(remaining, equal, strict=True) if is_equal]
        groups.append(tuple(sizes[index] for index in same))
        remaining = [index for index in remaining if index not in same]
    return groups
