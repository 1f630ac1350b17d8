"""LoRA in a model: nothing at first, then what is trained, and the same when it is folded in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_aligner.batch import PackedBatch
from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained
from nemo_aligner.config.common import Precision
from nemo_aligner.config.lora import LORA_TARGETS
from nemo_aligner.config.model import OptimConfig, SchedulerConfig
from nemo_aligner.models.adapters import (
    draw_adapters,
    fold_adapters,
    folded,
    has_adapters,
    train_adapters_alone,
)
from nemo_aligner.models.batch_invariant import make_batch_invariant
from nemo_aligner.models.head_shape import HeadShape
from nemo_aligner.models.lora import LoraShape, is_of_adapter
from nemo_aligner.models.reward_model import GPTRewardModel, build_reward_model
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.models.trainable import wrap_for_training
from nemo_aligner.training.optimizer.build import build_optimizer
from tests import tiny
from tests.planning.test_cost import CONFIG

LORA = LoraShape(4, 8.0, LORA_TARGETS)
SHAPE = ModelShape.from_config(CONFIG)
WITH_LORA = replace(SHAPE, lora=LORA)
PACK = PackedBatch.pack([list(range(20, 50)), list(range(100, 115)), [7] * 9])


def build(
    layout: Any, lora: LoraShape | None, seed: int = 5, head: HeadShape | None = None
) -> GPTRewardModel:
    """A model of drawn weights, which do not depend on ``lora``."""
    shape = replace(SHAPE, lora=lora, head=head)
    model = build_reward_model(shape, layout, num_attributes=2, precision=Precision.fp32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not is_of_adapter(name):
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(1 + 0.1 * drawn if "norm" in name else 0.2 * drawn)
    return model


def perturb(model: GPTRewardModel) -> None:
    """Give every B numbers of its own, as training does."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("linear_out.weight"):
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


@torch.no_grad()
def rewards(model: GPTRewardModel) -> Tensor:
    return model.eval()(PACK)


def test_a_fresh_adapter_changes_no_bit(layout: Any) -> None:
    plain, adapted = build(layout, None), build(layout, LORA)
    draw_adapters(adapted, 1)
    for rows in (None, 64):
        for model in (plain, adapted):
            make_batch_invariant(model, rows)
        assert torch.equal(rewards(adapted), rewards(plain))


def test_a_is_drawn_wide_and_by_the_seed(layout: Any) -> None:
    drawn = []
    for seed in (1, 1, 2):
        model = build(layout, LORA)
        draw_adapters(model, seed)
        drawn.append({n: p for n, p in model.named_parameters() if "linear_in" in n})
    first, again, other = drawn
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    assert len({tuple(each[0, :4].tolist()) for each in first.values()}) == len(first) == 16
    scaled = [each.detach().flatten() * each.size(1) ** 0.5 for each in first.values()]
    assert torch.cat(scaled).std().item() == pytest.approx(1.0, abs=0.05)


def test_adapters_beside_added_query_groups_are_those_of_one_process(layout: Any) -> None:
    """Zeros stand for them; a rank with no others has the A of a column-parallel layer, too."""
    plain, padded = build(layout, LORA), build(layout, LORA)
    with torch.no_grad():
        for layer in padded.decoder.layers:
            layer.self_attention.linear_qkv.weight.zero_()
            layer.self_attention.linear_proj.weight[:, 16:] = 0.0
    for model in (plain, padded):
        draw_adapters(model, 1)
    for one, other in zip(plain.decoder.layers, padded.decoder.layers, strict=True):
        drawn = [
            (a.self_attention.linear_qkv.adapter.linear_in.weight.detach(),
             a.self_attention.linear_proj.adapter.linear_in.weight.detach())
            for a in (one, other)
        ]  # fmt: skip
        assert torch.equal(drawn[0][0], drawn[1][0])
        assert torch.equal(drawn[0][1][:, :16], drawn[1][1][:, :16])
        assert not drawn[1][1][:, 16:].any()


@pytest.mark.parametrize("rows", [None, 64])
def test_folded_into_the_weights_it_gives_the_same_rewards(layout: Any, rows: int | None) -> None:
    model = build(layout, LORA)
    make_batch_invariant(model, rows)
    draw_adapters(model, 1)
    before = rewards(model)
    perturb(model)
    wanted = rewards(model)
    assert (wanted - before).abs().min() > 1e-2
    fold_adapters(model)
    assert not has_adapters(model)
    assert not any(map(is_of_adapter, model.state_dict()))
    torch.testing.assert_close(rewards(model), wanted, rtol=1e-5, atol=1e-5)


