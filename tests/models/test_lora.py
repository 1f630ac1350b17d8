"""LoRA: settings and sections, what it is in a model, its training, its dropout."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_aligner.batch.packed import Group, PackedBatch, Records
from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo
from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained
from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import (
    LORA_TARGETS,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    Recompute,
    SchedulerConfig,
)
from nemo_aligner.models.batch_invariance import make_batch_invariant
from nemo_aligner.models.lora import (
    LoraDropout,
    draw_adapters,
    fold_adapters,
    fold_into_weight,
    train_adapters_alone,
)
from nemo_aligner.models.reward_model import GPTRewardModel, build_reward_model
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.head import HeadShape
from nemo_aligner.models.shapes.lora import (
    LoraShape,
    check_lora,
    is_of_adapter,
    read_lora,
    with_lora,
)
from nemo_aligner.models.training_wrap import wrap_for_training
from nemo_aligner.training.optimizer import build_optimizer
from nemo_aligner.utils.errors import CheckpointError, SettingsError
from tests.harness import tiny
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


def test_adapters_that_are_fresh_change_no_bit(layout: Any) -> None:
    plain, adapted = build(layout, None), build(layout, LORA)
    draw_adapters(adapted, 1)
    for rows in (None, 64):
        for model in (plain, adapted):
            make_batch_invariant(model, rows)
        assert torch.equal(rewards(adapted), rewards(plain))


def test_adapters_draw_a_wide_and_by_the_seed(layout: Any) -> None:
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


def test_adapters_folded_into_the_weights_give_the_same_rewards(layout: Any) -> None:
    for rows in (None, 64):
        model = build(layout, LORA)
        make_batch_invariant(model, rows)
        draw_adapters(model, 1)
        before = rewards(model)
        perturb(model)
        wanted = rewards(model)
        assert (wanted - before).abs().min() > 1e-2
        fold_adapters(model)
        assert not any(map(is_of_adapter, model.state_dict()))
        torch.testing.assert_close(rewards(model), wanted, rtol=1e-5, atol=1e-5)


def test_adapters_give_a_reward_the_same_bits_alone(layout: Any) -> None:
    model = build(layout, LORA)
    make_batch_invariant(model, 64)
    draw_adapters(model, 1)
    perturb(model)
    together = rewards(model)
    with torch.no_grad():
        alone = model(PackedBatch.pack([list(range(100, 115))]))
    assert torch.equal(alone[0], together[1])


def test_adapters_are_beside_targets_alone(layout: Any) -> None:
    model = build(layout, LoraShape(2, 2.0, ("linear_proj",)))
    names = [name for name, _ in model.named_parameters() if is_of_adapter(name)]
    assert len(names) == 2 * SHAPE.num_layers
    assert all("self_attention.linear_proj.adapter." in name for name in names)


def test_adapters_have_the_gradient_of_the_folded_weight(layout: Any) -> None:
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


def train(
    wrapped: Any, optimizer: Any, steps: int, loss_of: Callable[[Tensor], Tensor]
) -> list[float]:
    """The loss of each step."""
    losses = []
    for _ in range(steps):
        wrapped.train()
        wrapped.zero_grad_buffer()
        loss = loss_of(wrapped(PACK))
        loss.backward()
        wrapped.finish_grad_sync()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_adapters_learn_and_leave_the_weights_their_bits(layout: Any) -> None:
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
    losses = train(wrapped, optimizer, 20, lambda rewards: (rewards - wanted).square().mean())
    assert losses[-1] < losses[0] / 5
    after = dict(model.named_parameters())
    same = {name for name, each in before.items() if torch.equal(each, after[name])}
    assert same == before.keys() - trained


def test_adapters_leave_query_groups_of_zeros_without_effect(layout: Any, tmp_path: Path) -> None:
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
    train(wrapped, optimizer, 3, Tensor.sum)
    for layer in model.decoder.layers:
        attention = layer.self_attention
        rows = attention.linear_qkv.adapter.linear_out.weight.chunk(3)
        columns = attention.linear_proj.adapter.linear_in.weight.chunk(3, dim=1)
        assert not rows[2].any()
        assert not columns[2].any()
        assert rows[0].any()
        assert columns[0].any()


def test_adapters_that_are_folded_are_rounded_once() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 5, generator=generator).bfloat16()
    low, high = torch.randn(2, 5, generator=generator), torch.randn(6, 2, generator=generator)
    found = fold_into_weight(weight, low.bfloat16(), high.bfloat16(), 0.5)
    exact = weight.double() + 0.5 * high.bfloat16().double() @ low.bfloat16().double()
    assert found.dtype is torch.bfloat16
    assert torch.equal(found, exact.float().bfloat16())


FIRST, SECOND = list(range(40)), [*range(25), *range(100, 120)]


def left_out(
    batch: PackedBatch, *, step: int = 0, seed: int = 1, linear: int = 0, rate: float = 0.25
) -> Tensor:
    """``[T, 64]``, which numbers of a pack are left out."""
    dropout = LoraDropout(rate, seed)
    keys = dropout.token_keys(batch, step)
    return dropout.apply(torch.ones(batch.num_tokens, 1, 64), keys, linear, 0)[:, 0] == 0


def pair(record: int, prefix: int) -> PackedBatch:
    groups = [Group(2, prefix)]
    return PackedBatch.pack([FIRST, SECOND], Records.of([record], [2]), groups=groups)


def test_dropout_leaves_out_as_many_as_asked_for() -> None:
    records = Records.of(range(50), [1] * 50)
    batch = PackedBatch.pack([[1] * 200] * 50, records)
    for rate in (0.1, 0.5):
        found = left_out(batch, rate=rate)
        assert found.float().mean().item() == pytest.approx(rate, abs=0.005)
        # Nor does a token or a channel have more of it than chance gives.
        spread = (rate * (1 - rate)) ** 0.5
        assert found.float().mean(1).std().item() == pytest.approx(spread / 64**0.5, rel=0.05)
        assert found.float().mean(0).std().item() == pytest.approx(spread / 10_000**0.5, rel=0.3)


def test_dropout_of_each_step_seed_layer_and_token_is_another() -> None:
    batch = pair(7, 0)
    same = left_out(batch)
    assert torch.equal(left_out(batch), same)
    for other in ({"step": 1}, {"seed": 2}, {"linear": 1}):
        differing = (left_out(batch, **other) != same).float().mean().item()
        assert differing == pytest.approx(2 * 0.25 * 0.75, abs=0.05)
    of_tokens = left_out(pair(7, 25))
    assert len({tuple(row) for row in of_tokens.tolist()}) == len(of_tokens)


def test_dropout_of_a_record_is_the_same_in_any_company() -> None:
    for prefix in (0, 25):
        alone = left_out(pair(7, prefix))
        records, groups = Records.of([2, 7], [1, 2]), [Group(1, 0), Group(2, prefix)]
        company = PackedBatch.pack([[3] * 11, FIRST, SECOND], records, groups=groups)
        company = company.padded_to_multiple(16)
        assert torch.equal(left_out(company)[11 : 11 + len(alone)], alone)
        assert not torch.equal(left_out(pair(8, prefix)), alone)


def test_dropout_of_a_text_with_several_rewards_is_that_of_its_record_and_number() -> None:
    """The masks are of texts, however many of their steps are read."""

    def of_steps(ids: list[int], sequences: list[list[int]], counts: list[list[int]]) -> Tensor:
        flat = [count for of_record in counts for count in of_record]
        records = Records.of(ids, [*map(len, counts)], reward_counts=flat)
        reads = [
            range(len(sequence) - count, len(sequence))
            for sequence, count in zip(sequences, flat, strict=True)
        ]
        groups = [Group(len(of_record), 0) for of_record in counts]
        pack = PackedBatch.pack(sequences, records, groups=groups, reads=reads)
        return left_out(pack.padded_to_multiple(16))

    both = len(FIRST) + len(SECOND)
    plain = left_out(pair(7, 0))
    assert torch.equal(of_steps([7], [FIRST, SECOND], [[3, 2]])[:both], plain)
    company = of_steps([2, 7, 9], [[3] * 11, FIRST, SECOND, [4] * 9], [[5], [3, 2], [4]])
    assert torch.equal(company[11 : 11 + both], plain)
    single = left_out(PackedBatch.pack([[3] * 11, [4] * 9], Records.of([2, 9], [1, 1])))
    assert torch.equal(torch.cat([company[:11], company[11 + both : 20 + both]]), single)


def test_dropout_on_ranks_that_share_tokens_or_channels_is_the_same() -> None:
    dropout = LoraDropout(0.3, 5)
    keys = torch.randint(-(2**31), 2**31 - 1, (12,), dtype=torch.int32)
    x = torch.ones(12, 1, 32)
    dropped = dropout.apply(x, keys, 3, 0)
    assert torch.equal(dropout.apply(x[:5], keys[4:9], 3, 0), dropped[4:9])
    assert torch.equal(dropout.apply(x[:, :, :8], keys, 3, 16), dropped[:, :, 16:24])


def gradients(layout: Any, recompute: Recompute, rate: float) -> list[Tensor]:
    model = build_reward_model(
        WITH_LORA,
        layout,
        num_attributes=1,
        precision=Precision.fp32,
        recompute=recompute,
        lora_dropout=LoraDropout(rate, 1) if rate else None,
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    draw_adapters(model, 1)
    perturb(model)
    train_adapters_alone(model)
    wrapped = wrap_for_training(model)
    wrapped.train()
    rewards = [wrapped(pair(record, 25)) for record in (1, 2)]
    for each in reversed(rewards):  # as a pipeline may, and recomputation has to know whose it is
        each.sum().backward()
    return [each.main_grad.clone() for each in model.parameters() if each.requires_grad]


def test_dropout_that_is_computed_again_is_the_same(layout: Any) -> None:
    wanted = gradients(layout, Recompute.none, 0.2)
    found = gradients(layout, Recompute.full, 0.2)
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    without = gradients(layout, Recompute.none, 0.0)
    assert not any(torch.allclose(*each) for each in zip(wanted, without, strict=True))


OF_TWO = LoraShape(8, 16.0, ("linear_qkv", "linear_fc2"))


def test_lora_is_read_as_it_was_written_and_as_settings_have_it() -> None:
    config = {"num_layers": 2}
    assert read_lora(with_lora(config, OF_TWO)) == OF_TWO
    assert with_lora(with_lora(config, OF_TWO), None) == config
    assert read_lora(config) is None
    # Targets in any order; rank 0 is none.
    settings = LoraConfig(rank=8, alpha=16, targets=["linear_fc2", "linear_qkv"])
    assert LoraShape.from_settings(settings) == OF_TWO
    assert LoraShape.from_settings(LoraConfig()) is None
    assert OF_TWO.scale == 2.0


def test_lora_matrices_stand_beside_the_weights_that_they_fit() -> None:
    weights = {"self_attention.linear_qkv.weight": (96, 64), "mlp.linear_fc2.weight": (64, 128)}
    tensors = OF_TWO.tensors(weights)
    assert tensors == {
        "self_attention.linear_qkv.adapter.linear_in.weight": (8, 64),
        "self_attention.linear_qkv.adapter.linear_out.weight": (96, 8),
        "mlp.linear_fc2.adapter.linear_in.weight": (8, 128),
        "mlp.linear_fc2.adapter.linear_out.weight": (64, 8),
    }
    assert all(map(is_of_adapter, tensors))
    assert not any(map(is_of_adapter, weights))


# The key of model.lora, and what was got and wanted.
REFUSED = [
    ({"rank": -1}, "rank: got -1, wanted 0 or more"),
    ({"alpha": 0.0}, "alpha: got 0.0, wanted a number above 0"),
    ({"dropout": 1.0}, "dropout: got 1.0, wanted 0 or more, and less than 1"),
    ({"targets": ["q_proj"]}, "targets: got ['q_proj'], wanted at least one of"),
    ({"targets": []}, "targets: got [], wanted at least one of linear_qkv"),
    ({"targets": ["linear_qkv"] * 2}, "each once"),
]


def test_lora_settings_that_cannot_be_are_refused() -> None:
    for settings, said in REFUSED:
        with pytest.raises(SettingsError, match=re.escape(said)) as caught:
            LoraConfig(**settings)  # type: ignore[arg-type]
        assert str(caught.value).startswith("model.lora.")
    with pytest.raises(SettingsError, match=r"freeze_layers: got 1, wanted 0, as .*lora\.rank"):
        ModelConfig(lora=LoraConfig(rank=4), freeze_layers=1)


# A section of model_config.yaml, the key in it, and what was got and wanted.
DAMAGED: list[tuple[Any, str]] = [
    ("16", ": got '16', wanted rank, alpha and targets"),
    ({"rank": 8}, ": got {'rank': 8}, wanted rank, alpha and targets"),
    ({**OF_TWO.to_config(), "rank": 0}, ".rank: got 0, wanted a whole number above 0"),
    ({**OF_TWO.to_config(), "rank": True}, ".rank: got True"),
    ({**OF_TWO.to_config(), "alpha": float("nan")}, ".alpha: got nan, wanted a number"),
    ({**OF_TWO.to_config(), "targets": "linear_qkv"}, ".targets: got 'linear_qkv'"),
    ({**OF_TWO.to_config(), "targets": ["linear_qkv", "x"]}, "each once"),
    ({**OF_TWO.to_config(), "targets": [["linear_qkv"]]}, ".targets: got"),
]


def test_lora_section_that_is_damaged_is_one_clear_error() -> None:
    for section, said in DAMAGED:
        with pytest.raises(CheckpointError, match=re.escape(said)) as caught:
            read_lora({"lora": section})
        assert "model_config.yaml: lora" in str(caught.value)


def test_lora_of_another_shape_than_the_archive_s_is_refused() -> None:
    other = LoraShape(4, 16.0, ("linear_qkv",))
    check_lora(OF_TWO, OF_TWO, "rm.nemo")
    check_lora(None, OF_TWO, "rm.nemo")
    check_lora(OF_TWO, None, "rm.nemo")
    with pytest.raises(CheckpointError) as caught:
        check_lora(OF_TWO, other, "rm.nemo")
    theirs, ours = "rank 8, alpha 16, on linear_qkv, linear_fc2", "rank 4, alpha 16, on linear_qkv"
    said = str(caught.value)
    assert said.startswith("rm.nemo: ")
    assert theirs in said.split("model.lora", 1)[0]
    assert ours in said.split("model.lora", 1)[1]
