"""The most that a GPU can compute, by its name: what a step's speed is a share of."""

from __future__ import annotations

from nemo_aligner.config.common import Precision

# TFLOP/s of dense matrix products in 16 bits, and in fp32 without TF32: NVIDIA's data sheets, which
# give twice as many "with sparsity". None: not for training in it. Of two names that fit, the first
# counts.
_PEAKS: tuple[tuple[str, float, float | None], ...] = (
    ("GB200", 2500.0, None),  # 360 PFLOP/s of an NVL72 "with sparsity": 5 of each GPU
    ("B200", 2250.0, None),
    ("H200 NVL", 835.0, 60.0),
    ("H200", 989.0, 67.0),
    ("H100 NVL", 835.0, 60.0),
    ("H100 PCIe", 756.0, 51.0),
    ("H100", 989.0, 67.0),
    ("A100", 312.0, 19.5),
    ("L40S", 362.0, 91.6),
)


def peak_flops(device_name: str, precision: Precision) -> float | None:
    """FLOP/s of one GPU, named as torch does; None where it is not known."""
    for name, half, single in _PEAKS:
        if name in device_name:
            peak = single if precision is Precision.fp32 else half
            return None if peak is None else peak * 1e12
    return None
