"""Quantized bases of LoRA: their values, their layers' gradients, and what is stored of them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_aligner.batch.packed import PackedBatch
from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained, save_reward_model
from nemo_aligner.checkpoint.weights.save import frozen_digest
from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import LORA_TARGETS, BasePrecision, Recompute
from nemo_aligner.models import quantized
from nemo_aligner.models.batch_invariance import freeze_for_scoring, make_batch_invariant
from nemo_aligner.models.lora import train_adapters_alone
from nemo_aligner.models.quantized import Nf4Weight, pack, quantize
from nemo_aligner.models.quantized_layers import _warn_of_dense_weight, quantized_layers
from nemo_aligner.models.reward_model import GPTRewardModel
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.lora import LoraShape, read_lora
from nemo_aligner.models.shapes.quantized import check_quantizable, quantized_bytes
from nemo_aligner.models.training_wrap import wrap_for_training
from nemo_aligner.utils.errors import ConfigError
from tests.harness import tiny
from tests.harness.environments import triton_environment
from tests.planning.test_cost import CONFIG, EXPERTS

NF4 = BasePrecision.nf4
LORA = LoraShape(4, 8.0, LORA_TARGETS, NF4)
SIZES = {"hidden_size": 128, "intermediate_size": 192}
PACK = PackedBatch.pack([list(range(20, 50)), list(range(60, 75)), [7] * 9])


def drawn(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    weight = 0.02 * torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    weight[0, :64] = 0.0
    return weight.to(dtype)


def test_nf4_has_the_values_of_bitsandbytes() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    how = {"blocksize": 64, "quant_type": "nf4"}
    for dtype in (torch.float32, torch.bfloat16):
        weight = drawn(32, 16384, dtype)
        got = Nf4Weight.quantize(weight, is_transposed=False).dequantize()
        # A row has 256 blocks, the size of bitsandbytes' groups.
        wanted = torch.cat(
            [
                functional.dequantize_4bit(
                    *functional.quantize_4bit(row[None], **how, compress_statistics=True)
                )
                for row in weight
            ]
        )
        is_same = (got.float() - wanted.float()).abs() <= 2**-7 * wanted.float().abs() * (
            1 if dtype is torch.bfloat16 else 2**-14
        )
        # bitsandbytes' kernel for CPUs rounds some scales to the second nearest of the 8-bit codes.
        assert is_same.float().mean() > 0.99
        assert (got.float() - wanted.float()).abs().max() < 0.02 * wanted.float().abs().max()


def test_nf4_has_recorded_values_of_bitsandbytes() -> None:
    """Those of bitsandbytes 0.50.2 on a CPU, with double quantization."""
    row = torch.sin(torch.arange(16384) * 0.37) * torch.linspace(0.5, 1.5, 16384)
    values = Nf4Weight.quantize(row[None], is_transposed=False).dequantize()[0]
    recorded = [0.0, -0.3308743, 0.7496657, -0.8762126, 0.5631499, 0.0, -0.8705092, 1.3769323]
    torch.testing.assert_close(values[::2048], torch.tensor(recorded), rtol=1e-6, atol=1e-7)
    assert values.double().abs().sum().item() == pytest.approx(10516.0506, abs=1e-3)


@pytest.mark.parametrize("precision", BasePrecision)
def test_a_quantized_weight_is_near_and_is_packed_again_without_change(
    precision: BasePrecision,
) -> None:
    near = {NF4: 0.1, BasePrecision.int8: 0.01, BasePrecision.fp8: 0.03}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight = drawn(300, 256, dtype)
        for splits_inputs in (False, True):
            stored = quantize(weight, precision, splits_inputs=splits_inputs)
            values = stored.dequantize()
            assert values.dtype is dtype
            assert not values[0, :64].any()
            difference = (values.float() - weight.float()).norm() / weight.float().norm()
            assert near[precision] / 4 < difference < near[precision]
            size = quantized_bytes(300, 256, precision, dtype.itemsize, splits_inputs=splits_inputs)
            assert stored.num_bytes == size
            again = pack(values, precision, splits_inputs=splits_inputs)
            assert again is not None
            assert torch.equal(again.dequantize(), values)
            assert pack(weight, precision, splits_inputs=splits_inputs) is None


class _CudaDivision(TorchDispatchMode):
    """Divide by numbers as CUDA does: it multiplies by the number's rounded inverse."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        products = {torch.ops.aten.div.Tensor: "mul", torch.ops.aten.div_.Tensor: "mul_"}
        if func in products and not isinstance(args[1], Tensor):
            inverse = torch.tensor(1.0) / args[1]
            return getattr(args[0], products[func])(inverse.item())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", BasePrecision)
