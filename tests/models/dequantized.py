"""Quantized weights dequantized by Triton, against torch's operations on a CPU.

A script: ``dequantized.py DEVICE`` prints as JSON the cases with other bits. On a CPU it needs
Triton's interpreter.
"""

from __future__ import annotations

import json
import sys
from unittest import mock

import torch

from nemo_aligner.config.model import BasePrecision
from nemo_aligner.models import quantized

# The interpreter truncates to bf16, where a GPU rounds.
DTYPES = {
    "cpu": (torch.float32, torch.float16),
    "cuda": (torch.float32, torch.float16, torch.bfloat16),
}


def differing_cases(device: str) -> list[str]:
    """Also of weights that were packed again from dequantized ones."""
    generator, cases = torch.Generator().manual_seed(0), []
    for dtype in DTYPES[device]:
        weight = (0.02 * torch.randn(37, 1216, generator=generator)).to(dtype)
        weight[0, :64] = 0
        for precision in BasePrecision:
            for splits_inputs in (False, True):
                options = {"splits_inputs": splits_inputs}
                expected = quantized.quantize(weight, precision, **options).dequantize()
                stored = quantized.quantize(weight.to(device), precision, **options)
                with mock.patch.object(quantized, "uses_triton", return_value=True):
                    values = stored.dequantize()
                    packed = quantized.pack(values, precision, **options)
                    again = None if packed is None else packed.dequantize()
                if not torch.equal(values.cpu(), expected):
                    cases.append(f"{precision.value}, {dtype}")
                if again is None or not torch.equal(again, values):
                    cases.append(f"{precision.value}, {dtype}, packed")
        # Scales in fp32, as bitsandbytes has them.
        codes, scales = quantized.Nf4Weight.pack(weight).tensors()
        scales = scales.float() * 1.001
        expected = quantized.Nf4Weight(codes, scales, dtype).dequantize()
        on_device = quantized.Nf4Weight(codes.to(device), scales.to(device), dtype)
        values = on_device.dequantize_by_triton()
        if not torch.equal(values.cpu(), expected):
            cases.append(f"scales in fp32, {dtype}")
    return cases


if __name__ == "__main__":
    print(json.dumps(differing_cases(sys.argv[1])))
