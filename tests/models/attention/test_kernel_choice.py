"""Which attention a GPU gets, by its age, the dtype, the heads and what is installed."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention.bias import CausalBias

from nemo_aligner.models.attention import flash_packages, one_by_one, varlen
from nemo_aligner.models.attention.backends import (
    Backend,
    Case,
    Heads,
    choose_backend,
    copies_keys,
    slow_attention,
)
from nemo_aligner.models.attention.segments import PackedSegments, Scores
from nemo_aligner.models.shapes.decoder import ModelShape

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
    kv_index=None,
    cu_seqlens=None,
    kv_cu_seqlens=None,
    max_length=4,
    max_kv_length=4,
    share=None,
    gather=lambda key, value: (key, value),
    with_cached=lambda layer_number, key, value: (key, value),
)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An H100, on which nothing runs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    flash_packages._flash_attn.cache_clear()
    yield
    flash_packages._flash_attn.cache_clear()


def parameters(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    monkeypatch.setattr(varlen, "_varlen_parameters", lambda: frozenset(names))


def chosen(window: int | None, soft_cap: float | None) -> tuple[Backend, Case]:
    scores = Scores(0.5, window, soft_cap)
    case = Case("cuda", BF16, 2, 2, 8, scores, learns=False)
    return choose_backend(case), case


def attend(backend: Backend, case: Case) -> None:
    backend.compute(Heads(1, (QUERY, QUERY), QUERY), SEGMENTS, case, None)


def test_kernel_refuses_what_flash_attention_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert varlen.why_no_kernel(BF16, 128) is None
    assert varlen.why_no_kernel(torch.float16, 256) is None
    assert "multiple of 8" in str(varlen.why_no_kernel(BF16, 100))
    assert "up to 256" in str(varlen.why_no_kernel(BF16, 264))
    assert "float32" in str(varlen.why_no_kernel(torch.float32, 64))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert varlen.why_no_kernel(torch.float16, 64) == "the GPU is older than Ampere"


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
        parameters(monkeypatch, *names)
        backend, case = chosen(3 if with_window else None, None)
        called.clear()
        if backend.takes_packs:
            for name in (public, operator):
                monkeypatch.setattr(name, lambda *_, to=name, **more: called.append(to) or [QUERY])
            attend(backend, case)
        assert called == [wanted] * (wanted is not None), torch_version


def test_sinks_are_computed_by_torch_s_operator_or_by_explicit_scores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """flash-attn does not let its backward pass use another log-sum-exp."""
    shape = replace(PLAIN, attention_sinks=True, window_size=3)
    for names, expected in (
        (("window_size", "scale", "enable_gqa"), "torch's varlen operator"),
        (("is_causal",), "one by one"),
    ):
        parameters(monkeypatch, *names)
        case = Case("cuda", BF16, 2, 2, 8, Scores(0.5, 3, has_sinks=True), learns=True)
        assert choose_backend(case).name == expected
        reason = slow_attention(shape, BF16)
        assert (reason is None) == (expected != "one by one")
    assert "no kernel for sliding windows: install torch >= 2.11" in str(reason)
    assert not copies_keys(shape, torch.float32)


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
    backend, case = chosen(3, 30.0)
    assert backend.name == "flash-attn"
    attend(backend, case)
    assert seen == {"scale": 0.5, "causal": True, "window": (2, 0), "cap": 30.0}

    # Before 2.6 it has no cap.
    module.flash_attn_varlen_func = lambda *tensors, causal: None  # type: ignore[attr-defined]
    flash_packages._flash_attn.cache_clear()
    assert not chosen(None, 30.0)[0].takes_packs


def test_slow_attention_is_told_with_what_would_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert slow_attention(PLAIN, BF16) is None
    assert "soft-capping: install flash-attn" in str(slow_attention(CAPPED, BF16))
    parameters(monkeypatch)
    assert "sliding windows: install flash-attn" in str(slow_attention(WINDOWED, BF16))
    assert "float32 is not bf16" in str(slow_attention(PLAIN, torch.float32))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert slow_attention(CAPPED, BF16) is None


def kernel_of_sdpa(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, major: int
) -> str:
    """What torch chooses on a GPU, by its sdp_utils.cpp; cuDNN's kernel left out."""
    heads, channels, dtype = query.size(1), query.size(-1), query.dtype
    is_half = dtype in (BF16, torch.float16)
    if is_half and mask is None and major >= 8 and channels <= 256 and channels % 8 == 0:
        return "flash"
    aligned = {True: 8, False: 4}[is_half] if major >= 8 else {True: 8, False: 1}[is_half]
    taken = (torch.float32, torch.float16, *((BF16,) if major >= 8 else ()))
    if heads == key.size(1) and dtype in taken and channels % aligned == 0:
        return "efficient"
    return "math"


# A beginning that others have, and texts of their own.
LENGTHS, PREFIXES = [96, 40, 1, 130], [-1, 0, 0, -1]


