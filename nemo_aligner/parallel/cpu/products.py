"""Matrix products of inference on a CPU: by oneDNN where they are large.

torch gives fp32 products to MKL, which on processors of other makers than Intel leaves AVX-512
unused: on an AMD Zen 5 oneDNN is 2.2 to 2.6 times as fast (``docs/performance.md``). For every
shape that it meets it makes a kernel, which takes half a millisecond, and nearly a MiB that it
keeps. So it gets pieces of a few sizes, and MKL what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

# Multiplications and additions from which on oneDNN is the faster one.
_LARGE = 2**25
_PIECE, _SMALLEST = 512, 64  # rows


def multiply_by_onednn(layers: Any) -> None:
    """Have the linear layers of megatron-core do so, outside of training."""
    import torch

    if not torch.backends.mkldnn.is_available():
        return
    for kind in (layers.ColumnParallelLinear, layers.RowParallelLinear):
        kind._forward_impl = _by_onednn_where_large(kind._forward_impl)


def _by_onednn_where_large(plain: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    def forward(self: Any, input: Any, weight: Any, *args: Any, **kwargs: Any) -> Any:
        is_ours = (
            not torch.is_grad_enabled()
            and input.is_cpu
            and input.dtype is weight.dtype is torch.float32
            and 2 * input.numel() * weight.size(0) >= _LARGE
            # Then the input is gathered first.
            and not kwargs.get("sequence_parallel")
        )
        if not is_ours:
            return plain(self, input, weight, *args, **kwargs)
        return linear_by_pieces(input, weight, kwargs.get("bias"))

    return forward


def linear_by_pieces(input: Any, weight: Any, bias: Any = None) -> Any:
    """``input [..., i]`` by ``weight [o, i]`` -> ``[..., o]``, all fp32 on the CPU."""
    import torch

    rows = input.reshape(-1, input.size(-1))
    found = rows.new_empty(rows.size(0), weight.size(0))
    for start, stop in _pieces(rows.size(0)):
        piece = rows[start:stop]
        if stop - start < _SMALLEST:
            found[start:stop] = torch.nn.functional.linear(piece, weight, bias)
        else:
            found[start:stop] = torch.ops.mkldnn._linear_pointwise(
                piece, weight, bias, "none", [], ""
            )
    return found.view(*input.shape[:-1], weight.size(0))


def _pieces(rows: int) -> Iterator[tuple[int, int]]:
    """Whole pieces, then one of a multiple of the smallest, then what is left."""
    start = 0
    for size in (*[_PIECE] * (rows // _PIECE), rows % _PIECE // _SMALLEST * _SMALLEST):
        if size:
            yield start, start + size
            start += size
    if start < rows:
        yield start, rows