def test_a_reward_has_the_same_bits_alone(layout: Any) -> None:
    model = build(layout, LORA)
    make_batch_invariant(model, 64)
    draw_adapters(model, 1)
    perturb(model)
    together = rewards(model)
    with torch.no_grad():
        alone = model(PackedBatch.pack([list(range(100, 115))]))
    assert torch.equal(alone[0], together[1])


def test_only_targets_have_matrices(layout: Any) -> None:
    model = build(layout, LoraShape(2, 2.0, ("linear_proj",)))
    names = [name for name, _ in model.named_parameters() if is_of_adapter(name)]
    assert len(names) == 2 * SHAPE.num_layers
    assert all("self_attention.linear_proj.adapter." in name for name in names)


def test_the_gradient_is_that_of_the_folded_weight(layout: Any) -> None:
    """dA = s B' dW and dB = s dW A', where dW is the gradient of the whole weight."""
    adapted, plain = build(layout, LORA), build(layout, LORA)
    for model in (adapted, plain):
        draw_adapters(model, 1)
        perturb(model)
    fold_adapters(plain)
    train_adapters_alone(adapted)
    wrapped = [wrap_for_training(model) for model in (adapted, plain)]
    for model in wrapped:
        model.train()
        model(PACK).sum().backward()
    whole = dict(plain.named_parameters())
    matrices = dict(adapted.named_parameters())
    for name, weight in whole.items():
        linear = name.removesuffix(".weight")
        if f"{linear}.adapter.linear_in.weight" not in matrices:
            continue
        low, high = (matrices[f"{linear}.adapter.linear_{end}.weight"] for end in ("in", "out"))
        of_low = LORA.scale * high.detach().t() @ weight.main_grad
        of_high = LORA.scale * weight.main_grad @ low.detach().t()
        for got, wanted in ((low.main_grad, of_low), (high.main_grad, of_high)):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))


def test_training_learns_and_leaves_the_weights_their_bits(layout: Any) -> None:
    model = build(layout, LORA)
    draw_adapters(model, 1)
    train_adapters_alone(model)
    trained = {name for name, each in model.named_parameters() if each.requires_grad}
    assert trained == {n for n in dict(model.named_parameters()) if is_of_adapter(n)} | {
        "rm_head.weight"
    }
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    wrapped = wrap_for_training(model)
    frozen = [each for name, each in model.named_parameters() if name not in trained]
    assert not any(hasattr(each, "main_grad") for each in frozen)
    options = OptimConfig(lr=1e-2, sched=SchedulerConfig(warmup_steps=0))
    optimizer = build_optimizer(wrapped, options, 1.0, 20)
    assert sum(each.numel() for each in optimizer.state_tensors()) == 3 * sum(
        before[name].numel() for name in trained
    )
    wanted = torch.tensor([[1.0, -1.0], [0.0, 2.0], [-2.0, 0.5]])
    losses = []
    for _ in range(20):
        wrapped.train()
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        loss = (wrapped(PACK) - wanted).square().mean()
        loss.backward()
        wrapped.finish_grad_sync()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 5
    after = dict(model.named_parameters())
    same = {name for name, each in before.items() if torch.equal(each, after[name])}
    assert same == before.keys() - trained


def test_query_groups_of_zeros_stay_without_effect(layout: Any, tmp_path: Path) -> None:
    from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo

    tiny.write_hf_checkpoint(tmp_path / "hf")
    convert_hf_to_nemo(tmp_path / "hf", tmp_path / "padded.nemo", tensor_parallel=3)
    loaded = load_pretrained(
        tmp_path / "padded.nemo", layout, num_attributes=1, precision=Precision.fp32, lora=LORA
    )
    model = loaded.model
    assert loaded.config["lora"] == LORA.to_config()
    train_adapters_alone(model)
    wrapped = wrap_for_training(model)
    optimizer = build_optimizer(wrapped, OptimConfig(lr=1e-2), 1.0, 3)
    for _ in range(3):
        wrapped.train()
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        wrapped(PACK).sum().backward()
        wrapped.finish_grad_sync()
        optimizer.step()
    for layer in model.decoder.layers:
        attention = layer.self_attention
        rows = attention.linear_qkv.adapter.linear_out.weight.chunk(3)
        columns = attention.linear_proj.adapter.linear_in.weight.chunk(3, dim=1)
        assert not rows[2].any()
        assert not columns[2].any()
        assert rows[0].any()
        assert columns[0].any()


def test_what_is_folded_is_rounded_once() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 5, generator=generator).bfloat16()
    low, high = torch.randn(2, 5, generator=generator), torch.randn(6, 2, generator=generator)
    found = folded(weight, low.bfloat16(), high.bfloat16(), 0.5)
    exact = weight.double() + 0.5 * high.bfloat16().double() @ low.bfloat16().double()
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, exact.float().bfloat16())
