"""The pointwise parts against their formulas, left to autograd, in fp64."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_aligner.config.common import Precision
from nemo_aligner.cpu import kernels
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.pointwise.choice import try_kernels
from nemo_aligner.models.pointwise.eager import (
    by_whole_rows,
    gated_gelu,
    gated_silu,
    gelu,
    rms_norm,
    squared_relu,
    tanh_gelu,
)
from nemo_aligner.models.pointwise.operations import EAGER
from nemo_aligner.models.reward_model import build_reward_model
from nemo_aligner.models.rotary import rotate
from nemo_aligner.models.shapes.decoder import ModelShape
from tests.harness import tiny
from tests.harness.environments import triton_environment

Function = Callable[..., Tensor]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def rotation(tokens: int, pairs: int) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(tokens), torch.rand(pairs)).double()[:, None, None]
    return angles.cos(), angles.sin()


def test_yarn_is_that_of_megatron_core(layout: ParallelLayout) -> None:
    """By its own names and defaults, with frequencies on both sides of the ramp and within it."""
    from megatron.core.models.common.embeddings import YarnRotaryEmbedding

    for mscales, rounded in (({}, True), ({"mscale": 2.0, "mscale_all_dim": 0.5}, False)):
        given = {"original_max_position_embeddings": 32, "beta_fast": 8.0, **mscales}
        named = {f"yarn_{key}": value for key, value in given.items()}
        config = {
            **tiny.SMALLEST,
            "kv_channels": 64,
            "rotary_base": 5000.0,
            "position_embedding_type": "yarn",
            "yarn_rotary_scaling_factor": 4.0,
            "yarn_correction_range_round_to_int": rounded,
            **named,
        }
        model = build_reward_model(
            ModelShape.from_config(config), layout, num_attributes=1, precision=Precision.fp32
        )
        (rotation,) = model._rotations
        cos, sin = rotation.tables(torch.arange(40), torch.float32, None)
        theirs = YarnRotaryEmbedding(
            64,
            rotary_base=5000.0,
            scaling_factor=4.0,
            correction_range_round_to_int=rounded,
            **given,
        )
        angles, scale = theirs.get_emb(40)
        torch.testing.assert_close(cos, angles.cos()[..., :32] * scale, rtol=0, atol=5e-6)
        torch.testing.assert_close(sin, angles.sin()[..., :32] * scale, rtol=0, atol=5e-6)
        assert scale > 1.1


def plain_rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    pairs = cos.size(-1)
    first, second, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def plain_gated_silu(x: Tensor) -> Tensor:
    gate, linear = x.chunk(2, dim=-1)
    return F.silu(gate) * linear


def plain_gated_gelu(x: Tensor) -> Tensor:
    gate, linear = x.chunk(2, dim=-1)
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + torch.tanh(inner)) * linear


def plain_squared_relu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x * x, 0.0)


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def same(ours: Function, plain: Function, *arguments: object, atol: float) -> None:
    leaves = [item for item in arguments if isinstance(item, Tensor) and item.requires_grad]
    wanted = plain(*arguments)
    grad = torch.randn_like(wanted)
    found = ours(*arguments)
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, atol=atol, rtol=0)
    for our_grad, their_grad in zip(
        torch.autograd.grad(found, leaves, grad),
        torch.autograd.grad(wanted, leaves, grad),
        strict=True,
    ):
        torch.testing.assert_close(our_grad, their_grad, atol=atol, rtol=0)


def test_rotation_of_all_channels_of_some_and_of_a_view() -> None:
    torch.manual_seed(0)
    for channels in (8, 12):
        same(rotate, plain_rotate, draw(5, 1, 3, channels), *rotation(5, 4), atol=1e-12)
    same(
        lambda x, cos, sin: rotate(x[..., 8:16], cos, sin),
        lambda x, cos, sin: plain_rotate(x[..., 8:16], cos, sin),
        draw(5, 1, 3, 24),
        *rotation(5, 4),
        atol=1e-12,
    )


def test_activations_and_norm_are_their_formulas() -> None:
    torch.manual_seed(0)
    for ours, plain in (
        (gated_silu, plain_gated_silu),
        (gated_gelu, plain_gated_gelu),
        (squared_relu, plain_squared_relu),
    ):
        same(ours, plain, draw(5, 1, 14), atol=1e-12)
    # It is computed in fp32, whatever comes in.
    same(rms_norm, plain_rms_norm, draw(5, 1, 16), draw(16), 1e-5, atol=3e-6)


OPERATIONS = "tests/models/pointwise_ops.py"
# In roundings of the dtype, relative to the largest value.
WORST_ERROR = 8.0


def check_implementation(found: dict[str, Any], *, is_invariant: bool) -> None:
    assert max(found["errors"].values()) < WORST_ERROR, found["errors"]
    if is_invariant:
        assert found["variant"] == []
    for eager, ours in found["losses"]:
        np.testing.assert_allclose(ours, eager, rtol=1e-5)
        assert eager[-1] < eager[0]


def test_the_trial_of_kernels_refuses_rows_that_depend_on_others() -> None:
    cpu = torch.device("cpu")
    try_kernels(EAGER, cpu)
    mixing = replace(EAGER, gated_silu=lambda x: gated_silu(x) + x.mean())
    with pytest.raises(
        RuntimeError, match="eager: the result of gated_silu for a row depends on other rows"
    ):
        try_kernels(mixing, cpu)


def test_compiled_formulas_are_right() -> None:
    done = tiny.run_script(OPERATIONS, "cpu", "compile", fresh=True)
    check_implementation(json.loads(done.stdout.splitlines()[-1])["compile"], is_invariant=False)


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_triton_kernels_are_right_in_its_interpreter() -> None:
    """And a row has the same bits alone and among others, forward and backward."""
    done = subprocess.run(
        [str(triton_environment() / "bin" / "python"), OPERATIONS, "cpu", "triton"],
        env=tiny.environment(TRITON_INTERPRET="1"),
        capture_output=True,
        text=True,
        cwd=tiny.ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    check_implementation(json.loads(done.stdout.splitlines()[-1])["triton"], is_invariant=True)


def test_norm_in_bf16_stays_bf16() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 1, 16, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(16, dtype=torch.bfloat16, requires_grad=True)
    out = rms_norm(x, weight, 1e-5)
    out.sum().backward()
    assert out.dtype is x.grad.dtype is weight.grad.dtype is torch.bfloat16  # type: ignore[union-attr]
    wanted = F.rms_norm(x.float(), (16,), weight.float(), 1e-5)
    torch.testing.assert_close(out.float(), wanted, atol=0.02, rtol=0.01)


@pytest.mark.parametrize(
    "function", [gated_silu, gated_gelu, squared_relu, gelu, tanh_gelu, torch.sigmoid]
)
def test_by_whole_rows_a_row_has_the_same_bits_however_many_threads_and_rows(
    function: Callable[[Tensor], Tensor],
) -> None:
    before = torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    is_gated = function in (gated_silu, gated_gelu)
    try:
        for width in (1536, 200, 20000, 101):
            x = torch.randn(96, 1, (1 + is_gated) * width, generator=generator) * 2
            torch.set_num_threads(1)
            alone = torch.cat([by_whole_rows(function, row, is_gated) for row in x.split(1)])
            for threads in (1, 3, 5, 7):
                torch.set_num_threads(threads)
                for rows in (slice(0, 96), slice(0, 1), slice(7, 64), slice(32, 95)):
                    got = by_whole_rows(function, x[rows], is_gated)
                    assert torch.equal(got, alone[rows]), (width, threads, rows)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize("dtype", kernels.FLOATS)
@torch.no_grad()
def test_kernels_compute_the_formulas_row_by_row_and_pass_a_nan_on(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 1, 96) * 4
    x[2, 0, :3] = torch.tensor([-200.0, 200.0, -88.5])
    x[5, 0, 1] = torch.nan
    weight = torch.randn(96)
    heads = torch.randn(7, 3, 5, 32)[:, :, 1:4]  # as keys and queries lie beside values
    cos, sin = (each.float() for each in rotation(7, 12))
    assert kernels.supports(x)
    assert not kernels.supports(x.double())
    # Of bf16 one rounding is allowed, where the sum is at the border of two.
    rtol = 2e-6 if dtype is torch.float32 else 2**-8
    norm = partial(kernels.rms_norm, dtype=dtype)
    for ours, plain, floats in (
        (norm, plain_rms_norm, (x, weight, 1e-5)),
        (kernels.gated_silu, plain_gated_silu, (x,)),
        (kernels.rotate, plain_rotate, (heads, cos, sin)),
    ):
        arguments = [each.to(dtype) if isinstance(each, Tensor) else each for each in floats]
        if ours is norm:
            arguments[1] = weight  # stays fp32
        exact = [each.double() if isinstance(each, Tensor) else each for each in arguments]
        wanted = plain(*exact).to(dtype)
        first, *others = arguments
        row = first[3:4].clone()
        found = ours(*arguments)
        assert found.dtype is dtype
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=rtol, equal_nan=True)
        part = [each[3:4] if ours is kernels.rotate else each for each in others]
        assert torch.equal(ours(row, *part), found[3:4])


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize("dtype", kernels.FLOATS)
@torch.no_grad()
def test_kernels_add_to_the_stream_and_norm_the_sum(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    stream, added = torch.randn(7, 1, 96), torch.randn(7, 1, 96).to(dtype)
    weight, wanted = torch.randn(96).to(dtype), stream + added
    assert kernels.can_add(stream, added)
    assert not kernels.can_add(stream.bfloat16(), added)
    assert not kernels.can_add(torch.randn(7, 1, 192)[..., :96], added)
    normed = kernels.add_and_norm(stream, added, weight, 1e-5, dtype)
    assert torch.equal(stream, wanted)
    assert torch.equal(normed, kernels.rms_norm(wanted, weight, 1e-5, dtype))
    kernels.add(stream, added)
    assert torch.equal(stream, wanted + added)


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CC", "no-such-compiler")
    kernels._load_once.cache_clear()
    kernels._warn.cache_clear()
    yield
    kernels._load_once.cache_clear()


@pytest.mark.usefixtures("without_compiler")
def test_without_a_compiler_torch_computes_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        with torch.no_grad():
            assert not kernels.supports(torch.zeros(4, 16))
    (message,) = (record.getMessage() for record in caplog.records)
    assert "kernels.c" in message
    assert "no-such-compiler" in message
    assert caplog.records[0].levelname == "WARNING"
    monkeypatch.setenv(kernels.SWITCH, "0")
    kernels._load_once.cache_clear()
    with torch.no_grad():
        assert not kernels.supports(torch.zeros(4, 16))
    assert len(caplog.records) == 1  # who switches them off knows
