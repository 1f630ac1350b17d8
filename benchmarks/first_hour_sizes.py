"""How large the parts of gpu_first_hour.py are: for a GPU of 80 GiB, and in miniature for a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from scaling import synthetic_model

Point = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Points of the parts on random weights; the comparisons' model, pairs and options."""

    points: dict[str, list[Point]]
    hf: dict[str, Any]
    file_pairs: int
    training: tuple[str, ...]
    scoring: tuple[str, ...]
    invariance: tuple[str, ...]


def sizes_of(device: str, precision: str, model: dict[str, Any] | None = None) -> Sizes:
    """The sizes for ``device``; ``model`` is a model_config to take instead of a synthetic one."""
    return _for_gpu(precision, model) if device == "cuda" else _for_cpu(precision, model)


def _for_gpu(precision: str, given: dict[str, Any] | None) -> Sizes:
    model = given or synthetic_model(16, 2048)
    base = _point(precision, model, 1024, pairs=32, budget=8192, steps=5)
    lengths = [
        {**base, "sequence_length": length, "pairs": 2**15 // length, "micro_batch_tokens": budget}
        for length, budget in ((512, 8192), (1024, 8192), (2048, 8192), (4096, 8192), (8192, 16384))
        if length <= model.get("max_position_embeddings", length)
    ]
    widths = [
        {**base, "model": synthetic_model(layers, hidden)}
        for layers, hidden in ((24, 1024), (8, 4096), (3, 8192))
    ]
    return Sizes(
        points={
            "mfu": [*lengths, *widths],
            "memory": list(_memory_points(base)),
            "offload": [{**base, "steps": 8}],
            "save": [base],
            "overlap": [base],
        },
        hf={
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "initializer_range": 0.02,
            "dtype": "bfloat16",
        },
        file_pairs=256,
        training=(
            *("--steps=4", "--warm-up=2", "--global-batch=32", "--turns=2"),
            *("--trl-batch", "8", "--micro-batch-tokens=16384"),
        ),
        scoring=("--pairs=64", "--batch=16", "--turns=4"),
        invariance=("--pairs=16", "--turns=3"),
    )


def _for_cpu(precision: str, given: dict[str, Any] | None) -> Sizes:
    model = given or synthetic_model(2, 128, vocabulary=512)
    base = _point(precision, model, 64, pairs=4, budget=256, steps=1)
    memory = [{**base, "label": "nothing recomputed"}]
    memory.append({**base, "label": "recompute full", "recompute": "full"})
    return Sizes(
        points={
            "mfu": [base, {**base, "sequence_length": 32, "pairs": 8}],
            "memory": memory,
            "offload": [{**base, "steps": 2}],
            "save": [base],
            "overlap": [base],
        },
        hf={"hidden_size": 128, "intermediate_size": 256},  # vLLM takes heads of 32
        file_pairs=8,
        training=(
            *("--steps=1", "--warm-up=1", "--global-batch=4", "--turns=1", "--threads=1"),
            *("--trl-batch", "2"),
        ),
        scoring=("--pairs=2", "--batch=4", "--turns=1", "--threads=1"),
        invariance=("--pairs=2", "--turns=1", "--threads=1"),
    )


def _memory_points(base: Point) -> Iterator[Point]:
    layers = base["model"]["num_layers"]
    half = base["sequence_length"] // 2
    yield {**base, "label": "nothing recomputed"}
    yield {**base, "label": "twice the tokens of a pack", "micro_batch_tokens": 16384}
    yield {**base, "label": "half of a text in common", "prefix": half}
    for recompute in ("selective", "full"):
        yield {**base, "label": f"recompute {recompute}", "recompute": recompute}
    yield {**base, "label": "half of the layers frozen", "freeze_layers": layers // 2}
    yield {**base, "label": "moments in host memory", "cpu_offload": True}


def _point(
    precision: str, model: dict[str, Any], length: int, *, pairs: int, budget: int, steps: int
) -> Point:
    return {
        "model": model,
        "tp": 1,
        "pp": 1,
        "dp": 1,
        "sequence_parallel": False,
        "precision": precision,
        "recompute": "none",
        "recompute_layers": None,
        "freeze_layers": 0,
        "cpu_offload": False,
        "sequence_length": length,
        "prefix": 0,
        "pairs": pairs,
        "micro_batch_tokens": budget,
        "steps": steps,
    }
