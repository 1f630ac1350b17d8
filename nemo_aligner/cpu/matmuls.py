"""Matmuls on a CPU: large ones with oneDNN, batch invariant ones, and malloc settings for both."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

# Linear layers with oneDNN.
#
# torch gives fp32 matmuls to MKL, which uses AVX-512 only on Intel's processors. On an AMD Zen 5
# oneDNN is about twice as fast. It compiles a kernel for every new shape, which takes half a
# millisecond and nearly a MiB of memory. So matmuls are cut into chunks of a few sizes, and the
# last chunk is padded with zeros.

# oneDNN is faster than MKL for matmuls of at least this many rows and FLOPs.
_FEWEST, _LARGE = 8, 2**22
MOST_ROWS = 512
"""The most rows of a matmul; more rows are cut into chunks."""
BATCH_INVARIANT_ROWS = 256
"""Default rows of a batch invariant matmul; see ``invariant_linear_on_cpu``."""
# The number of rows of a chunk is a multiple of _STEP, or of _STEP / 2 up to _FINELY rows. Weight
# gradients sum over rows: they use chunks of _SUMMED_CHUNK rows, padded to _SUMMED_STEP.
_STEP, _FINELY = 16, 128
_SUMMED_CHUNK, _SUMMED_STEP = 1024, 64


def multiply_by_onednn(layers: Any) -> None:
    """Patch megatron-core's linear layers to use oneDNN for large matmuls.

    In training, the layers use oneDNN only where MKL is slow.

    Args:
        layers: megatron-core's module ``tensor_parallel.layers``.
    """
    if not torch.backends.mkldnn.is_available():
        return
    for kind in (layers.ColumnParallelLinear, layers.RowParallelLinear):
        kind._forward_impl = _by_onednn_where_large(kind._forward_impl)


def _by_onednn_where_large(plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(self: Any, input: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
        learns = torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad)
        # With sequence parallelism, use ``plain``, megatron-core's own function, because it gathers
        # the input from the other ranks before the matmul.
        if (
            not _is_large(input, weight)
            or (learns and not is_slow_with_mkl())
            or options["sequence_parallel"]
        ):
            return plain(self, input, weight, *args, **options)
        if not learns:
            return linear_in_chunks(input, weight, options["bias"])
        group = options["tp_group"] if options["allreduce_dgrad"] else None
        fused = options["gradient_accumulation_fusion"]
        return ChunkedLinear.apply(input, weight, options["bias"], fused, group)

    return forward


def _is_large(input: Tensor, weight: Tensor) -> bool:
    return (
        input.is_cpu
        and input.dtype is weight.dtype is torch.float32
        and input.numel() >= _FEWEST * input.size(-1)
        and 2 * input.numel() * weight.size(0) >= _LARGE
    )


def linear_in_chunks(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply ``input [..., i]`` by ``weight [o, i]`` -> ``[..., o]`` with oneDNN, fp32 on a CPU.

    Few chunk sizes are used, because oneDNN compiles a kernel for each.
    """
    rows = input.reshape(-1, input.size(-1))
    chunks = [
        _matmul(filled, weight, bias)[:count] for filled, count in _chunks(rows, MOST_ROWS, _STEP)
    ]
    output = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
    return output.view(*input.shape[:-1], weight.size(0))


def linear_on_cpu(input: Tensor, weight: Tensor) -> Tensor:
    """Multiply ``input [N, i]`` by ``weight [o, i]`` -> ``[N, o]``, with the faster library."""
    if _is_large(input, weight) and is_slow_with_mkl():
        return linear_in_chunks(input, weight)
    return F.linear(input, weight)


def invariant_linear_on_cpu(
    input: Tensor, weight: Tensor, bias: Tensor | None, rows: int
) -> Tensor:
    """Compute a matmul on a CPU so that no row of the result depends on the number of rows.

    Every row is bit-identical to the same row in a matmul of the reference size (``rows`` rows or
    64, see ``_reference_size``). The matmul is computed in chunks of sizes for which a trial has
    shown this.
    """
    width = input.size(-1)
    num_rows = input.numel() // width
    # The usual case is a single matmul without padding.
    is_filled = num_rows <= MOST_ROWS and num_rows % row_multiple(num_rows) == 0
    if is_filled and num_rows == _chunk_size(num_rows, weight, bias, rows):
        return _any_matmul(input, weight, bias)
    outputs = []
    for chunk in input.reshape(-1, width).split(MOST_ROWS):
        count = chunk.size(0)
        size = _chunk_size(count + -count % row_multiple(count), weight, bias, rows)
        outputs += [
            _any_matmul(filled, weight, bias)[:count]
            for filled, count in _chunks(chunk, size, size)
        ]
    return torch.cat(outputs).view(*input.shape[:-1], weight.size(0))


