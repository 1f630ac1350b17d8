"""Which attention a GPU gets, by its age, the dtype, the heads and what is installed."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_aligner.models.attention import varlen
from nemo_aligner.models.attention.packed import slow_attention
from nemo_aligner.models.attention.segments import Scores
from nemo_aligner.models.attention.varlen import varlen_kernel, why_no_kernel
from nemo_aligner.models.shape import ModelShape

BF16 = torch.bfloat16
PLAIN = ModelShape.from_config(
    {
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 64,
        "max_position_embeddings": 64,
    }
)
WINDOWED = replace(PLAIN, window_size=16)
CAPPED = replace(PLAIN, attn_logit_softcapping=50.0)
QUERY = torch.ones(4, 2, 8)
SEGMENTS: Any = SimpleNamespace(
    kv_index=None, cu_seqlens=None, kv_cu_seqlens=None, max_length=4, max_kv_length=4
)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An H100, on which nothing runs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    varlen_kernel.cache_clear()
    yield
    varlen_kernel.cache_clear()


def parameters(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(varlen, "_varlen_parameters", lambda: frozenset(names))


def test_kernel_refuses_what_flash_attention_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_no_kernel(BF16, 128) is None
    assert why_no_kernel(torch.float16, 256) is None
    assert "multiple of 8" in str(why_no_kernel(BF16, 100))
    assert "up to 256" in str(why_no_kernel(BF16, 264))
    assert "float32" in str(why_no_kernel(torch.float32, 64))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert why_no_kernel(torch.float16, 64) == "the GPU is older than Ampere"


def test_kernel_of_every_torch_for_full_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without groups torch's function would copy the keys: then its operator is called."""
    public = "torch.nn.attention.varlen.varlen_attn"
    operator = "nemo_aligner.models.attention.varlen.gpu_flash_attention"
    called: list[str] = []
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    for torch_version, names, with_window, wanted in (
        ("2.12", ("window_size", "scale", "enable_gqa"), True, public),
        ("2.11", ("window_size", "scale"), True, operator),
        ("2.10", ("is_causal",), False, operator),
        ("2.10", ("is_causal",), True, None),
        ("2.8, without the module", (), False, operator),
        ("2.8, without the module", (), True, None),
    ):
        varlen_kernel.cache_clear()
        parameters(monkeypatch, *names)
        kernel = varlen_kernel(with_window, False)
        called.clear()
        if kernel is not None:
            for name in (public, operator):
                monkeypatch.setattr(name, lambda *_, to=name, **more: called.append(to) or [QUERY])
            kernel(QUERY, QUERY, QUERY, SEGMENTS, Scores(0.5, 3 if with_window else None))
        assert called == [wanted] * (wanted is not None), torch_version


def test_flash_attn_takes_what_torch_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def flash_attn_varlen_func(
        *tensors: Any, softmax_scale: Any, causal: bool, window_size: Any, softcap: float
    ) -> Any:
        seen.update(scale=softmax_scale, causal=causal, window=window_size, cap=softcap)
        return tensors[0]

    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    parameters(monkeypatch)
    attend = varlen_kernel(True, True)
    assert attend is not None
    attend(QUERY, QUERY, QUERY, SEGMENTS, Scores(0.5, 3, 30.0))
    assert seen == {"scale": 0.5, "causal": True, "window": (2, 0), "cap": 30.0}

    # Before 2.6 it has no cap.
    module.flash_attn_varlen_func = lambda *tensors, causal: None  # type: ignore[attr-defined]
    varlen_kernel.cache_clear()
    assert varlen_kernel(False, True) is None


def test_slow_attention_is_told_with_what_would_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert slow_attention(PLAIN, BF16) is None
    assert "soft-capping: install flash-attn" in str(slow_attention(CAPPED, BF16))
    parameters(monkeypatch)
    varlen_kernel.cache_clear()
    assert "sliding windows: install flash-attn" in str(slow_attention(WINDOWED, BF16))
    assert "float32 is not bf16" in str(slow_attention(PLAIN, torch.float32))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert slow_attention(CAPPED, BF16) is None
