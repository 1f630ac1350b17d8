"""Mixtures of experts: ties, the auxiliary loss, and the load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_aligner.batch.packed import PackedBatch, Records
from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo
from nemo_aligner.checkpoint.hf.families import _FAMILIES, find_family
from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained
from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import LORA_TARGETS
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models import batch_invariance, layers
from nemo_aligner.models.expert_rows import RowCounts
from nemo_aligner.models.experts import (
    _GroupedMatmul,
    collect_load,
    describe_load,
    routers,
)
from nemo_aligner.models.lora import ExpertAdapter, fold_adapters
from nemo_aligner.models.pack_context import Balance
from nemo_aligner.models.reward_model import build_reward_model
from nemo_aligner.models.router import Router
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.experts import ExpertShape
from nemo_aligner.models.shapes.lora import LoraShape
from nemo_aligner.models.step import infer
from nemo_aligner.models.training_wrap import set_routers
from nemo_aligner.utils.errors import ConfigError
from tests.harness import families, family_cases, tiny

PACK = PackedBatch.pack(families.SEQUENCES, Records.of(range(3), [2] * 3))
COUNT, TOP_K = family_cases.EXPERTS["num_experts"], family_cases.EXPERTS["num_experts_per_tok"]


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
    collect_load(model, 4, COUNT)
    router_gradients(model, 0.0)
    load = collect_load(model, 4, COUNT)
    rows = [PACK.num_tokens] * 3 + [6 + -6 % model.row_multiple(6)]
    assert load.sum(1).tolist() == [TOP_K * count for count in rows]
    assert not collect_load(model, 4, COUNT).any()
    even = describe_load(torch.tensor([[4, 4], [6, 2], [9, 0]]))
    assert even == {"expert_load_max": 1.5, "expert_load_mean_max": 1.25, "experts_unused": 0.0}
    assert describe_load(torch.tensor([[3, 0]]))["experts_unused"] == 0.5
    # Layers without experts have no load.
    assert describe_load(torch.tensor([[0, 0], [4, 4], [6, 2], [0, 0], [9, 0]])) == even
    assert describe_load(torch.tensor([[0, 0], [3, 0]]))["expert_load_max"] == 2


def test_layers_with_experts_are_those_that_megatron_has() -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

    sizes = {"num_layers": 4, "hidden_size": 16, "ffn_hidden_size": 40, "num_attention_heads": 2}
    experts = {"num_moe_experts": 4, "moe_ffn_hidden_size": 8, "moe_router_topk": 2}
    for frequency in (1, 2, 3, [0, 0, 1, 1], [1, 0, 0, 1]):
        config = TransformerConfig(**sizes, **experts, moe_layer_freq=frequency)
        specs = get_gpt_decoder_layer_specs(config, False, "RMSNorm")
        expected = [spec.submodules.mlp.module is MoELayer for spec in specs]
        shape = ModelShape.from_config(
            {**sizes, **experts, "vocab_size": 8, "max_position_embeddings": 8}
            | {"moe_layer_freq": frequency}
        )
        numbers = range(1, 5)
        assert [shape.of_layer(number).experts is not None for number in numbers] == expected
        assert shape.is_uniform == all(expected)
    # Tensor parallelism has to divide the MLP of dense layers, too.
    shape = replace(shape, ffn_hidden_size=41)
    with pytest.raises(ConfigError, match="a divisor of the model's 41 ffn channels"):
        shape.check_fits(2, 1)
    replace(shape, moe_layer_freq=None).check_fits(2, 1)


def test_expert_of_equal_ones_is_the_first(model: Any) -> None:
    router = routers(model)[1]
    same = router.weight.detach().clone()
    router.weight.data.copy_(same[:1].expand_as(same))
    chosen, weights = router(torch.randn(5, same.size(1)), None, Balance())
    router.weight.data.copy_(same)
    assert chosen.tolist() == [list(range(TOP_K))] * 5
    torch.testing.assert_close(weights, torch.full((5, TOP_K), 1 / TOP_K))


GROUPS = {"num_groups": 4, "group_topk": 2, "scaling_factor": 2.5}
SIGMOID = {"score_function": "sigmoid", "expert_bias": True}


def router_of(**kinds: Any) -> Router:
    """A router of 3 of 12 experts with random weights, in training."""
    config: Any = SimpleNamespace(
        sequence_parallel=False, params_dtype=torch.float32, hidden_size=64
    )
    torch.manual_seed(0)
    router = Router(config, ExpertShape(12, TOP_K, 8, **kinds))
    torch.nn.init.normal_(router.weight, std=0.2)
    if router.expert_bias is not None:
        router.expert_bias.normal_(std=0.2)
    return router


@pytest.mark.parametrize("name", ["sigmoid", "sigmoid in groups", "not renormalized", "softmax"])
def test_router_chooses_and_weighs_as_that_of_transformers(name: str, layout: Any) -> None:
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

    kinds: dict[str, Any] = {"renormalized": name != "not renormalized", **SIGMOID, **GROUPS}
    if name == "sigmoid":
        kinds |= {"num_groups": 1, "group_topk": 1}
    if name == "softmax":
        kinds = {"renormalized": False, **GROUPS}
    router = router_of(**kinds)
    config: Any = SimpleNamespace(
        num_experts_per_tok=TOP_K,
        num_local_experts=12,
        num_experts=12,
        hidden_size=64,
        routed_scaling_factor=2.5,
        n_group=kinds["num_groups"],
        topk_group=kinds["group_topk"],
        norm_topk_prob=kinds["renormalized"],
        topk_method="group_limited_greedy",
    )
    theirs = (DeepseekV2TopkRouter if name == "softmax" else Glm4MoeTopkRouter)(config)
    theirs.weight.data.copy_(router.weight)
    if name != "softmax":
        theirs.e_score_correction_bias.copy_(router.expert_bias)
    router.eval()
    tokens = torch.randn(300, 64)
    chosen, weights = router(tokens, None)
    _, their_weights, their_chosen = theirs(tokens)
    order = chosen.sort().indices, their_chosen.sort().indices
    assert torch.equal(chosen.gather(1, order[0]), their_chosen.gather(1, order[1]))
    expected = their_weights.gather(1, order[1])
    torch.testing.assert_close(weights.gather(1, order[0]), expected, rtol=2e-6, atol=1e-7)
    # Bit-identical for any number of tokens, with matmuls of a fixed number of rows.
    every, scores = router(tokens, 16)
    for count in (1, 7, 33):
        rows = router(tokens[:count], 16)
        assert torch.equal(rows[0], every[:count])
        assert torch.equal(rows[1], scores[:count])


def test_lower_number_wins_between_equal_groups_and_experts(layout: Any) -> None:
    router = router_of(renormalized=True, **SIGMOID, **GROUPS).eval()
    router.weight.data.copy_(router.weight[:1].expand_as(router.weight).clone())
    router.expert_bias.zero_()
    chosen, weights = router(torch.randn(5, 64), None)
    assert chosen.tolist() == [[0, 1, 2]] * 5
    torch.testing.assert_close(weights, torch.full((5, TOP_K), 2.5 / TOP_K))
    # Two good experts of the last group count for more than the best one.
    router.expert_bias.copy_(torch.tensor([0.5, 0, 0, 0, 0, 0, 0, 0, 0, 0.4, 0.3, 0.2]))
    assert router(torch.randn(1, 64), None)[0].tolist() == [[0, 9, 10]]
    router.expert_bias.copy_(torch.tensor([0.5, 0, 0, 0.1, 0.1, 0.45, 0.2, 0.36, 0, 0.4, 0.3, 0.2]))
    assert router(torch.randn(1, 64), None)[0].tolist() == [[9, 7, 10]]


def test_auxiliary_loss_of_sigmoid_scores_has_megatrons_gradient(layout: Any) -> None:
    from megatron.core.transformer.moe.moe_utils import (
        compute_routing_scores_for_aux_loss,
        switch_load_balancing_loss_func,
    )

    router = router_of(renormalized=True, **SIGMOID, **GROUPS)
    router.aux_loss_coeff = 0.5
    tokens, counted = torch.randn(20, 64), 17  # the last rows are filler
    chosen, weights = router(tokens, None, Balance(tokens=counted, records=4))
    (weights * 0).sum().backward()
    weight = router.weight.detach().clone().requires_grad_()
    logits = tokens[:counted] @ weight.t()
    choices, scores = compute_routing_scores_for_aux_loss(logits, TOP_K, "sigmoid")
    loss = switch_load_balancing_loss_func(scores, choices.sum(0), counted, TOP_K, 12, 0.5)
    (4 * loss).backward()
    assert weight.grad.abs().max() > 1e-4
    torch.testing.assert_close(router.weight.grad, weight.grad, rtol=1e-4, atol=1e-7)
    # The load counts what was chosen, by bias and groups.
    counts = torch.zeros(12, dtype=torch.int64)
    counts.scatter_add_(0, chosen[:counted].flatten(), torch.ones(counted * TOP_K).long())
    assert torch.equal(router.load, counts)


@pytest.mark.parametrize("counts", [[2, 0, 6, 1], [0, 0, 0, 0]])
def test_grouped_products_are_those_of_expert_by_expert(
    counts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch's kernel for all experts, of which one has no rows; on a CPU it is only slower.

    On CUDA the kernel takes no sum over no rows, as where a rank's experts were not chosen.
    """
    grouped_mm = torch.nn.functional.grouped_mm

    def as_on_cuda(rows: Tensor, matrices: Tensor, offs: Tensor) -> Tensor:
        assert rows.size(-1) > 0
        return grouped_mm(rows, matrices, offs=offs)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", as_on_cuda)
    rows, weight = torch.randn(sum(counts), 16), torch.randn(4, 2, 12, 16)
    found = []
    for is_grouped in (False, True):
        if is_grouped:
            monkeypatch.setattr(
                RowCounts,
                "group_ends",
                lambda self, *unused: self.per_expert.cumsum(0).to(torch.int32),
            )
        given, matrices = (each.detach().clone().requires_grad_() for each in (rows, weight))
        product = _GroupedMatmul.apply(given, matrices, RowCounts(torch.tensor(counts)))
        (product**2).sum().backward()
        found.append([product, given.grad, matrices.grad])
    for plain, grouped in zip(*found, strict=True):
        torch.testing.assert_close(grouped, plain)
    assert not found[0][2][1].any()


