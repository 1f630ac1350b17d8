"""Worker of gpu_first_hour.py: what the machine is and has, and its rates; the rows go to OUTPUT.

python benchmarks/first_hour_machine.py OUTPUT
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from common import matmul_rate

from nemo_aligner.tools.doctor import examine

_OTHERS = ("flash_attn", "triton", "trl", "vllm")
_COPIED = 2**30


def main() -> None:
    rows = [
        {"what": finding.name, "found": finding.value, "note": finding.advice or ""}
        for finding in examine()
    ]
    rows += [{"what": name, "found": _version(name), "note": ""} for name in _OTHERS]
    rows += [
        {"what": "products", "found": f"{matmul_rate() / 1e12:.3g} TFLOP/s", "note": _PRODUCTS},
        {"what": "fp32 products", "found": torch.get_float32_matmul_precision(), "note": _FP32},
    ]
    if torch.cuda.is_available():
        for name, pinned in (("pageable", False), ("pinned", True)):
            rate = f"{_copy_rate(pinned) / 1e9:.3g} GB/s"
            rows.append({"what": f"copies, {name}", "found": rate, "note": _COPIES})
    Path(sys.argv[1]).write_text(json.dumps(rows))


_PRODUCTS = "a large product, in bf16 on a GPU and in fp32 on a CPU"
_FP32 = "torch's own choice, before the package makes it highest"
_COPIES = "of a GiB from host memory"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _copy_rate(pinned: bool) -> float:
    """Bytes a second, the best of three."""
    host = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=pinned).zero_()
    device = torch.empty(_COPIED, dtype=torch.uint8, device="cuda")
    best = float("inf")
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return _COPIED / best


if __name__ == "__main__":
    main()
