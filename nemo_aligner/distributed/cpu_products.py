"""Matrix products on a CPU: oneDNN where they are large, and the allocator settings they need."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

# Matrix products of linear layers on a CPU: by oneDNN where they are large.
#
# torch gives fp32 products to MKL, which on processors of other makers than Intel leaves AVX-512
# unused: on an AMD Zen 5 oneDNN is about twice as fast (``docs/performance.md``). For every shape
# that it meets it makes a kernel, which takes half a millisecond, and nearly a MiB that it keeps.
# So it gets pieces of a few sizes, the last one filled up with zeros.

# From so many rows, and multiplications and additions, on oneDNN is the faster one.
_FEWEST, _LARGE = 8, 2**22
# Rows of a piece, at most and in steps; and of one whose product is a sum over rows.
_PIECE, _STEP = 512, 32
_SUMMED_PIECE, _SUMMED_STEP = 1024, 64


class _WeightGradients:
    """What megatron-core takes from Apex's CUDA extension: the product is summed as it is made."""

    @staticmethod
    def wgrad_gemm_accum_fp32(total_input: Any, grad_output: Any, main_grad: Any) -> None:
        add_weight_gradient(main_grad, total_input, grad_output)

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


def accumulate_weight_gradients(layers: Any) -> None:
    layers.fused_weight_gradient_mlp_cuda = _WeightGradients
    layers._grad_accum_fusion_available = True


def multiply_by_onednn(layers: Any) -> None:
    """Have the linear layers of megatron-core do so; in training where MKL is known to be slow."""
    if not torch.backends.mkldnn.is_available():
        return
    for kind in (layers.ColumnParallelLinear, layers.RowParallelLinear):
        kind._forward_impl = _by_onednn_where_large(kind._forward_impl)


