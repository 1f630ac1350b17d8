"""FlashAttention 3 and flash-attn-4: where they are rejected, and what their trial finds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_aligner.config.kernels import AttentionChoice, KernelChoices
from nemo_aligner.models.attention import flash_packages
from nemo_aligner.models.attention.backends import Case, gpu_cases
from nemo_aligner.models.attention.choice import (
    check_attention_choice,
    try_attention_choice,
    try_kernels,
)
from nemo_aligner.models.attention.segments import Scores
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.utils.errors import ConfigError
from tests.models.attention import varlen_stand_in
from tests.models.attention.test_kernel_choice import CAPPED, PLAIN, WINDOWED

CPU, CUDA, BF16 = torch.device("cpu"), torch.device("cuda"), torch.bfloat16
FLASH_3, FLASH_4 = AttentionChoice.flash_attn_3, AttentionChoice.flash_attn_4
WITH_SINKS = replace(WINDOWED, attention_sinks=True, window_pattern="alternate")


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU of compute capability 9.0 on which stand-ins compute on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    varlen_stand_in.use_stand_ins(monkeypatch)
    flash_packages.why_unavailable.cache_clear()
    yield
    flash_packages.why_unavailable.cache_clear()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_packages, "version", lambda distribution: "1")


def case_of(choice: AttentionChoice, scores: Scores, learns: bool = True) -> Case:
    return Case("cuda", BF16, 4, 2, 16, scores, learns, library=choice)


SCORES = [Scores(None), Scores(0.3, 24), Scores(None, None, 20.0)]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("choice", [FLASH_3, FLASH_4])
def test_trial_accepts_kernels_that_compute_what_torch_does(choice: AttentionChoice) -> None:
    for scores in SCORES:
        try_kernels(case_of(choice, scores), CPU, batch_invariant=True)
    if choice is FLASH_4:
        sinks = Scores(None, 24, has_sinks=True)
        try_kernels(case_of(choice, sinks), CPU, batch_invariant=True)


Attend = Callable[..., Any]


def ignore_prefixes(attend: Attend) -> Attend:
    def wrong(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Any:
        bounds = named["cu_seqlens_q"]
        named |= {"cu_seqlens_k": bounds, "max_seqlen_k": named["max_seqlen_q"]}
        return attend(q, k[: int(bounds[-1])], v[: int(bounds[-1])], **named)

    return wrong


def ignore_windows(attend: Attend) -> Attend:
    def wrong(*tensors: Tensor, window_size: Any, **named: Any) -> Any:
        return attend(*tensors, window_size=(-1, -1), **named)

    return wrong


def lose_a_gradient(attend: Attend) -> Attend:
    def wrong(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Any:
        return attend(q, k + (k - k.detach()), v, **named)

    return wrong


def depend_on(pack_is_special: Callable[[dict[str, Any]], bool]) -> Callable[[Attend], Attend]:
    """Make kernels that round differently in some packs."""

    def distort(attend: Attend) -> Attend:
        def wrong(q: Tensor, k: Tensor, v: Tensor, **named: Any) -> Any:
            return attend(q, k, v * (1 + 2**-7 * pack_is_special(named)), **named)

        return wrong

    return distort


def has_a_long_sample(named: dict[str, Any]) -> bool:
    return bool(named["max_seqlen_q"] > 100)


def has_no_long_sample(named: dict[str, Any]) -> bool:
    return bool(named["max_seqlen_q"] <= 64)


def has_many_samples(named: dict[str, Any]) -> bool:
    return len(named["cu_seqlens_q"]) > 133


DEPENDS = "the output of a sample depends on other samples"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("distort", "message"),
    [
        (ignore_prefixes, r"its output deviates from torch's by 1\.\d+ of"),
        (ignore_windows, r"its output deviates from torch's by 0\.\d+ of"),
        (lose_a_gradient, r"its gradient of keys deviates from torch's by 1 of"),
        (depend_on(has_a_long_sample), DEPENDS),
        (depend_on(has_no_long_sample), DEPENDS),
        (depend_on(has_many_samples), DEPENDS),
    ],
)
def test_trial_finds_kernels_that_compute_something_else(
    distort: Callable[[Attend], Attend], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does so for the window of a real model, which is longer than the trial's samples."""
    wrong = distort(varlen_stand_in.flash_attn_3_varlen_func)
    monkeypatch.setattr(flash_packages, "load_function", lambda choice: wrong)
    case = case_of(FLASH_3, Scores(None, 4096))
    with pytest.raises(RuntimeError, match=message):
        try_kernels(case, CPU, batch_invariant=True)
    # What scores needs no gradients, and who allows it gets scores that depend on the pack.
    if message == DEPENDS:
        try_kernels(case, CPU, batch_invariant=False)
    if distort is lose_a_gradient:
        try_kernels(replace(case, learns=False), CPU, batch_invariant=True)


