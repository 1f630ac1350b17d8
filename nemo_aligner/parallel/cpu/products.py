"""Matrix products of inference on a CPU: by oneDNN where they are large.

torch gives fp32 products to MKL, which on processors of other makers than Intel leaves AVX-512
unused: on an AMD Zen 5 oneDNN is 2.2 to 2.6 times as fast (``docs/performance.md``). It makes a
kernel for every shape that it meets, which takes longer than a small product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Multiplications and additions from which on oneDNN is the faster one, its kernel not yet made.
_LARGE = 2**25


def multiply_by_onednn(layers: Any) -> None:
    """Have the linear layers of megatron-core do so, outside of training."""
    import torch

    if not torch.backends.mkldnn.is_available():
        return
    for kind in (layers.ColumnParallelLinear, layers.RowParallelLinear):
        kind._forward_impl = _by_onednn_where_large(kind._forward_impl)


def _by_onednn_where_large(plain: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    linear = torch.ops.mkldnn._linear_pointwise

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
        return linear(input, weight, kwargs.get("bias"), "none", [], "")

    return forward
