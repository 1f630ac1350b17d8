"""What this machine's processor has instructions for."""

from __future__ import annotations

import torch


def multiplies_bf16() -> bool:
    """Whether matrix products are made for bf16; torch has no public name for the question."""
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
