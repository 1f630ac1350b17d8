"""The device that this rank computes on."""

from __future__ import annotations

import torch

from nemo_aligner.parallel.cpu.processor import multiplies_bf16


def current_device() -> torch.device:
    """The one that this rank computes on."""
    return torch.device(torch.cuda.current_device())


def wait_for_device() -> None:
    """Until the GPU, where there is one, has done what it was asked to."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def lacks_bf16() -> bool:
    """Whether this rank computes on a CPU whose matrix products are not made for bf16.

    Such a CPU needs many times as long for them as in fp32.
    """
    return not torch.cuda.is_available() and not multiplies_bf16()
