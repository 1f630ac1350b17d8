"""The device that this rank computes on."""

from __future__ import annotations

import torch


def current_device() -> torch.device:
    """The one that this rank computes on."""
    return torch.device(torch.cuda.current_device())


def lacks_bf16() -> bool:
    """Whether this rank computes on a CPU whose matrix products are not made for bf16.

    Such a CPU needs many times as long for them as in fp32.
    """
    if torch.cuda.is_available():
        return False
    return not (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())
