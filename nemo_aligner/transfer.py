"""From host memory to a device, without waiting for what the device still has to do."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(host: Tensor, device: torch.device | str) -> Tensor:
    """``host`` on ``device``; itself where it is there already.

    A copy to a GPU is put behind the work that the GPU has, by way of page-locked memory: from any
    other the calling thread would wait until the GPU comes to it.
    """
    if torch.device(device).type != "cuda" or not host.is_cpu:
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
