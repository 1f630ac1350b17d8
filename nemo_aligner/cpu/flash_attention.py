"""torch's flash attention for CPUs, and the merging of its partial results.

Its operators are below ``scaled_dot_product_attention``, which drops the log-sum-exp of the scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

cpu_flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
cpu_flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def add_attended(out: Tensor, lse: Tensor, added: Tensor, added_lse: Tensor) -> None:
    """Merge the result of further keys into ``out`` and ``lse`` by their log-sum-exp, in place.

    Args:
        out, added: ``[..., c]``.
        lse, added_lse: ``[...]``, the log-sum-exp of the scores of their keys.
    """
    total = torch.logaddexp(lse, added_lse)
    weight = torch.exp(added_lse - total).unsqueeze(-1)
    out += (added - out) * weight.to(out.dtype)
    lse.copy_(total)