def _by_onednn_where_large(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(self: Any, input: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
        learns = torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad)
        # Under sequence parallelism the input has to be gathered first.
        if (
            not _is_large(input, weight)
            or (learns and not is_slow_with_mkl())
            or options["sequence_parallel"]
        ):
            return plain(self, input, weight, *args, **options)
        if not learns:
            return linear_by_pieces(input, weight, options["bias"])
        group = options["tp_group"] if options["allreduce_dgrad"] else None
        fused = options["gradient_accumulation_fusion"]
        return LinearByPieces.apply(input, weight, options["bias"], fused, group)

    return forward


def _is_large(input: Tensor, weight: Tensor) -> bool:
    return (
        input.is_cpu
        and input.dtype is weight.dtype is torch.float32
        and input.numel() >= _FEWEST * input.size(-1)
        and 2 * input.numel() * weight.size(0) >= _LARGE
    )


def linear_by_pieces(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``input [..., i]`` by ``weight [o, i]`` -> ``[..., o]``, all fp32 on the CPU."""
    rows = input.reshape(-1, input.size(-1))
    pieces = [
        _product(filled, weight, bias)[:count] for filled, count in _pieces(rows, _PIECE, _STEP)
    ]
    found = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return found.view(*input.shape[:-1], weight.size(0))


def invariant_linear_on_cpu(
    input: Tensor, weight: Tensor, bias: Tensor | None, rows: int
) -> Tensor:
    """``input [..., i]`` by ``weight [o, i]`` -> ``[..., o]``, a row's bits as among ``rows`` rows.

    In pieces as ``linear_by_pieces`` has them, where a trial found that they give the same bits;
    else in pieces of ``rows``.
    """
    given = input.reshape(-1, input.size(-1))
    found = []
    for piece in given.split(_PIECE):
        size = piece.size(0) + -piece.size(0) % _STEP
        if size != rows and not _has_same_bits(size, weight, bias, rows):
            size = rows
        found += [
            _any_product(filled, weight, bias)[:count]
            for filled, count in _pieces(piece, size, size)
        ]
    whole = found[0] if len(found) == 1 else torch.cat(found)
    return whole.view(*input.shape[:-1], weight.size(0))


_TRIED: dict[tuple[Any, ...], bool] = {}


def _has_same_bits(size: int, weight: Tensor, bias: Tensor | None, rows: int) -> bool:
    """Whether a product of ``size`` rows gives a row the bits that one of ``rows`` rows does.

    Tried once for each shape of a weight: what orders the sums knows the shapes, not the numbers.
    """
    name = (size, rows, *weight.shape, weight.dtype, bias is None, torch.get_num_threads())
    if name not in _TRIED:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(rows, weight.size(1), generator=generator).to(weight.dtype)
        wanted = _any_product(drawn, weight, bias)
        repeated = torch.arange(size) % rows
        found = _any_product(drawn[repeated], weight, bias)
        _TRIED[name] = bool((found == wanted[repeated]).all())
    return _TRIED[name]


def _any_product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if rows.dtype in (torch.float32, torch.bfloat16) and torch.backends.mkldnn.is_available():
        return _product(rows, weight, bias)
    return F.linear(rows, weight, bias)


def add_weight_gradient(to: Tensor, input: Tensor, grad: Tensor) -> None:
    """Add to ``to [o, i]`` that of ``input [..., i]``, whose product has the gradient ``[..., o]``.

    By oneDNN where MKL is known to be slow.
    """
    rows, grads = (each.reshape(-1, each.size(-1)) for each in (input, grad))
    if to.dtype is not rows.dtype:
        to.add_(grads.t() @ rows)
    elif not (is_slow_with_mkl() and _is_large(rows, to)):
        to.addmm_(grads.t(), rows)
    else:
        filled = (_pieces(each, _SUMMED_PIECE, _SUMMED_STEP) for each in (rows, grads))
        for (some, _), (its, _) in zip(*filled, strict=True):
            to.add_(_product(its.t().contiguous(), some.t().contiguous(), None))


def _pieces(rows: Tensor, most: int, step: int) -> Iterator[tuple[Tensor, int]]:
    """Rows, filled up with zeros to a multiple of ``step``, and how many there were."""
    for piece in rows.split(most):
        fill = -piece.size(0) % step
        yield F.pad(piece, (0, 0, 0, fill)) if fill else piece, piece.size(0)


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")


class LinearByPieces(Function):
    """``linear_by_pieces``, with the gradients that megatron-core's linear layers have.

    ``fused``: the weight's gradient is added to its ``main_grad``. The input's is summed over
    ``group``, if there is one.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, fused: bool, group: Any
    ) -> Tensor:
        # A frozen weight has no use for the input.
        kept = input if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(kept, weight)
        ctx.main_grad = getattr(weight, "main_grad", None) if fused else None
        ctx.group = group
        return linear_by_pieces(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        input, weight = ctx.saved_tensors
        to_input = to_weight = to_bias = summed = None
        if ctx.needs_input_grad[0]:
            to_input = linear_by_pieces(grad, weight.t())
            if ctx.group is not None:
                summed = dist.all_reduce(to_input, group=ctx.group, async_op=True)
        if ctx.needs_input_grad[1]:
            to_weight = _weight_gradient(ctx.main_grad, input, weight, grad)
        if ctx.needs_input_grad[2]:
            to_bias = grad.reshape(-1, grad.size(-1)).sum(0)
        if summed is not None:
            summed.wait()
        return to_input, to_weight, to_bias, None, None


def _weight_gradient(
    main_grad: Tensor | None, input: Tensor, weight: Tensor, grad: Tensor
) -> Tensor | None:
    """What autograd is told: where it is added to ``main_grad``, something to call its hooks by."""
    if main_grad is None:
        found = torch.zeros_like(weight)
        add_weight_gradient(found, input, grad)
        return found
    add_weight_gradient(main_grad, input, grad)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.empty_like(weight)


# What this machine's processor has instructions for.

_CPUINFO = Path("/proc/cpuinfo")


def multiplies_bf16() -> bool:
    """Whether matrix products are made for bf16; torch has no public name for the question."""
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


@cache
def is_slow_with_mkl() -> bool:
    """Whether it has AVX-512, and MKL does not use it for fp32: it does so on Intel's alone."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return False
    try:
        return "GenuineIntel" not in _CPUINFO.read_text()
    except OSError:
        return False


# What glibc's malloc does with memory that is freed.


def keep_freed_memory() -> None:
    """Have malloc keep what is freed for what comes next, where it is glibc's.

    Else every large tensor is new memory from the system, which takes longer to get, page by page,
    than most operations take to fill it.
    """
    trim_threshold, mmap_max = -1, -4  # as malloc.h numbers them
    _set_malloc(trim_threshold, -1)
    _set_malloc(mmap_max, 0)


def return_freed_memory() -> None:
    """Have malloc hand every tensor's memory back to the system when it is freed.

    By itself it would soon keep freed memory of up to 32 MiB, between pieces that are in use.
    """
    mmap_threshold = -3
    _set_malloc(mmap_threshold, 2**19)


class FreedMemory:
    """Bounds what gaps between live blocks take where malloc keeps what is freed.

    Packs have ever other sizes, so a freed block seldom fits what comes next. What is resident may
    pass what the first steps after all gaps were given back needed by ``fraction``; then the gaps
    are given back again. The step that follows waits for new pages, so this is at most once in
    ``steps + 1`` steps. Nothing happens where malloc is not glibc's.
    """

    def __init__(self, fraction: float = 0.125, steps: int = 10) -> None:
        self._fraction = fraction
        self._steps = steps
        self._seen = 0
        self._needed = 0

    def end_step(self) -> bool:
        """Look at what is resident; whether gaps were given back. It takes some 20 microseconds."""
        resident = resident_bytes()
        if self._seen < self._steps:
            self._seen += 1
            self._needed = max(self._needed, resident)
            return False
        if resident <= self._needed * (1 + self._fraction):
            return False
        self._seen = self._needed = 0
        return give_back_gaps()


def give_back_gaps() -> bool:
    """Give the whole pages of all free blocks back to the system; whether any were."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(ctypes.c_size_t(0)))


def resident_bytes() -> int:
    """Of this process, its libraries' pages included; 0 where the system has no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except FileNotFoundError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _set_malloc(option: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(option, value)
