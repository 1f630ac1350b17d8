"""Attention sinks: a learned logit of each query head joins the softmax (gpt-oss, OpenAI 2025).

Its probability is dropped, as if it had a value of zeros (Xiao et al. 2023, arXiv:2309.17453). With
the output ``o`` and the log-sum-exp ``lse`` of attention without it, both change to

    lse' = logaddexp(lse, sink),  o' = o * exp(lse - lse').

Every kernel's backward pass computes ``P = exp(score - lse)`` and ``dscore = P * (dP - do . o)``.
Given ``o'`` and ``lse'`` instead, these are the gradients with the sink, because a value of zeros
adds nothing to ``do . o``. The sink itself has ``dP = 0``, so its gradient is
``- exp(sink - lse') * (do . o')``, summed over the queries.
"""

from __future__ import annotations

import torch
from torch import Tensor


def join_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Change ``out [..., c]`` and ``lse [...]`` of attention, in place, to those with sinks.

    Args:
        sinks: logits, in a shape that broadcasts to ``lse``.
    """
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    out.mul_(torch.exp(lse - total).unsqueeze(-1).to(out.dtype))
    lse.copy_(total)


def sink_gradients(grad: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Compute each query's part of the gradient of the sinks, in the shape of ``lse``.

    Args:
        grad: gradient of ``out [..., c]``.
        out, lse: the results of ``join_sinks``.
        sinks: as there.
    """
    products = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return products.mul_(torch.exp(sinks.to(lse.dtype) - lse)).neg_()