def attend_as_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    major: int,
    dtype: torch.dtype,
    channels: int,
    groups: int,
    scores: Scores,
) -> tuple[set[str], int, list[torch.Tensor]]:
    """The kernels that SDPA chooses, the largest tensor that two layers keep, result and gradients.

    The tensors are a CPU's, which say that they are not. The math kernel is written out.
    """
    chosen, kept = set(), [0]
    fused = torch.nn.functional.scaled_dot_product_attention

    def choose(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any = None, **options: Any
    ) -> torch.Tensor:
        is_plain = mask is None or isinstance(mask, CausalBias)
        kernel = kernel_of_sdpa(q, k, None if is_plain else mask, major)
        # With a mask the memory-efficient kernel rounds otherwise than without one.
        assert is_plain or kernel == "math" or scores.window is not None
        chosen.add(kernel)
        if isinstance(mask, CausalBias):
            mask = mask._materialize()
        if chosen != {"math"}:
            return fused(q, k, v, mask, **options)
        dtype, per_group = q.dtype, q.size(1) // k.size(1)
        k, v = (each.float().repeat_interleave(per_group, dim=1) for each in (k, v))
        products = q.float() @ k.transpose(-1, -2) * (options["scale"] or q.size(-1) ** -0.5)
        assert mask is not None
        if mask.dtype is torch.bool:
            mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
        return ((products + mask).softmax(-1) @ v).to(dtype)

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[0] = max(kept[0], tensor.untyped_storage().nbytes() // tensor.element_size())
        return tensor

    torch.manual_seed(0)
    tokens = sum(LENGTHS)
    inputs = [
        torch.randn(tokens, heads, channels, dtype=dtype, requires_grad=True)
        for heads in (6, groups, groups)
    ]
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0)
    segments = PackedSegments(tuple(LENGTHS), tuple(PREFIXES), bounds, bounds, None)
    kind = "cuda" if major else "cpu", dtype, 6, groups, channels
    case = Case(*kind, scores, learns=True)
    with monkeypatch.context() as patched:
        if major:
            patched.setattr(torch.cuda, "get_device_capability", lambda *_: (major, 0))
            patched.setattr(torch.Tensor, "is_cpu", property(lambda _: False))
            patched.setattr(torch.nn.functional, "scaled_dot_product_attention", choose)
            patched.setattr(one_by_one, "_BLOCK_SCORES", 6 * 136 * 7)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            masks = one_by_one.plan_masks(segments, case)
            out = one_by_one.attend((*inputs, None), segments, case, masks)
        gradients = torch.autograd.grad(out.float().square().sum(), inputs)
    return chosen, kept[0], [out, *gradients]


def test_segments_on_a_gpu_get_a_fused_kernel_or_keep_no_scores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of each GPU, dtype and head size for which no kernel takes a whole pack."""
    plain, windowed = Scores(), Scores(window=50)
    wrong = []
    for name, major, dtype, channels, groups, scores, wanted in (
        ("fp32", 8, torch.float32, 16, 2, plain, "efficient"),
        ("fp32, a window", 8, torch.float32, 16, 2, windowed, "efficient"),
        ("fp32, no groups", 8, torch.float32, 16, 6, plain, "efficient"),
        ("V100, fp32", 7, torch.float32, 15, 2, windowed, "efficient"),
        ("T4, fp16", 7, torch.float16, 16, 2, plain, "efficient"),
        ("heads of 320", 8, BF16, 320, 2, plain, "efficient"),
        ("bf16, a window", 9, BF16, 64, 2, windowed, "efficient"),
        ("heads of 12", 8, BF16, 12, 2, plain, "math"),
        ("fp32, heads of 15", 8, torch.float32, 15, 2, windowed, "math"),
        ("V100, bf16", 7, BF16, 16, 6, plain, "math"),
    ):
        arguments = (dtype, channels, groups, scores)
        kernels, kept, found = attend_as_on_a_gpu(monkeypatch, major, *arguments)
        _, _, expected = attend_as_on_a_gpu(monkeypatch, 0, *arguments)
        tolerance = 1e-4 if dtype is torch.float32 else 5e-2
        same = all(
            torch.allclose(a, b, rtol=tolerance, atol=tolerance * float(b.detach().abs().max()))
            for a, b in zip(found, expected, strict=True)
        )
        most_scores = 6 * 136 * 96  # of a segment that has a beginning; less than all heads'
        if not kernels <= {wanted, "flash"} or wanted not in kernels or not same:
            wrong.append((name, kernels, same))
        if wanted == "math" and kept >= most_scores:
            wrong.append((name, kept))
    assert not wrong, wrong


def test_copies_of_keys_are_told_where_sdpa_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    grouped = replace(PLAIN, num_query_groups=2)
    assert copies_keys(grouped, torch.float32)
    assert not copies_keys(PLAIN, torch.float32)  # as many heads of keys as of queries
    assert not copies_keys(grouped, BF16)  # a kernel takes the whole pack
    assert not copies_keys(replace(grouped, attn_logit_softcapping=30.0), torch.float32)
    assert "no fused kernel" in str(slow_attention(replace(grouped, kv_channels=12), BF16))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not copies_keys(grouped, torch.float32)
