"""Gated DeltaNets trained by flash-linear-attention: against torch, and where it cannot be used."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from nemo_aligner.checkpoint.hf.families import find_family
from nemo_aligner.config.kernels import DeltaChoice
from nemo_aligner.config.model import Recompute
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models import delta_choice
from nemo_aligner.models.delta_choice import check_delta_choice, try_kernel, use_delta_kernel
from nemo_aligner.models.flash_delta import FlashDelta
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.linear_attention import LinearAttentionShape
from nemo_aligner.utils.errors import ConfigError
from tests.harness import families, tiny
from tests.harness.environments import kept_environment, make_environment
from tests.models import layouts
from tests.models.flash_deltas import layer_deviations, recurrence

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
FLA = DeltaChoice.flash_linear_attention
# Triton's interpreter needs an older numpy than 2.4.
PACKAGES = ("triton==3.6.0", "numpy<2.4", "fla-core==0.6.0")
SMALL = LinearAttentionShape(2, 4, 8, 12, 4)


def shape_of(case: str) -> ModelShape:
    family = find_family(families.CASES[case]["model_type"])
    return ModelShape.from_config(family.to_nemo(families.hf_config(case).to_dict()))


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """Let the recurrence stand for fla's function, which needs a GPU; the mock counts its calls."""
    function = mock.Mock(wraps=recurrence)
    monkeypatch.setattr(delta_choice, "check_delta_choice", lambda *unused: None)
    monkeypatch.setattr(delta_choice, "load_kernel", lambda: FlashDelta(function))
    return function


def test_layer_calls_the_function_once_a_level_and_trains_as_torch(layout: ParallelLayout) -> None:
    function = mock.Mock(wraps=recurrence)
    assert max(layer_deviations(FlashDelta(function)).values()) < 5e-6
    # The shared chunk and the third sample; what follows in two samples. The backward pass
    # recomputes both.
    bounds = [call.kwargs["cu_seqlens"].tolist() for call in function.call_args_list]
    assert bounds == 2 * [[0, 64, 128], [0, 64, 128]]


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_layer_by_fla_in_triton_s_interpreter_trains_as_torch() -> None:
    folder = kept_environment("fla", PACKAGES, lambda folder: make_environment(folder, *PACKAGES))
    done = subprocess.run(
        [str(folder / "bin" / "python"), "tests/models/flash_deltas.py"],
        env=tiny.environment(TRITON_INTERPRET="1", PYTHONPATH=str(tiny.ROOT)),
        capture_output=True,
        text=True,
        cwd=tiny.ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    deviations = json.loads(done.stdout.splitlines()[-1])
    assert max(deviations.values()) < 1e-5, deviations


def test_model_trains_by_the_kernel_and_scores_by_torch(
    layout: ParallelLayout, on_cpu: mock.Mock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = families.write_base_nemo(tmp_path / "base.nemo", "qwen3_5")
    expected = layouts.step(path, layout, Recompute.full)
    load, calls = layouts.load, []

    def load_with_kernel(*arguments: Any, **named: Any) -> Any:
        model = load(*arguments, **named)
        use_delta_kernel(model, FLA, shape_of("qwen3_5"))
        on_cpu.reset_mock()  # forget the trial
        return model

    def infer(*arguments: Any) -> Any:
        calls.append(on_cpu.call_count)
        return score(*arguments)

    score = layouts.infer
    monkeypatch.setattr(layouts, "load", load_with_kernel)
    monkeypatch.setattr(layouts, "infer", infer)
    found = layouts.step(path, layout, Recompute.full)
    assert found == {key: pytest.approx(expected[key], abs=1e-5) for key in expected}
    assert calls == [on_cpu.call_count]
    assert calls[0] > 0


@pytest.mark.parametrize("ignored", ["initial_state", "cu_seqlens", "beta"])
def test_trial_finds_a_kernel_that_computes_something_else(ignored: str) -> None:
    """A kernel that ignores prefixes, lets states leak into the next sample, or is just wrong."""
    try_kernel(FlashDelta(recurrence), SMALL, 2, torch.bfloat16, CPU)

    def wrong(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **named: Any) -> Any:
        if ignored == "initial_state":
            named["initial_state"] = None
        if ignored == "beta":
            beta = beta.sqrt()
        output, states = recurrence(q, k, v, g, beta, **named)
        if ignored == "cu_seqlens" and states is not None:
            states = states.roll(1, dims=0)
        return output, states

    with pytest.raises(RuntimeError, match=r"its output deviates from torch's by 0\.\d+ of"):
        try_kernel(FlashDelta(wrong), SMALL, 2, torch.bfloat16, CPU)


WIDE = replace(SMALL, key_head_dim=512)


@pytest.mark.parametrize(
    ("case", "device", "dtype", "layer", "reason"),
    [
        ("qwen3_5", CPU, torch.bfloat16, SMALL, "are for GPUs, and this process uses a CPU"),
        ("qwen3_5", CUDA, torch.float32, SMALL, "multiplies fp32 in TF32, and trainer.precision"),
        ("qwen3_5", CUDA, torch.bfloat16, WIDE, "linear_key_head_dim is 512, .* up to 256"),
        ("qwen3_5", CUDA, torch.float16, SMALL, r"not installed \(pip install 'megatron-reward\["),
        ("llama3", CUDA, torch.bfloat16, None, "the model has no Gated DeltaNet layers"),
        ("nemotron_h", CUDA, torch.bfloat16, "own", "the model has no Gated DeltaNet layers"),
    ],
)
def test_kernels_that_cannot_be_used_are_rejected_with_the_reason(
    case: str, device: torch.device, dtype: torch.dtype, layer: Any, reason: str
) -> None:
    shape = shape_of(case)
    if layer != "own":
        shape = replace(shape, linear_attention=layer)
    check_delta_choice(DeltaChoice.torch, shape, dtype, device)
    with pytest.raises(ConfigError) as caught:
        check_delta_choice(FLA, shape, dtype, device)
    message = str(caught.value)
    assert re.search(reason, message), message
    begin = "model.linear_attention_kernels: flash_linear_attention cannot be used: "
    assert message.startswith(begin)
    assert message.endswith("Choose torch.")


def test_failed_trial_is_an_error_of_the_setting(
    layout: ParallelLayout, on_cpu: mock.Mock, tmp_path: Path
) -> None:
    on_cpu.side_effect = RuntimeError("Please upgrade Triton\nto >= 3.7.1")
    model = layouts.load(families.write_base_nemo(tmp_path / "base.nemo", "qwen3_5"), layout)
    with pytest.raises(ConfigError, match=r"trial failed: Please upgrade Triton.* Choose torch"):
        use_delta_kernel(model, FLA, shape_of("qwen3_5"))
    assert model.delta_kernel is None
