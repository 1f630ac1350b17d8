"""Weights that only score, and stand on the device only while they do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightsAside:
    """Parameters and buffers of a model, in CPU memory but for the time of a block.

    They are copied to the CPU once: weights that nobody trains need no way back.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        """``model`` stands on the CPU from here on; in a block, on ``device``."""
        self._device = device
        self._tensors: list[Tensor] = [*model.parameters(), *model.buffers()]
        self._kept = [_on_cpu(tensor.detach()) for tensor in self._tensors]
        self._put(self._kept)

    @contextmanager
    def back(self) -> Iterator[None]:
        """The weights on the device."""
        self._put([kept.to(self._device, non_blocking=True) for kept in self._kept])
        try:
            yield
        finally:
            self._put(self._kept)
            if self._device.type == "cuda":
                torch.cuda.empty_cache()  # so that the memory is there for others

    def _put(self, values: list[Tensor]) -> None:
        for tensor, value in zip(self._tensors, values, strict=True):
            tensor.data = value


def _on_cpu(tensor: Tensor) -> Tensor:
    """A copy that a GPU reads at the full speed of the bus, where there is one."""
    copy = tensor.to("cpu")
    return copy.pin_memory() if torch.cuda.is_available() else copy