@pytest.mark.parametrize(
    ("case", "layers"),
    [
        ("qwen2_moe", 4),
        ("glm4_moe", 2),
        ("qwen3_next", 3),
        ("gpt_oss", 4),
        ("nemotron_h_moe", 1),
        ("gemma4_moe", 4),
    ],
)
def test_adapters_of_experts_score_as_the_weights_that_they_are_folded_into(
    case: str, layers: int, layout: ParallelLayout, tmp_path: Path
) -> None:
    path = families.write_base_nemo(tmp_path / "base.nemo", case)
    lora = LoraShape(4, 8.0, LORA_TARGETS)
    kinds = {"num_attributes": 1, "precision": Precision.fp32, "lora": lora}
    model: Any = load_pretrained(path, layout, **kinds).model
    plain = infer(model, [PACK], layout)
    adapted = [each for each in model.modules() if isinstance(each, ExpertAdapter)]
    assert len(adapted) == 2 * layers
    with torch.no_grad():
        for each in adapted:
            assert each.linear_in.weight.std() > 0
            each.linear_out.weight.normal_(std=0.1)
    found = infer(model, [PACK], layout)
    assert (found - plain).abs().max() > 0.01
    fold_adapters(model)
    torch.testing.assert_close(infer(model, [PACK], layout), found, rtol=1e-4, atol=1e-5)


