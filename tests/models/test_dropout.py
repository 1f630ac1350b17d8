"""Dropout of LoRA: the right share, another one each step, the same wherever a token lies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_aligner.batch import Group, PackedBatch, Records
from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import Recompute
from nemo_aligner.models.adapters import draw_adapters, train_adapters_alone
from nemo_aligner.models.dropout import LoraDropout
from nemo_aligner.models.reward_model import build_reward_model
from nemo_aligner.models.trainable import wrap_for_training
from tests.models.test_adapters import WITH_LORA, perturb

FIRST, SECOND = list(range(40)), [*range(25), *range(100, 120)]


def left_out(
    batch: PackedBatch, *, step: int = 0, seed: int = 1, linear: int = 0, rate: float = 0.25
) -> Tensor:
    """``[T, 64]``, which numbers of a pack are left out."""
    dropout = LoraDropout(rate, seed)
    dropout.step = step
    memory: dict[Any, Any] = {}

    def remembered(name: Any, make: Any) -> Any:
        if name not in memory:
            memory[name] = make()
        return memory[name]

    segments: Any = SimpleNamespace(remembered=remembered, last_token=batch.scored_tokens)
    dropout.begin(batch, segments)
    dropout.enter(segments)
    return dropout.apply(torch.ones(batch.num_tokens, 1, 64), linear, False, 0, 0)[:, 0] == 0


def pair(record: int, prefix: int) -> PackedBatch:
    groups = [Group(2, prefix)]
    return PackedBatch.pack([FIRST, SECOND], Records.of([record], [2]), groups=groups)


def test_so_many_are_left_out_as_asked_for() -> None:
    records = Records.of(range(50), [1] * 50)
    batch = PackedBatch.pack([[1] * 200] * 50, records)
    for rate in (0.1, 0.5):
        found = left_out(batch, rate=rate)
        assert found.float().mean().item() == pytest.approx(rate, abs=0.005)
        # Nor does a token or a channel have more of it than chance gives.
        spread = (rate * (1 - rate)) ** 0.5
        assert found.float().mean(1).std().item() == pytest.approx(spread / 64**0.5, rel=0.05)
        assert found.float().mean(0).std().item() == pytest.approx(spread / 10_000**0.5, rel=0.3)


def test_each_step_seed_and_layer_has_others() -> None:
    batch = pair(7, 0)
    same = left_out(batch)
    assert torch.equal(left_out(batch), same)
    for other in ({"step": 1}, {"seed": 2}, {"linear": 1}):
        differing = (left_out(batch, **other) != same).float().mean().item()
        assert differing == pytest.approx(2 * 0.25 * 0.75, abs=0.05)


@pytest.mark.parametrize("prefix", [0, 25])
def test_a_record_has_the_same_in_any_company(prefix: int) -> None:
    alone = left_out(pair(7, prefix))
    records, groups = Records.of([2, 7], [1, 2]), [Group(1, 0), Group(2, prefix)]
    company = PackedBatch.pack([[3] * 11, FIRST, SECOND], records, groups=groups)
    company = company.padded_to_multiple(16)
    assert torch.equal(left_out(company)[11 : 11 + len(alone)], alone)
    assert not torch.equal(left_out(pair(8, prefix)), alone)


def test_the_tokens_of_a_record_have_different_ones() -> None:
    found = left_out(pair(7, 25))
    assert len({tuple(row) for row in found.tolist()}) == len(found)


def test_ranks_that_share_tokens_or_channels_leave_out_the_same() -> None:
    dropout = LoraDropout(0.3, 5)
    dropout._keys = torch.randint(-(2**31), 2**31 - 1, (12,), dtype=torch.int32)
    x = torch.ones(12, 1, 32)
    whole = dropout.apply(x, 3, False, 0, 0)
    assert torch.equal(dropout.apply(x[:5], 3, False, 4, 0), whole[4:9])
    assert torch.equal(dropout.apply(x[:, :, :8], 3, False, 0, 16), whole[:, :, 16:24])


def gradients(layout: Any, recompute: Recompute, rate: float) -> list[Tensor]:
    model = build_reward_model(
        WITH_LORA, layout, num_attributes=1, precision=Precision.fp32, recompute=recompute
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    draw_adapters(model, 1)
    perturb(model)
    train_adapters_alone(model, LoraDropout(rate, 1) if rate else None)
    wrapped = wrap_for_training(model)
    wrapped.train()
    rewards = [wrapped(pair(record, 25)) for record in (1, 2)]
    for each in reversed(rewards):  # as a pipeline may, and recomputation has to know whose it is
        each.sum().backward()
    return [each.main_grad.clone() for each in model.parameters() if each.requires_grad]


def test_what_is_computed_again_leaves_out_the_same(layout: Any) -> None:
    wanted = gradients(layout, Recompute.none, 0.2)
    found = gradients(layout, Recompute.full, 0.2)
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    without = gradients(layout, Recompute.none, 0.0)
    assert not any(torch.allclose(*each) for each in zip(wanted, without, strict=True))
