"""Parts of the first hour that need no learner: the machine, and the model of the comparisons.

See gpu_first_hour.py. A part gets its job, and yields rows.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from common import matmul_rate, prepare_model
from serving_model import WORDS, export, write_reward_model, write_tiny

from nemo_aligner.tools.doctor import examine

Job = Mapping[str, Any]
Row = dict[str, Any]
_OTHERS = ("flash_attn", "triton", "liger_kernel", "trl", "vllm")
_COPIED = 2**30
_PRODUCTS = "a large product, in bf16 on a GPU and in fp32 on a CPU"
_FP32 = "torch's own choice, before the package makes it highest"
_COPIES = "of a GiB from host memory"
# What the comparisons take where no model is given: for a GPU of 80 GiB, and in miniature.
_MODELS: dict[str, dict[str, Any]] = {
    "cuda": {
        "shape": {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "initializer_range": 0.02,
            "dtype": "bfloat16",
        },
        "pairs": 256,
    },
    # vLLM takes heads of 32.
    "cpu": {"shape": {"hidden_size": 128, "intermediate_size": 256}, "pairs": 8},
}
_PROMPT, _REPLY = (10, 200), (10, 300)  # words


def machine(job: Job) -> Iterator[Row]:
    """What the machine is and has, and its rates."""
    for finding in examine():
        yield {"what": finding.name, "found": finding.value, "note": finding.advice or ""}
    yield from ({"what": name, "found": _version(name), "note": ""} for name in _OTHERS)
    rate = f"{matmul_rate() / 1e12:.3g} TFLOP/s"
    yield {"what": "products", "found": rate, "note": _PRODUCTS}
    precision = torch.get_float32_matmul_precision()
    yield {"what": "fp32 products", "found": precision, "note": _FP32}
    if torch.cuda.is_available():
        for name, pinned in (("pageable", False), ("pinned", True)):
            rate = f"{_copy_rate(pinned) / 1e9:.3g} GB/s"
            yield {"what": f"copies, {name}", "found": rate, "note": _COPIES}


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


def model(job: Job) -> Iterator[Row]:
    """The model and the pairs that the comparisons take, in ``work``.

    ``hf`` and ``base.nemo`` are the same weights: of the GGUF, ``.nemo`` or Hugging Face folder of
    the job, or random. ``pairs.jsonl`` is the job's data, or pairs of random words whose lengths
    are spread as those of chats.
    """
    work, size = Path(job["work"]), _MODELS[job["device"]]
    source = None if job["model"] is None else Path(job["model"])
    hf = _prepare(source, work, size["shape"])
    if job["data"] is not None:
        shutil.copy(job["data"], work / "pairs.jsonl")
    else:
        _write_pairs(work / "pairs.jsonl", size["pairs"])
    weights = sum(path.stat().st_size for path in hf.glob("*.safetensors"))
    yield {"what": "model", "found": str(source or "random weights")}
    yield {"what": "shape", "found": _shape_of(hf)}
    yield {"what": "its weights", "found": f"{weights / 2**30:.3g} GiB"}
    yield {"what": "pairs", "found": str(job["data"] or f"{size['pairs']} of random words")}


def _prepare(source: Path | None, work: Path, shape: dict[str, Any]) -> Path:
    """``work / "hf"`` and ``work / "base.nemo"``; the former is returned."""
    hf, nemo = work / "hf", work / "base.nemo"
    if source is not None and source.suffix == ".nemo":
        nemo.symlink_to(source.resolve())
        write_reward_model(nemo, work / "reward.nemo")
        return export(work / "reward.nemo", hf)
    if source is None:
        source = write_tiny(hf, **shape)
    found, _ = prepare_model(source, work)
    if found != hf:
        hf.symlink_to(found.resolve())
    return hf


def _write_pairs(path: Path, count: int) -> None:
    """Pairs that share their prompt; a reply is as likely short as long."""
    rng = random.Random(0)
    words = WORDS.split()

    def text(least: int, most: int) -> str:
        length = round(least * (most / least) ** rng.random())
        return " ".join(rng.choices(words, k=length))

    with path.open("w") as lines:
        for index in range(count):
            pair = {
                "prompt": f"{text(*_PROMPT)} {index}",
                "chosen": text(*_REPLY),
                "rejected": text(*_REPLY),
            }
            lines.write(json.dumps(pair) + "\n")


def _shape_of(hf: Path) -> str:
    config = json.loads((hf / "config.json").read_text())
    keys = ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")
    return ", ".join(f"{key} {config.get(key)}" for key in keys)
