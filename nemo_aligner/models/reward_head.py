"""The reward head, which is fp32 for a backbone of any dtype.

bf16 would be too coarse: rewards of good and bad replies differ by less than bf16 resolves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_aligner.batch.outputs import HeadOutputs
from nemo_aligner.models.layers import invariant_linear, rows_now
from nemo_aligner.models.shapes.head import HeadShape

_HEAD_INIT_STD = 0.02


class HeadLayer(torch.nn.Module):
    """A linear layer with an fp32 weight on this rank's device."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(weight.to(device))
        self.bias = None if bias is None else torch.nn.Parameter(bias.to(device))

    def forward(self, hidden: Tensor, rows: int | None) -> Tensor:
        """Compute ``[S, in] -> [S, out]``, in matmuls of ``rows`` rows if not None.

        Call the module rather than read its weight: under ``overlap_param_gather`` Megatron waits
        in a forward pre-hook for weights that are still being gathered.

        Args:
            rows: fixed number of rows of a matmul, from ``rows_now``; None means no fixed number.
        """
        if rows is None:
            return F.linear(hidden, self.weight, self.bias)
        return invariant_linear(hidden, self.weight, self.bias, rows)


class RewardHead(HeadLayer):
    """The reward head, ``[S, hidden] -> [S, outputs]`` in fp32, replicated on all TP ranks.

    By default it is one matrix without bias. ``shape`` can add biases, and a hidden layer with a
    ReLU, an activation that is bit-identical on every processor.

    Attributes:
        learned: trained scalars of the training objective, see ``add_learned_scalars``; None if
            the objective has none.
        invariant_rows: fixed number of rows of a matmul in evaluation mode; None means no fixed
            number.
    """

    invariant_rows: int | None = None

    def __init__(
        self, hidden_size: int, num_outputs: int, seed: int, shape: HeadShape | None = None
    ) -> None:
        sizes = (shape or HeadShape()).tensors(num_outputs, hidden_size)
        # Draw on the CPU from a separate generator, so that every device and layout gets the same
        # head.
        generator = torch.Generator().manual_seed(seed)
        drawn = {name: _draw(size, name, generator) for name, size in sizes.items()}
        super().__init__(drawn["weight"], drawn.get("bias"))
        self.learned: torch.nn.Parameter | None = None
        self.hidden = None
        if "hidden.weight" in drawn:
            self.hidden = HeadLayer(drawn["hidden.weight"], drawn.get("hidden.bias"))

    def add_learned_scalars(self, start: Sequence[float]) -> None:
        """Add trained scalars of the training objective; they are appended to every output row.

        Args:
            start: initial values of the scalars; empty if the objective has none.
        """
        if start:
            numbers = torch.tensor(start, dtype=torch.float32, device=self.weight.device)
            self.learned = torch.nn.Parameter(numbers)
            self.learned.is_of_objective = True  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        hidden, rows = hidden.float(), rows_now(self)
        if self.hidden is not None:
            hidden = self.hidden(hidden, rows).relu()
        outputs = super().forward(hidden, rows)
        if self.learned is not None:
            outputs = HeadOutputs(outputs, self.learned.expand(len(outputs), -1)).joined()
        return outputs


def _draw(size: tuple[int, ...], name: str, generator: torch.Generator) -> Tensor:
    tensor = torch.zeros(size, dtype=torch.float32)
    if len(size) == 1:
        return tensor
    # This std keeps the variance of the layer's input through the ReLU (He et al. 2015).
    std = (2 / size[1]) ** 0.5 if name == "hidden.weight" else _HEAD_INIT_STD
    return tensor.normal_(std=std, generator=generator)
