"""The first hour's summaries: of a profiler's trace, of a step's variants, and of all rows."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest

from tests.harness import tiny


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a module of the benchmarks, which import each other by their bare names."""
    monkeypatch.syspath_prepend(str(tiny.ROOT / "benchmarks"))
    return importlib.import_module


def event(category: str, name: str, start: float, duration: float) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration}


TRACE = [
    event("kernel", "nvjet_tst_128x256_64x4_1x2_h_bz_NNT", 100, 400),
    event("kernel", "void pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>", 500, 100),
    # It starts before the previous one has ended; that time counts once.
    event("kernel", "void at::native::vectorized_elementwise_kernel<4, MulFunctor>", 550, 100),
    event("kernel", "triton_poi_fused__to_copy_add_mul_0", 700, 50),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 750, 50),
    event("kernel", "multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>", 900, 100),
    event("cuda_runtime", "cudaLaunchKernel", 0, 6),
    event("cuda_runtime", "cudaLaunchKernel", 10, 4),
    event("cuda_runtime", "cudaStreamSynchronize", 20, 30),
    event("cpu_op", "aten::mul", 0, 5),
]


def test_trace_of_a_gpu_is_split_into_classes_and_gaps(load: Any) -> None:
    trace = load("step_profile").StepTrace(TRACE, "cuda", layers=2, micro_batches=1)
    rows = {row["what"]: row for row in trace.rows(usual_ms=1.0)}
    milliseconds = {
        "the step, profiled": 0.9,
        "kernels": 0.75,
        "no kernel runs": 0.25,
        "host: launches": 0.01,
        "host: waits": 0.03,
        "matmul": 0.4,
        "attention": 0.1,
        "pointwise": 0.1,
        "fused pointwise": 0.05,
        "copies": 0.05,
        "optimizer": 0.1,
        "others": 0.0,
    }
    assert {name: rows[name]["ms"] for name in milliseconds} == pytest.approx(milliseconds)
    assert rows["kernels"]["kernels a layer"] == 3
    assert rows["host: launches"]["note"] == "2 calls of 5.0 us"
    longest = [row["note"] for row in list(rows.values())[-6:]]
    assert longest[0] == "matmul"


def test_trace_without_kernels_says_so(load: Any) -> None:
    (row,) = load("step_profile").StepTrace(TRACE[-4:], "cuda", 2, 1).rows(1.0)
    assert row["note"].startswith("it has no kernels")


