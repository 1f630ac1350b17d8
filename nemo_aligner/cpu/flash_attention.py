"""torch's flash attention for CPUs, and the merging of its partial results.

It calls private operators, because ``scaled_dot_product_attention`` does not return the
log-sum-exp.
"""

from __future__ import annotations

import torch
from torch import Tensor

cpu_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def add_attended(out: Tensor, lse: Tensor, added: Tensor, added_lse: Tensor) -> None:
    """Merge the result of attending to further keys into ``out`` and ``lse``, in place.

    Args:
        out, added: ``[..., c]``.
        lse, added_lse: ``[...]``, the log-sum-exp of the scores, which gives each result its
            weight.
    """
    total = torch.logaddexp(lse, added_lse)
    weight = torch.exp(added_lse - total).unsqueeze(-1)
    out += (added - out) * weight.to(out.dtype)
    lse.copy_(total)