KEPT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "ernie4_5_moe_unshared", "nemotron_h_moe")


@pytest.mark.parametrize("case", [*KEPT, "qwen3_moe", "mixtral"])
def test_router_in_bf16_has_the_bits_that_transformers_reads(
    case: str, layout: ParallelLayout, tmp_path: Path
) -> None:
    """transformers keeps some routers in fp32, and rounds the others."""
    from transformers import AutoModelForCausalLM

    families.write_hf_checkpoint(tmp_path / "hf", case)
    convert_hf_to_nemo(tmp_path / "hf", tmp_path / "base.nemo", torch.bfloat16)
    kinds = {"num_attributes": 1, "precision": Precision.bf16}
    model: Any = load_pretrained(tmp_path / "base.nemo", layout, **kinds).model
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16)
    for number, router in routers(model).items():
        layer = theirs.model.layers[number - 1]
        gate = (layer.mixer if case == "nemotron_h_moe" else layer.mlp).gate.weight
        assert gate.dtype is (torch.float32 if case in KEPT else torch.bfloat16)
        assert router.weight.dtype is gate.dtype
        assert torch.equal(router.weight, gate)
        is_rounded = torch.equal(router.weight, router.weight.bfloat16().float())
        assert is_rounded != (case in KEPT)


def test_router_of_an_older_archive_in_16_bits_is_read_in_fp32(
    layout: ParallelLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, key = "glm4_moe", "mlp.router.weight"
    family = find_family(name)
    rules = [replace(rule, dtype=None) if rule.megatron == key else rule for rule in family.layer]
    monkeypatch.setitem(_FAMILIES, name, replace(family, layer=tuple(rules)))
    families.write_hf_checkpoint(tmp_path / "hf", name)
    convert_hf_to_nemo(tmp_path / "hf", tmp_path / "old.nemo", torch.bfloat16)
    with open_nemo(tmp_path / "old.nemo") as folder:
        stored = folder.store.read(f"model.decoder.layers.3.{key}")
    assert stored.dtype is torch.bfloat16
    kinds = {"num_attributes": 1, "precision": Precision.bf16}
    model: Any = load_pretrained(tmp_path / "old.nemo", layout, **kinds).model
    weight = routers(model)[4].weight
    assert weight.dtype is torch.float32
    assert torch.equal(weight, stored.float())


def test_trials_on_a_gpu_are_of_the_matmuls_that_scoring_makes(
    layout: ParallelLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bias of an output projection is added to the ranks' sum, not by the matmul."""
    config = {
        **tiny.SMALLEST,
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "moe_shared_expert_gate": True,
        "qkv_bias": True,
        "proj_bias": True,
    }
    shape, kind = ModelShape.from_config(config), {"precision": Precision.fp32}
    model = build_reward_model(shape, layout, num_attributes=1, **kind).eval()
    tried, multiplied = set(), set()

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
        multiplied.add((tuple(weight.shape), bias is None))
        return F.linear(x, weight, bias)

    def try_sizes(weight: Tensor, bias: Tensor | None, rows: int) -> tuple[int, ...]:
        tried.add((tuple(weight.shape), bias is None))
        return (rows,)

    monkeypatch.setattr(batch_invariance.gpu_matmuls, "chunk_sizes", try_sizes)
    batch_invariance._try_on_gpu(model, 64)
    batch_invariance.make_batch_invariant(model, 64)
    monkeypatch.setattr(layers, "invariant_linear_on_cpu", multiply)
    infer(model, [PackedBatch.pack([[3, 4, 5]])], layout)
    assert multiplied
    assert multiplied <= tried
    assert ((1, shape.hidden_size), True) in tried  # the gate of the shared expert