@pytest.fixture
def variants(load: Any, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The comparison of variants, as on a GPU with all kernels."""
    module = load("step_variants")
    choices = importlib.import_module("nemo_aligner.config.kernels")
    packages = (choices.AttentionChoice.flash_attn_4,)
    monkeypatch.setattr(module, "available_kernels", lambda: tuple(choices.PointwiseChoice))
    monkeypatch.setattr(module, "available_packages", lambda: packages)
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "now", lambda: 0.0)
    return module


BASE = {"model": {"hidden_size": 64}, "sequence_length": 2048, "pairs": 4, "spread": True}


def test_variants_go_on_with_what_was_fastest(load: Any, variants: ModuleType) -> None:
    def run(point: dict[str, Any]) -> dict[str, Any]:
        if point["pointwise_kernels"] == "liger":
            return {"note": "it failed"}
        speeds = {"eager": 1.0, "triton": 2.0, "compile": 1.5}
        faster = point["cuda_graphs"] + (point["micro_batch_tokens"] == 8)
        faster += 0.5 * (point["attention_kernels"] == "flash_attn_4")
        return {"tokens/s": speeds[point["pointwise_kernels"]] + faster}

    rows = list(variants.Experiment(BASE, (4, 8, 2), [(1024, 2)], run, lambda: 60.0).rows())
    kernels = ("pointwise_kernels", "attention_kernels")
    names = ("texts", *kernels, "cuda_graphs", "micro_batch_tokens")
    spread = "up to 2,048 tokens"
    assert [tuple(row[name] for name in names) for row in rows] == [
        (spread, "eager", "torch", False, 4),
        (spread, "triton", "torch", False, 4),
        (spread, "triton", "flash_attn_4", False, 4),
        (spread, "triton", "flash_attn_4", True, 4),
        (spread, "triton", "flash_attn_4", True, 8),
        ("1,024 tokens", "triton", "flash_attn_4", True, 2048),
        (spread, "compile", "torch", False, 4),
        (spread, "liger", "torch", False, 4),
        (spread, "triton", "flash_attn_4", True, 2),
    ]
    assert rows[-2]["note"] == "it failed"
    best = load("step_settings").Variant("triton", "flash_attn_4", True, 8)
    assert load("step_settings").fastest(rows) == best


def test_variants_that_no_time_is_left_for_say_so(
    variants: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(variants, "now", lambda: float(next(clock)))
    run = lambda point: {"tokens/s": 1.0}  # noqa: E731
    rows = list(variants.Experiment(BASE, (4,), (), run, lambda: 0.5).rows())
    assert [row.get("note") for row in rows] == [None, *["no time was left"] * 5]


def scored(work: str, settings: str, speed: float, ratio: float) -> dict[str, Any]:
    row = {"work": work, "scorer": "nemo_aligner", "settings": settings, "rewards/s": speed}
    return {**row, "ours is faster by": ratio}


def test_goals_are_told_with_what_was_measured(load: Any) -> None:
    summary = load("first_hour_summary")
    step = {
        "texts": "up to 2,048 tokens",
        "pointwise_kernels": "eager",
        "attention_kernels": "torch",
        "cuda_graphs": False,
    }
    rows = {
        "width-2048": [
            {**step, "micro_batch_tokens": 8, "tokens/s": 90_000.0, "MFU": 0.4},
            {**step, "micro_batch_tokens": 16, "tokens/s": 120_000.0, "MFU": 0.52},
            {**step, "texts": "8,192 tokens", "tokens/s": 60_000.0, "MFU": 0.44},
            {**step, "note": "out of memory"},
        ],
        "training": [
            {"trainer": "nemo_aligner", "ours is faster by": ""},
            {"trainer": "TRL, batch 8", "ours is faster by": 11.0},
            {"trainer": "TRL, tuned, batch 16", "ours is faster by": None},
        ],
        "scoring": [
            scored("pairs", "defaults", 100.0, 3.5),
            scored("pairs", "model.batch_invariant=false", 120.0, 4.2),
            scored("pairs", "model.batch_invariant_rows=1024", 110.0, 3.8),
            scored("group", "defaults", 50.0, 2.0),
            scored("group", "model.batch_invariant=false", 53.0, 2.1),
            scored("group", "model.batch_invariant_rows=1024", 40.0, 1.6),
            {"work": "pairs", "scorer": "transformers", "settings": "batch 8", "rewards/s": 30.0},
        ],
        "memory": [{"beside the allocator": 1.2}, {"beside the allocator": None}],
    }
    verdicts = {row["goal"]: (row["measured"], row["reached"]) for row in summary.goals(rows)}
    assert verdicts == {
        "width 1,024: MFU": (None, "not measured"),
        "width 1,024: tokens/s": (None, "not measured"),
        "width 2,048: MFU": (0.52, "yes"),
        "width 2,048: tokens/s": (120_000.0, "yes"),
        "width 2,048, 8,192 tokens: MFU": (0.44, "no"),
        "width 4,096: MFU": (None, "not measured"),
        "width 4,096: tokens/s": (None, "not measured"),
        "training is faster than TRL, batch 8, by": (11.0, "yes"),
        "training is faster than TRL, tuned, by": (None, "not measured"),
        "pairs are scored faster than transformers, by": (3.8, "yes"),
        "pairs are scored faster than vLLM, by": (None, "not measured"),
        "batch invariance costs, of scoring": (pytest.approx(120 / 110 - 1), "yes"),
        "GiB of the process next to the allocator": (1.2, "no"),
    }
    training, scoring = summary.recommended_settings(rows)
    assert training["settings"] == (
        "model.pointwise_kernels=eager, model.attention_kernels=torch, model.cuda_graphs=False, "
        "model.micro_batch_tokens=16"
    )
    assert scoring["settings"] == "defaults"