def test_quantized_values_are_the_same_on_a_gpu(precision: BasePrecision) -> None:
    weight = drawn(300, 256)
    values = quantize(weight, precision, splits_inputs=False).dequantize()
    with _CudaDivision():
        assert not torch.equal(values / 448.0, values.div(torch.tensor(448.0)))
        on_gpu = quantize(weight, precision, splits_inputs=False)
        assert torch.equal(on_gpu.dequantize(), values)
        packed = pack(values, precision, splits_inputs=False)
    assert packed is not None


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_triton_dequantizes_to_the_same_bits_in_its_interpreter() -> None:
    done = subprocess.run(
        [str(triton_environment() / "bin" / "python"), "tests/models/dequantized.py", "cpu"],
        env=tiny.environment(TRITON_INTERPRET="1"),
        capture_output=True,
        text=True,
        cwd=tiny.ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_torch_dequantizes_where_triton_computes_other_bits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The trial runs here on the CPU, with kernels whose last value is wrong."""
    device = torch.device("cpu")

    def look_up_pairs(codes: Tensor, scales: Tensor, table: Tensor, dtype: Any) -> Tensor:
        values = torch.stack([table[(codes >> bits & 15).int()] for bits in (4, 0)], -1)
        values = values.view(*scales.shape, -1) * scales.float()[..., None]
        return values.to(dtype).view(len(codes), -1)

    def look_up_rows(codes: Tensor, scales: Tensor, table: Tensor) -> Tensor:
        values = (table[codes.int()] * scales.float()[:, None]).to(scales.dtype)
        values[-1, -1] += wrong
        return values

    kernels = SimpleNamespace(look_up_pairs=look_up_pairs, look_up_rows=look_up_rows)
    monkeypatch.setattr(quantized, "why_unavailable", lambda *_: None)
    monkeypatch.setattr(quantized, "_triton_kernels", lambda: kernels)
    wrong = 0.0
    assert quantized.uses_triton.__wrapped__(device)
    assert caplog.text == ""
    wrong = 1.0
    assert not quantized.uses_triton.__wrapped__(device)
    assert "so torch does, which is slower: a value of int8 has other bits" in caplog.text


def test_nf4_of_bitsandbytes_is_quantized_again_to_the_same_codes() -> None:
    """Only the scales change, because they are quantized again, in other groups."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight = drawn(300, 1024, dtype)
        largest = weight.view(300, -1, 64).abs().amax(-1).float()
        published = Nf4Weight(Nf4Weight.pack(weight).tensors()[0], largest, dtype)
        values = published.dequantize()
        for splits_inputs in (False, True):
            again = quantize(values, NF4, splits_inputs=splits_inputs)
            assert torch.equal(again.tensors()[0], published.tensors()[0])
            difference = (again.dequantize().float() - values.float()).norm()
            assert 0 < difference < 0.004 * values.float().norm()
            scales = again.dequantize().float().view(300, -1, 64).abs().amax(-1)
            assert ((scales - largest).abs() <= 0.01 * largest).all()


@pytest.mark.parametrize("splits_inputs", [False, True])
def test_nf4_of_a_part_is_a_part_of_nf4(splits_inputs: bool) -> None:
    weight = drawn(96, 512)
    whole = quantize(weight, NF4, splits_inputs=splits_inputs).dequantize()
    axis = int(splits_inputs)
    parts = [
        quantize(part.contiguous(), NF4, splits_inputs=splits_inputs).dequantize()
        for part in weight.chunk(4, axis)
    ]
    assert torch.equal(torch.cat(parts, axis), whole)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_base_nemo(tmp_path_factory.mktemp("base") / "base.nemo", **SIZES)


def load(
    path: Path, layout: Any, lora: LoraShape | None, recompute: Recompute = Recompute.none
) -> GPTRewardModel:
    how = {"num_attributes": 1, "precision": Precision.fp32, "recompute": recompute}
    return load_pretrained(path, layout, **how, lora=lora).model


def perturb(model: GPTRewardModel) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("linear_out.weight"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def as_dense(model: GPTRewardModel, dense: GPTRewardModel) -> None:
    """Give a model without quantization the dequantized weights of ``model``."""
    modules = dict(dense.named_modules())
    with torch.no_grad():
        for name, layer in quantized_layers(model).items():
            modules[name].weight.copy_(layer.weight)


def gradients(model: GPTRewardModel) -> tuple[Tensor, dict[str, Tensor]]:
    train_adapters_alone(model)
    wrapped = wrap_for_training(model)
    wrapped.train()
    rewards = wrapped(PACK)
    rewards.sum().backward()
    trained = {n: each for n, each in model.named_parameters() if each.requires_grad}
    return rewards.detach(), {name: each.main_grad.clone() for name, each in trained.items()}


@pytest.mark.parametrize("recompute", [Recompute.none, Recompute.full])
def test_a_step_has_the_gradients_of_lora_on_the_dequantized_weights(
    base: Path, layout: Any, recompute: Recompute
) -> None:
    model = load(base, layout, LORA, recompute)
    dense = load(base, layout, replace(LORA, base_precision=None), recompute)
    assert len(quantized_layers(model)) == 4 * len(model.decoder.layers)
    assert not any("linear_qkv.weight" in name for name, _ in model.named_parameters())
    as_dense(model, dense)
    for each in (model, dense):
        perturb(each)
    rewards, found = gradients(model)
    wanted_rewards, wanted = gradients(dense)
    torch.testing.assert_close(rewards, wanted_rewards, rtol=1e-5, atol=1e-6)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        most = 1e-5 * float(gradient.abs().max())
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=most)


def test_no_dequantized_weight_is_kept_for_the_backward_pass(base: Path, layout: Any) -> None:
    model = load(base, layout, LORA)
    saved = set()

    def keep(tensor: Tensor) -> Tensor:
        saved.add(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.train()(PACK)
    sizes = {layer.weight_shape for layer in quantized_layers(model).values()}
    assert saved
    assert saved.isdisjoint(sizes | {size[::-1] for size in sizes})


@pytest.mark.parametrize("precision", BasePrecision)
def test_an_archive_has_dequantized_values_and_scores_the_same_bits(
    base: Path, layout: Any, tmp_path: Path, precision: BasePrecision
) -> None:
    lora = replace(LORA, base_precision=precision)
    pretrained = load_pretrained(
        base, layout, num_attributes=1, precision=Precision.fp32, lora=lora
    )
    model, path = pretrained.model, tmp_path / "trained.nemo"
    perturb(model)
    make_batch_invariant(model, 64)
    with torch.no_grad():
        wanted = model.eval()(PACK)
    config = {**pretrained.config, "regression": {"num_attributes": 1}}
    save_reward_model(path, model, config, pretrained.tokenizer, None)
    with open_nemo(path) as folder:
        assert read_lora(folder.config) == lora
    again = load(path, layout, lora)
    with torch.no_grad():
        again.rm_head.load_state_dict(model.rm_head.state_dict())
    assert frozen_digest(again) == frozen_digest(model)
    layers = quantized_layers(again)
    for layer in layers.values():  # packed, not kept dense
        assert layer.num_weight_bytes < 0.6 * 4 * layer.weight_shape.numel()
    folded = load(path, layout, None)
    assert not quantized_layers(folded)
    folded.rm_head.load_state_dict(model.rm_head.state_dict())
    for each in (again, folded):
        make_batch_invariant(each, 64)
    with torch.no_grad():
        assert torch.equal(again.eval()(PACK), wanted)
        freeze_for_scoring(again)
        assert torch.equal(again(PACK), wanted)
        torch.testing.assert_close(folded.eval()(PACK), wanted, rtol=1e-5, atol=1e-5)


def test_a_weight_that_cannot_be_packed_stays_dense_with_a_warning(
    base: Path, layout: Any, caplog: pytest.LogCaptureFixture
) -> None:
    layer = next(iter(quantized_layers(load(base, layout, LORA)).values()))
    layer.is_dequantized = True
    _warn_of_dense_weight.cache_clear()
    weight = drawn(*layer.weight_shape)
    for _ in range(2):
        layer.store_weight(weight)
    assert torch.equal(layer.weight, weight)
    assert caplog.text.count("base_precision=nf4: weights of the checkpoint stay dense and") == 1
    assert "need 32 bits a value" in caplog.text


def test_weights_that_are_not_on_a_cpu_stay_quantized_for_scoring(base: Path, layout: Any) -> None:
    model = load(base, layout, LORA)
    make_batch_invariant(model, 64)
    model.to("meta")  # stands for a GPU
    freeze_for_scoring(model)
    assert len(quantized_layers(model)) == 4 * len(model.decoder.layers)


def test_models_that_cannot_be_quantized_are_rejected_by_name() -> None:
    shape = replace(ModelShape.from_config({**CONFIG, "ffn_hidden_size": 192}), lora=LORA)
    check_quantizable(shape, 1)
    check_quantizable(replace(shape, lora=None), 4)
    for tp, width, message in (
        (
            2,
            192,
            r"nf4 for a width of the heads on one of 2 .* of 32, .*fp8, or fewer tensor parallel",
        ),
        (1, 160, r"nf4 for a width of the MLP of 160, .* Use int8 or fp8$"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_quantizable(replace(shape, ffn_hidden_size=width), tp)
    check_quantizable(replace(shape, lora=replace(LORA, base_precision=BasePrecision.fp8)), 2)
    experts = ModelShape.from_config({**CONFIG, **EXPERTS})
    with pytest.raises(ConfigError, match="nf4 for a model with experts, which is not supported"):
        check_quantizable(replace(experts, lora=LORA), 1)
