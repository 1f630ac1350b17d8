"""What this machine's processor has instructions for."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch

_CPUINFO = Path("/proc/cpuinfo")


def multiplies_bf16() -> bool:
    """Whether matrix products are made for bf16; torch has no public name for the question."""
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


@cache
def is_slow_with_mkl() -> bool:
    """Whether it has AVX-512, and MKL does not use it for fp32: it does so on Intel's alone."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return False
    try:
        return "GenuineIntel" not in _CPUINFO.read_text()
    except OSError:
        return False
