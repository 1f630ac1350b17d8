"""The reward head: hidden states of the scored tokens -> rewards, in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_aligner.models.linear import invariant_linear, rows_now

_HEAD_INIT_STD = 0.02


class RewardHead(torch.nn.Module):
    """Linear map ``[S, hidden] -> [S, A]`` in fp32, without bias, whole on all TP ranks.

    ``invariant_rows`` as linear layers have them.
    """

    invariant_rows: int | None = None

    def __init__(self, hidden_size: int, num_attributes: int, seed: int) -> None:
        super().__init__()
        # Drawn on the CPU from its own generator: the same head on any device, at any layout.
        generator = torch.Generator().manual_seed(seed)
        weight = torch.empty(num_attributes, hidden_size, dtype=torch.float32)
        weight.normal_(std=_HEAD_INIT_STD, generator=generator)
        self.weight = torch.nn.Parameter(weight.to(torch.cuda.current_device()))

    def forward(self, hidden: Tensor) -> Tensor:
        rows = rows_now(self)
        if rows is None:
            return F.linear(hidden.float(), self.weight)
        return invariant_linear(hidden.float(), self.weight, None, rows)
