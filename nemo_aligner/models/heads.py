"""The reward head: hidden states of the scored tokens -> rewards, in fp32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_aligner.models.head_shape import HeadShape
from nemo_aligner.models.linear import invariant_linear, rows_now

_HEAD_INIT_STD = 0.02


class _Layer(torch.nn.Module):
    """A weight of fp32 and its bias, on this rank's device."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = torch.nn.Parameter(weight.to(device))
        self.bias = None if bias is None else torch.nn.Parameter(bias.to(device))

    def forward(self, hidden: Tensor, rows: int | None) -> Tensor:
        """``[S, in] -> [S, out]``; ``rows`` as linear layers have them now (``rows_now``).

        Whoever uses a weight calls its module: Megatron waits there for what is on its way.
        """
        if rows is None:
            return F.linear(hidden, self.weight, self.bias)
        return invariant_linear(hidden, self.weight, self.bias, rows)


class RewardHead(_Layer):
    """``[S, hidden] -> [S, outputs]`` in fp32, whole on all TP ranks.

    A linear map without bias, unless ``shape`` says more. Between two layers is a ReLU, which has
    the same bits on every processor. ``invariant_rows`` as linear layers have them.
    """

    invariant_rows: int | None = None

    def __init__(
        self, hidden_size: int, num_outputs: int, seed: int, shape: HeadShape | None = None
    ) -> None:
        sizes = (shape or HeadShape()).tensors(num_outputs, hidden_size)
        # Drawn on the CPU from its own generator: the same head on any device, at any layout.
        generator = torch.Generator().manual_seed(seed)
        drawn = {name: _draw(size, name, generator) for name, size in sizes.items()}
        super().__init__(drawn["weight"], drawn.get("bias"))
        self.learned: torch.nn.Parameter | None = None
        self.hidden = None
        if "hidden.weight" in drawn:
            self.hidden = _Layer(drawn["hidden.weight"], drawn.get("hidden.bias"))

    def learn_beside(self, start: Sequence[float]) -> None:
        """Have numbers that an objective learns stand behind the outputs of every text."""
        if start:
            numbers = torch.tensor(start, dtype=torch.float32, device=self.weight.device)
            self.learned = torch.nn.Parameter(numbers)
            self.learned.is_of_objective = True  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        outputs = self._outputs(hidden.float(), rows_now(self))
        if self.learned is None:
            return outputs
        return torch.cat([outputs, self.learned.expand(len(outputs), -1)], dim=1)

    def _outputs(self, hidden: Tensor, rows: int | None) -> Tensor:
        if self.hidden is not None:
            hidden = self.hidden(hidden, rows).relu()
        return super().forward(hidden, rows)


def _draw(size: tuple[int, ...], name: str, generator: torch.Generator) -> Tensor:
    tensor = torch.zeros(size, dtype=torch.float32)
    if len(size) == 1:
        return tensor
    # The layer between keeps the size of what it is given (He et al. 2015).
    std = (2 / size[1]) ** 0.5 if name == "hidden.weight" else _HEAD_INIT_STD
    return tensor.normal_(std=std, generator=generator)
