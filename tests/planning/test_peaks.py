from __future__ import annotations

import pytest

from nemo_aligner.config.common import Precision
from nemo_aligner.planning.peaks import peak_flops


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("NVIDIA H200", Precision.bf16, 989e12),
        ("NVIDIA H200", Precision.fp32, 67e12),
        ("NVIDIA H100 PCIe", Precision.fp16, 756e12),
        ("NVIDIA H100 80GB HBM3", Precision.bf16, 989e12),
        ("NVIDIA A100-SXM4-80GB", Precision.bf16, 312e12),
        ("NVIDIA B200", Precision.fp32, None),
        ("NVIDIA GeForce RTX 3060", Precision.bf16, None),
    ],
)
def test_the_peak_goes_by_the_name(name: str, precision: Precision, peak: float | None) -> None:
    assert peak_flops(name, precision) == peak
