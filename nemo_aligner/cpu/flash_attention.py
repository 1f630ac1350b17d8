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
    """Merge attention to further keys (``added``) into attention to other keys, in place.

    Args:
        out, added: ``[..., c]``, the outputs of attention for the same queries.
        lse, added_lse: ``[...]``, the log-sum-exps of their scores, which are the weights of the
            two outputs.
    """
    total = torch.logaddexp(lse, added_lse)
    weight = torch.exp(added_lse - total).unsqueeze(-1)
    out += (added - out) * weight.to(out.dtype)
    lse.copy_(total)
