"""Copies of the keys and values of shared prefixes, one for each sequence that begins with them.

Kernels for packs read each segment's keys from consecutive rows, so the rows of a prefix are copied
for each segment that continues it. In the backward pass, the gradients of a row's copies are
summed. Torch's own backward pass of an index would sort the index again in every layer; here it is
sorted once for each pack.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


class Copies(NamedTuple):
    """Which copies each row has.

    Attributes:
        order: ``[K]`` int64: the numbers of the K copies, grouped by the row that they copy.
        starts: ``[N]`` int64: where the copies of each of the N rows begin in ``order``.
    """

    order: Tensor
    starts: Tensor

    @classmethod
    def of(cls, index: Tensor, num_rows: int) -> Copies:
        """Find the copies of ``num_rows`` rows, by the ``index [K]`` of the row of each copy.

        The host does not wait for the device.
        """
        rows, order = torch.sort(index, stable=True)
        starts = torch.searchsorted(rows, torch.arange(num_rows, device=index.device))
        return cls(order, starts)

    def sum(self, gradients: Tensor) -> Tensor:
        """Sum the gradients ``[K, ...]`` of all copies of each row, ``[N, ...]``.

        The sums are computed in fp32 or wider, in the order of the copies, and rounded once.
        """
        flat = gradients.flatten(1)
        # An embedding bag sums given rows of a table.
        sums = F.embedding_bag(self.order, flat, self.starts, mode="sum")
        return sums.unflatten(1, gradients.shape[1:])


def copy_rows(rows: Tensor, index: Tensor, copies: Copies | None) -> Tensor:
    """Return ``rows[index]``; with gradients, these are summed by ``copies`` if it is not None."""
    if copies is None or not rows.requires_grad:
        return rows[index]
    copied: Tensor = _CopyRows.apply(rows, index, *copies)
    return copied


class _CopyRows(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, order: Tensor, starts: Tensor) -> Tensor:
        ctx.save_for_backward(order, starts)
        return rows[index]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return Copies(*ctx.saved_tensors).sum(grads[0]), None, None, None
