"""Mixtures of experts: ties, the auxiliary loss, and the load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_aligner.batch.packed import PackedBatch, Records
from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained
from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import LORA_TARGETS
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.expert_rows import RowCounts
from nemo_aligner.models.experts import (
    _Products,
    describe_load,
    routers,
    take_load,
)
from nemo_aligner.models.lora import ExpertAdapter, fold_adapters
from nemo_aligner.models.pack_context import Balance
from nemo_aligner.models.shapes.lora import LoraShape
from nemo_aligner.models.step import infer
from nemo_aligner.models.training_wrap import set_routers
from tests.harness import families

PACK = PackedBatch.pack(families.SEQUENCES, Records.of(range(3), [2] * 3))
COUNT, TOP_K = families.EXPERTS["num_experts"], families.EXPERTS["num_experts_per_tok"]


@pytest.fixture(scope="module")
def model(layout: ParallelLayout, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("experts") / "base.nemo"
    families.write_base_nemo(path, "qwen3_moe")
    return load_pretrained(path, layout, num_attributes=1, precision=Precision.fp32).model


def router_gradients(model: Any, coeff: float) -> dict[int, Tensor]:
    """Of a step on PACK, with rewards that no loss asks for."""
    model.train()
    model.config.gradient_accumulation_fusion = False
    set_routers(model, trained=True, aux_loss_coeff=coeff)
    for parameter in model.parameters():
        parameter.grad = None
        parameter.main_grad = torch.zeros(parameter.shape)
    (model(PACK) * 0).sum().backward()
    return {number: router.weight.grad.clone() for number, router in routers(model).items()}


def test_auxiliary_loss_has_the_gradient_of_the_written_out_one(model: Any) -> None:
    """Of its pack, once for each of its records; and none where it is off."""
    seen: dict[int, Tensor] = {}
    hooks = [
        router.register_forward_pre_hook(
            lambda module, given, number=number: seen.update({number: given[0].detach()})
        )
        for number, router in routers(model).items()
    ]
    assert all(not grad.any() for grad in router_gradients(model, 0.0).values())
    found = router_gradients(model, 0.5)
    for hook in hooks:
        hook.remove()
    # The first layer's tokens depend on no router.
    weight = routers(model)[1].weight.detach().requires_grad_()
    shares = (seen[1] @ weight.t()).softmax(-1)
    chosen = torch.zeros_like(shares).scatter_(1, shares.topk(TOP_K).indices, 1.0)
    wanted = 0.5 * 3 * COUNT * (chosen.mean(0) / TOP_K * shares.mean(0)).sum()
    wanted.backward()
    # The losses of later layers reach it by its experts' outputs; theirs are taken off.
    set_routers(model, trained=True, aux_loss_coeff=0.0)
    routers(model)[1].aux_loss_coeff = 0.5
    for parameter in model.parameters():
        parameter.grad = None
    (model(PACK) * 0).sum().backward()
    grad = routers(model)[1].weight.grad
    torch.testing.assert_close(grad, weight.grad, rtol=1e-4, atol=1e-7)
    assert not torch.equal(found[1], grad)


def test_load_counts_every_choice_once(model: Any) -> None:
    take_load(model, 4)
    router_gradients(model, 0.0)
    load = take_load(model, 4)
    rows = [PACK.num_tokens] * 3 + [6 + -6 % model.row_multiple(6)]
    assert load.sum(1).tolist() == [TOP_K * count for count in rows]
    assert not take_load(model, 4).any()
    even = describe_load(torch.tensor([[4, 4], [6, 2], [9, 0]]))
    assert even == {"expert_load_max": 1.5, "expert_load_mean_max": 1.25, "experts_unused": 0.0}
    assert describe_load(torch.tensor([[3, 0]]))["experts_unused"] == 0.5


def test_expert_of_equal_ones_is_the_first(model: Any) -> None:
    router = routers(model)[1]
    same = router.weight.detach().clone()
    router.weight.data.copy_(same[:1].expand_as(same))
    chosen, weights = router(torch.randn(5, same.size(1)), None, Balance())
    router.weight.data.copy_(same)
    assert chosen.tolist() == [list(range(TOP_K))] * 5
    torch.testing.assert_close(weights, torch.full((5, TOP_K), 1 / TOP_K))


def test_grouped_products_are_those_of_expert_by_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's kernel for all experts, of which one has no rows; on a CPU it is only slower."""
    rows, weight = torch.randn(9, 16), torch.randn(4, 2, 12, 16)
    found = []
    for is_grouped in (False, True):
        if is_grouped:
            monkeypatch.setattr(
                RowCounts,
                "group_ends",
                lambda self, *unused: self.per_expert.cumsum(0).to(torch.int32),
            )
        given, matrices = (each.detach().clone().requires_grad_() for each in (rows, weight))
        product = _Products.apply(given, matrices, RowCounts(torch.tensor([2, 0, 6, 1])))
        (product**2).sum().backward()
        found.append([product, given.grad, matrices.grad])
    for plain, grouped in zip(*found, strict=True):
        torch.testing.assert_close(grouped, plain)
    assert not found[0][2][1].any()


@pytest.mark.parametrize("case", ["qwen2_moe", "gpt_oss"])
def test_adapters_of_experts_score_as_the_weights_that_they_are_folded_into(
    case: str, layout: ParallelLayout, tmp_path: Path
) -> None:
    path = families.write_base_nemo(tmp_path / "base.nemo", case)
    lora = LoraShape(4, 8.0, LORA_TARGETS)
    kinds = {"num_attributes": 1, "precision": Precision.fp32, "lora": lora}
    model: Any = load_pretrained(path, layout, **kinds).model
    plain = infer(model, [PACK], layout)
    adapted = [each for each in model.modules() if isinstance(each, ExpertAdapter)]
    assert len(adapted) == 2 * 4
    with torch.no_grad():
        for each in adapted:
            assert each.linear_in.weight.std() > 0
            each.linear_out.weight.normal_(std=0.1)
    found = infer(model, [PACK], layout)
    assert (found - plain).abs().max() > 0.01
    fold_adapters(model)
    torch.testing.assert_close(infer(model, [PACK], layout), found, rtol=1e-4, atol=1e-5)