def row_multiple(count: int) -> int:
    """Return the multiple to which ``count`` rows are padded: 8 up to 128 rows, else 16."""
    return _STEP // 2 if count <= _FINELY else _STEP


def training_row_multiple(count: int) -> int:
    """Return the multiple to which training pads a pack of ``count`` tokens: at most a sixteenth.

    Packs then have at most sixteen sizes between two powers of two. oneDNN keeps up to 1,024
    compiled matmuls, each for one size. If every pack had its own size, no compiled matmul would be
    used twice, and the memory that they hold would fragment the heap: a run of hundreds of steps
    took twice the memory, and spent a third of its time on malloc's search for free blocks.
    """
    return 1 << max(count.bit_length() - 5, 0)


def try_all_sizes(weight: Tensor, bias: Tensor | None, rows: int) -> None:
    """Try all chunk sizes of ``invariant_linear_on_cpu`` now, so that no later call needs a trial.

    oneDNN also compiles and caches its kernels for these sizes.
    """
    if weight.is_cpu:
        trials = Trials(weight, bias)
        for size in range(_STEP // 2, MOST_ROWS + 1, _STEP // 2):
            if size % row_multiple(size) == 0:
                _chunk_size(size, weight, bias, rows, trials)


# Results of trials. Only one weight of each shape is tried out, because the order of summation
# depends only on shapes.
_TRIED: dict[tuple[Any, ...], int] = {}
_FEW, _PROBED = 64, range(48, MOST_ROWS, 64)


def _chunk_size(
    size: int, weight: Tensor, bias: Tensor | None, rows: int, trials: Trials | None = None
) -> int:
    """Return the smallest chunk size of at least ``size`` that is bit-identical to the reference.

    The reference is the size that ``_reference_size`` returns; it is the result if a trial finds no
    smaller size.

    Args:
        trials: those of ``weight`` and ``bias``, if the caller needs several sizes.
    """
    kind = (*weight.shape, weight.dtype, weight.layout, bias is None, torch.get_num_threads())
    name = (size, rows, *kind)
    if name not in _TRIED:
        trials = trials or Trials(weight, bias)
        reference = _reference_size(trials, rows, kind)
        more = range(size + -size % _STEP, reference, _STEP)
        same = (
            candidate for candidate in (size, *more) if _is_same(candidate, trials, reference, kind)
        )
        _TRIED[name] = next(same, reference)
    return _TRIED[name]


def _is_same(size: int, trials: Trials, reference: int, kind: tuple[Any, ...]) -> bool:
    """Tell if a row has bit-identical results in matmuls of ``size`` and of ``reference`` rows.

    A trial decides this; its result is stored in ``_TRIED``.

    Args:
        kind: what the result depends on in addition to the two sizes, such as the weight's shape.
    """
    name = ("is the same", size, reference, *kind)
    if name not in _TRIED:
        _TRIED[name] = size == reference or trials.has_same_bits(size, reference)
    return bool(_TRIED[name])


def _reference_size(trials: Trials, rows: int, kind: tuple[Any, ...]) -> int:
    """Return ``rows``, or 64 where a matmul of 64 rows is bit-identical to more other sizes.

    In bf16 on AMX, oneDNN sums in one of several orders, depending on the number of rows. For a
    weight ``[576, 1536]``, 7 of 32 sizes are bit-identical to 256 rows, and 24 of the 32 to 64
    rows.
    """
    name = ("reference", rows, *kind)
    if name not in _TRIED:

        def count_same(reference: int) -> int:
            return sum(_is_same(size, trials, reference, kind) for size in _PROBED)

        is_same_for_all = count_same(rows) == len(_PROBED)
        _TRIED[name] = rows if is_same_for_all else max((rows, _FEW), key=count_same)
    return _TRIED[name]


class Trials:
    """Matmuls of the same random rows in several sizes, whose results are compared bit by bit.

    The rows and a weight are drawn once for each size that others are compared with.

    Args:
        weight, bias: tensors that give only their shapes, dtype, layout and device.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        # What was drawn for a number of rows, and the product of these rows.
        self._drawn: dict[int, tuple[tuple[Tensor, Tensor, Tensor | None], Tensor]] = {}

    def has_same_bits(self, size: int, rows: int) -> bool:
        """Compute the same rows in matmuls of ``size`` and of ``rows`` rows, and compare.

        Returns:
            True if every row of the matmul of ``size`` rows is bit-identical to the result that the
            same input row has in the matmul of ``rows`` rows.
        """
        if rows not in self._drawn:
            drawn = that_cancel(self._weight, self._bias, rows)
            self._drawn[rows] = drawn, _any_matmul(*drawn)
        (x, weight, bias), expected = self._drawn[rows]
        repeated = torch.arange(size) % rows
        product = _any_matmul(x[repeated], weight, bias)
        return bool((product == expected[repeated]).all())


def that_cancel(
    weight: Tensor, bias: Tensor | None, rows: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw an input, a weight and a bias whose exact product is 0, to compare orders of summation.

    The computed product consists only of rounding errors, which differ if the order of summation
    differs. Added to a sum that is not 0, nearly all of these errors would be rounded away in bf16.
    The rows of the drawn weight repeat, so that few have to be drawn.

    Args:
        weight, bias: tensors whose shapes and dtype the drawn ones get.
        rows: number of rows of the input.

    Returns:
        Input ``[rows, i]``, weight ``[o, i]`` and bias ``[o]``, on the device and in the dtype of
        ``weight``.
    """
    count, device = weight.size(1), weight.device
    generator = torch.Generator().manual_seed(0)

    def draw(rows: int) -> Tensor:
        powers = torch.randint(-4, 5, (rows, count), generator=generator)
        drawn = torch.randn(rows, count, generator=generator) * torch.exp2(powers)
        return drawn.to(weight.dtype)

    x, w = draw(rows), draw(min(weight.size(0), _FEW))
    order = torch.randperm(count, generator=generator)
    first, second = order[: count // 2], order[count // 2 : count // 2 * 2]
    x[:, second], w[:, second] = x[:, first], -w[:, first]
    x[:, order[count // 2 * 2 :]] = 0
    if bias is not None and count > 1:
        same_bias = draw(1)[0, :1]
        x[:, first[0]], x[:, second[0]], w[:, first[0]] = 1, 0, -same_bias
        bias = same_bias.to(device).expand_as(bias).contiguous()
    w = w.to(device)[torch.arange(weight.size(0), device=device) % _FEW]
    return x.to(device), w if weight.layout is torch.strided else reordered_for_matmuls(w), bias


def _any_matmul(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return (_matmul if _is_onednns(rows.dtype) else F.linear)(rows, weight, bias)


@cache
def _is_onednns(dtype: torch.dtype) -> bool:
    """Tell if matmuls of this dtype use oneDNN on this CPU; bf16 needs special instructions."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype is torch.float32


def reordered_for_matmuls(weight: Tensor) -> Tensor:
    """Copy ``weight [o, i]`` into oneDNN's layout for matmuls; ``to_dense`` undoes it.

    Otherwise every matmul converts the weight, which takes as long as about 20 rows of the matmul.
    The layout is the same for any number of rows, and results are bit-identical. Where oneDNN does
    not compute the matmuls, ``weight`` itself is returned.
    """
    if not (weight.is_cpu and _is_onednns(weight.dtype)):
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight, MOST_ROWS)


def accumulate_weight_gradients(layers: Any, add: Callable[[Tensor, Tensor, Tensor], None]) -> None:
    """Give megatron-core a function for fused weight gradients, which Apex would provide on a GPU.

    Args:
        layers: megatron-core's module ``tensor_parallel.layers``.
        add: ``add_weight_gradient`` of this module for CPUs, or that of ``gpu_matmuls`` for GPUs.
    """

    def into(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        add(main_grad, total_input, grad_output)

    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
        wgrad_gemm_accum_fp32=into, wgrad_gemm_accum_fp16=into
    )
    layers._grad_accum_fusion_available = True


def add_weight_gradient(to: Tensor, input: Tensor, grad: Tensor) -> None:
    """Add the weight gradient of ``input [..., i]`` and ``grad [..., o]`` to ``to [o, i]``.

    oneDNN computes the gradient where MKL is slow.
    """
    rows, grads = (tensor.reshape(-1, tensor.size(-1)) for tensor in (input, grad))
    if to.dtype is not rows.dtype:
        to.add_(grads.t() @ rows)
    elif not (is_slow_with_mkl() and _is_large(rows, to)):
        to.addmm_(grads.t(), rows)
    else:
        filled = (_chunks(tensor, _SUMMED_CHUNK, _SUMMED_STEP) for tensor in (rows, grads))
        for (row_chunk, _), (grad_chunk, _) in zip(*filled, strict=True):
            to.add_(_matmul(grad_chunk.t().contiguous(), row_chunk.t().contiguous(), None))


def _chunks(rows: Tensor, max_rows: int, step: int) -> Iterator[tuple[Tensor, int]]:
    """Yield chunks of ``rows``, each with its number of rows before padding.

    Chunks have at most ``max_rows`` rows, and are padded with zeros to a multiple of ``step``.
    """
    for chunk in rows.split(max_rows):
        fill = -chunk.size(0) % step
        yield F.pad(chunk, (0, 0, 0, fill)) if fill else chunk, chunk.size(0)


def _matmul(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(rows, weight, bias, "none", [], "")


class ChunkedLinear(Function):
    """``linear_in_chunks`` as an autograd function, with the gradients that megatron-core needs.

    With ``fused`` the weight's gradient is added to its ``main_grad``. The input's gradient is
    summed over ``group``, if it is not None.
    """

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, fused: bool, group: Any
    ) -> Tensor:
        # The backward pass needs the input only for the gradient of the weight.
        saved = input if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(saved)
        # Keep the weight as an attribute: hooks on saved tensors would return an alias without
        # Megatron's attributes.
        ctx.weight = weight
        ctx.main_grad = getattr(weight, "main_grad", None) if fused else None
        ctx.group = group
        return linear_in_chunks(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (input,), weight = grads, ctx.saved_tensors, ctx.weight
        to_input = to_weight = to_bias = summed = None
        if ctx.needs_input_grad[0]:
            to_input = linear_in_chunks(grad, weight.t())
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
    """Return the weight's gradient, or add it to ``main_grad`` if that is not None.

    In the second case, the result is None, or an uninitialised tensor if Megatron's gradient hook
    needs one to run.
    """
    if main_grad is None:
        gradient = torch.zeros_like(weight)
        add_weight_gradient(gradient, input, grad)
        return gradient
    add_weight_gradient(main_grad, input, grad)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return torch.empty_like(weight)


# Features of the CPU that decide which library multiplies faster.

_CPUINFO = Path("/proc/cpuinfo")


def multiplies_bf16() -> bool:
    """Tell if the CPU has bf16 matmul instructions; torch has no public function for this."""
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


@cache
def is_slow_with_mkl() -> bool:
    """Tell if MKL is slow in fp32: the CPU is not Intel's, so MKL does not use its AVX-512."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return False
    try:
        return "GenuineIntel" not in _CPUINFO.read_text()
    except OSError:
        return False


# Settings of glibc's malloc, which decide what happens to freed memory.


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory for reuse; no effect on other mallocs.

    Otherwise every large tensor gets new pages, which cost more than most operations on it.
    """
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h
    _set_malloc(trim_threshold, -1)
    _set_malloc(mmap_max, 0)


def return_freed_memory() -> None:
    """Make malloc return every large tensor's memory to the system as soon as it is freed.

    By default malloc soon keeps free blocks of up to 32 MiB that lie between blocks in use.
    """
    mmap_threshold = -3
    _set_malloc(mmap_threshold, 2**19)


class FreedMemory:
    """Return malloc's free pages to the system when fragmentation grows the process too much.

    This is needed after ``keep_freed_memory``, which makes malloc keep all freed memory. Packs
    differ in size, so a freed block seldom fits the next request. When resident memory exceeds that
    of the first ``steps`` steps by ``fraction``, all free pages are returned and counting starts
    again. The next step then has to get new pages, so pages are returned at most once in
    ``steps + 1`` steps. This has no effect where malloc is not glibc's.
    """

    def __init__(self, fraction: float = 0.125, steps: int = 10) -> None:
        self._fraction = fraction
        self._steps = steps
        self._seen = 0
        self._needed = 0

    def end_step(self) -> bool:
        """Check resident memory after a step, in about 20 us; True if free pages were returned."""
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
    """Give all of malloc's free pages back to the system; True if there were any."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(ctypes.c_size_t(0)))


def resident_bytes() -> int:
    """Return how many bytes of memory of this process are resident; 0 where there is no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except FileNotFoundError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def use_huge_pages() -> bool:
    """Move malloc's current heap into huge pages; True if Linux (6.1 on) moved all of it.

    Every matmul reads a whole weight, which would lie in thousands of small pages. Call this
    function once the weights are loaded, and call ``keep_freed_memory`` before loading, so that
    they are on the heap. On a machine with a GPU the function does nothing, because the GPU has the
    weights.
    """
    if torch.cuda.is_available():
        return False
    size, collapse = 2**21, 25  # MADV_COLLAPSE of mman.h
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return False
    heaps = (line.split()[0].split("-") for line in lines if line.endswith("[heap]"))
    moved = []
    for begin, end in heaps:
        first, last = -(-int(begin, 16) // size) * size, int(end, 16) // size * size
        if first < last:
            span = ctypes.c_void_p(first), ctypes.c_size_t(last - first)
            moved.append(ctypes.CDLL(None).madvise(*span, collapse) == 0)
    return bool(moved) and all(moved)


def _set_malloc(option: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(option, value)