@pytest.mark.parametrize(
    ("choice", "device", "dtype", "shape", "capability", "reason"),
    [
        (FLASH_4, CPU, BF16, PLAIN, 9, "are for GPUs, and this process uses a CPU. Choose torch"),
        (FLASH_3, CUDA, BF16, PLAIN, 10, "needs compute capability 9.x, and this GPU has 10.0"),
        (FLASH_4, CUDA, BF16, PLAIN, 8, "needs compute capability 9.x or 10.x or .* has 8.0"),
        (FLASH_3, CUDA, BF16, PLAIN, 9, r"not installed \(build it from the folder hopper"),
        (FLASH_4, CUDA, BF16, PLAIN, 9, r"not installed \(pip install 'megatron-reward\[flash"),
        (FLASH_4, CUDA, torch.float32, PLAIN, 90, "float32 is not bf16 or fp16"),
        (FLASH_3, CUDA, BF16, WITH_SINKS, 90, "does not support attention sinks"),
    ],
)
def test_kernels_that_cannot_be_used_are_rejected_with_the_reason(
    choice: AttentionChoice,
    device: torch.device,
    dtype: torch.dtype,
    shape: ModelShape,
    capability: int,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """90 is Hopper with the package installed."""
    if capability == 90:
        capability = 9
        monkeypatch.setattr(flash_packages, "version", lambda distribution: "1")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (capability, 0))
    with pytest.raises(
        ConfigError, match=rf"model.attention_kernels: .* cannot be used: .*{reason}"
    ):
        check_attention_choice(choice, shape, dtype, device)
    check_attention_choice(AttentionChoice.torch, shape, dtype, device)


@pytest.mark.usefixtures("installed")
def test_layers_that_the_kernels_do_not_support_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A failed trial is named, too, before a model is built."""
    choices = KernelChoices(attention=FLASH_4)
    wide = replace(case_of(FLASH_4, Scores(None)), channels=320)
    module = "nemo_aligner.models.attention.choice"
    monkeypatch.setattr(f"{module}.gpu_cases", lambda *given: [*gpu_cases(*given), wide])
    monkeypatch.setattr(f"{module}.current_device", lambda: CPU)
    monkeypatch.setattr(f"{module}.check_attention_choice", lambda *unused: None)
    tried: list[Case] = []
    monkeypatch.setattr(f"{module}.try_kernels", lambda case, *unused: tried.append(case))
    with caplog.at_level(logging.WARNING):
        try_attention_choice(choices, CAPPED, BF16, learns=True)
    assert [(case.channels, case.learns) for case in tried] == [(16, True)]
    assert "does not support some layers, which keep torch's kernels: heads have 320" in caplog.text

    def fail(*unused: Any) -> None:
        raise RuntimeError("its output deviates")

    monkeypatch.setattr(f"{module}.try_kernels", fail)
    with pytest.raises(ConfigError, match="cannot be used: its trial failed: its output deviates"):
        try_attention_choice(choices, CAPPED, BF16, learns=False)
