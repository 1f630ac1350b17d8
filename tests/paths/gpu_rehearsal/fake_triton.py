"""Triton without a compiler: a launch is checked and counted, and computes nothing.

It replaces the package triton, which comes with torch for CUDA, in this project's own modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

language = MagicMock()


def cdiv(count: int, divisor: int) -> int:
    return -(-count // divisor)


def next_power_of_2(number: int) -> int:
    return 1 << (number - 1).bit_length()


def count_launch(kernel: str) -> None:
    for mode in _get_current_dispatch_mode_stack():
        if hasattr(mode, "launched"):
            mode.launched(kernel)


class Kernel:
    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, num_warps: int = 4, **constants: Any) -> None:
            code = self.function.__code__
            names = code.co_varnames[: code.co_argcount]
            assert len(arguments) + len(constants) == len(names), self.function.__name__
            assert set(constants) == set(names[len(arguments) :]), self.function.__name__
            tensors = [tensor for tensor in arguments if isinstance(tensor, Tensor)]
            assert all(tensor.device.type == "cuda" for tensor in tensors), self.function.__name__
            assert all(tensor.is_contiguous() for tensor in tensors), self.function.__name__
            assert all(isinstance(size, int) and size > 0 for size in grid), grid
            assert num_warps in (1, 2, 4, 8, 16, 32)
            count_launch(self.function.__name__)

        return launch


def jit(function: Any = None, **options: Any) -> Any:
    return Kernel if function is None else Kernel(function)
