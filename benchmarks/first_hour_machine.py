"""Two parts of gpu_first_hour.py: a description of the machine, and a model for comparisons.

first_hour_work.py calls these functions without a process group. Each takes its job (a dict of
options) and yields rows of the report. The comparisons are those with TRL and vLLM.
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
_OTHER_PACKAGES = ("flash_attn", "flash-attn-4", "triton", "liger_kernel", "trl", "vllm")
_COPY_BYTES = 2**30
_MATMULS_NOTE = "a large matmul, in bf16 on a GPU and in fp32 on a CPU"
_FP32_NOTE = "torch's own choice, before the package makes it highest"
_COPIES_NOTE = "of a GiB from host memory"
# Model and number of pairs of the comparisons without --model and --data, by device.
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
    # vLLM needs attention heads of at least 32 channels.
    "cpu": {"shape": {"hidden_size": 128, "intermediate_size": 256}, "pairs": 8},
}
_PROMPT_WORDS, _REPLY_WORDS = (10, 200), (10, 300)  # words


def machine(job: Job) -> Iterator[Row]:
    """Yield the findings of ``nemo-aligner doctor``, package versions, and measured rates."""
    for finding in examine():
        yield {"what": finding.name, "found": finding.value, "note": finding.advice or ""}
    yield from (
        {"what": name, "found": _read_version(name), "note": ""} for name in _OTHER_PACKAGES
    )
    rate = f"{matmul_rate() / 1e12:.3g} TFLOP/s"
    yield {"what": "matmuls", "found": rate, "note": _MATMULS_NOTE}
    precision = torch.get_float32_matmul_precision()
    yield {"what": "fp32 matmuls", "found": precision, "note": _FP32_NOTE}
    if torch.cuda.is_available():
        for name, pinned in (("pageable", False), ("pinned", True)):
            rate = f"{_measure_copy_rate(pinned) / 1e9:.3g} GB/s"
            yield {"what": f"copies, {name}", "found": rate, "note": _COPIES_NOTE}


def _read_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _measure_copy_rate(pinned: bool) -> float:
    """Measure a copy from host to device in bytes per second; the best of three.

    ``pinned`` copies from page-locked memory.
    """
    host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=pinned).zero_()
    device = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    best = float("inf")
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return _COPY_BYTES / best


def model(job: Job) -> Iterator[Row]:
    """Write the model and the pairs of the comparisons into the folder ``work``.

    ``hf`` and ``base.nemo`` have the same weights: those of the job's GGUF, ``.nemo`` or Hugging
    Face folder, or random ones. ``pairs.jsonl`` is the job's data, or pairs of random words whose
    lengths vary as those of chats.
    """
    work, size = Path(job["work"]), _MODELS[job["device"]]
    source = None if job["model"] is None else Path(job["model"])
    hf = _prepare_model_files(source, work, size["shape"])
    if job["data"] is not None:
        shutil.copy(job["data"], work / "pairs.jsonl")
    else:
        _write_pairs(work / "pairs.jsonl", size["pairs"])
    weights = sum(path.stat().st_size for path in hf.glob("*.safetensors"))
    yield {"what": "model", "found": str(source or "random weights")}
    yield {"what": "shape", "found": _describe_shape(hf)}
    yield {"what": "its weights", "found": f"{weights / 2**30:.3g} GiB"}
    yield {"what": "pairs", "found": str(job["data"] or f"{size['pairs']} of random words")}


def _prepare_model_files(source: Path | None, work: Path, shape: dict[str, Any]) -> Path:
    """Write the model as a Hugging Face folder ``work / "hf"`` and as ``work / "base.nemo"``.

    They replace those of an earlier run.

    Args:
        source: the model's checkpoint; None for random weights.
        work: the folder for both.
        shape: fields of the LlamaConfig of a model with random weights.

    Returns:
        The path of the Hugging Face folder.
    """
    hf, nemo, reward_model = (work / name for name in ("hf", "base.nemo", "reward.nemo"))
    for path in (hf, nemo, reward_model):
        _remove_earlier(path, source)
    if source is not None and source.suffix == ".nemo":
        nemo.symlink_to(source.resolve())
        write_reward_model(nemo, reward_model)
        return export(reward_model, hf)
    if source is None:
        source = write_tiny(hf, **shape)
    converted, _ = prepare_model(source, work)
    if converted != hf:
        hf.symlink_to(converted.resolve())
    return hf


def _remove_earlier(path: Path, source: Path | None) -> None:
    """Remove a model of an earlier run, which would be measured instead of this one.

    Raises:
        SystemExit: ``source``, this run's model, would be removed with it.
    """
    if source is not None and source.absolute().is_relative_to(path.absolute()):
        raise SystemExit(
            f"--model: {source} is in the folder of --work, and this part replaces it; choose "
            "another --work"
        )
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _write_pairs(path: Path, count: int) -> None:
    """Write ``count`` pairs of random words; both replies of a pair have the same prompt.

    The logarithm of each length is uniform, so that lengths vary as those of chats.
    """
    rng = random.Random(0)
    words = WORDS.split()

    def draw_text(shortest: int, longest: int) -> str:
        length = round(shortest * (longest / shortest) ** rng.random())
        return " ".join(rng.choices(words, k=length))

    with path.open("w") as lines:
        for index in range(count):
            pair = {
                "prompt": f"{draw_text(*_PROMPT_WORDS)} {index}",
                "chosen": draw_text(*_REPLY_WORDS),
                "rejected": draw_text(*_REPLY_WORDS),
            }
            lines.write(json.dumps(pair) + "\n")


def _describe_shape(hf: Path) -> str:
    config = json.loads((hf / "config.json").read_text())
    keys = ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")
    return ", ".join(f"{key} {config.get(key)}" for key in keys)
