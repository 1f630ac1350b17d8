"""The reward model in one process: packs, parts, freezing and recomputation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.parallel_state import RankGenerator

from nemo_aligner.batch.packed import Group, PackedBatch, Records
from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained
from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import Recompute
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.reward_model import GPTRewardModel
from nemo_aligner.models.step import count_parts, forward_backward, infer, infer_in_parts
from nemo_aligner.models.training_wrap import freeze_lower_layers, wrap_for_training
from nemo_aligner.utils.errors import ConfigError
from tests.harness import tiny

SEQUENCES = [list(range(3, 3 + length)) for length in (5, 40, 1, 17)]


def load(
    path: Path,
    layout: ParallelLayout,
    recompute: Recompute = Recompute.none,
    recompute_layers: int | None = None,
) -> Any:
    how = {"recompute": recompute, "recompute_layers": recompute_layers}
    return load_pretrained(path, layout, num_attributes=2, precision=Precision.fp32, **how)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_base_nemo(tmp_path_factory.mktemp("base") / "base.nemo")


@pytest.fixture(scope="module")
def model(base: Path, layout: ParallelLayout) -> Any:
    """For tests that leave it as it is."""
    return load(base, layout).model


def test_rewards_in_parts_are_those_of_the_whole(model: Any, layout: ParallelLayout) -> None:
    batches = [PackedBatch.pack([ids]) for ids in SEQUENCES]
    wanted = infer(model, batches, layout)
    for parts in (1, 2, len(batches), len(batches) + 3):
        shares: list[float] = []
        found = infer_in_parts(model, batches, layout, parts, shares.append)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        assert shares == [(part + 1) / parts for part in range(parts)]
    assert infer_in_parts(model, [], layout, 3, shares.append) is None
    assert shares[-1] == 1.0


def test_ranks_of_all_context_and_expert_groups_agree_on_the_number_of_packs(
    model: Any, layout: ParallelLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With CP=2 and EP=3 groups of both kinds form a chain over three data parallel ranks."""
    ranks = RankGenerator(tp=1, ep=1, dp=3, pp=1, cp=2, order="tp-cp-ep-dp-pp")
    experts = RankGenerator(tp=1, ep=3, dp=2, pp=1, cp=1, order="tp-cp-ep-dp-pp")
    assert ranks.get_ranks("cp") == [[0, 1], [2, 3], [4, 5]]
    assert experts.get_ranks("ep") == [[0, 1, 2], [3, 4, 5]]
    assert ranks.get_ranks("dp-cp") == [[0, 1, 2, 3, 4, 5]]

    asked = []

    def all_reduce(count: torch.Tensor, operation: Any, group: Any) -> None:
        asked.append((operation, group))
        count += 1

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    rewards = infer(model, [PackedBatch.pack(SEQUENCES)], replace(layout, ep=3))
    of_all = parallel_state.get_data_parallel_group(with_context_parallel=True)
    assert asked == [(torch.distributed.ReduceOp.MAX, of_all)]
    assert rewards is not None
    assert len(rewards) == len(SEQUENCES)


def test_parts_are_so_few_that_a_pipeline_is_seldom_empty() -> None:
    wanted = {
        (100, ""): 1,
        (4000, ""): 4,
        (1_000_000, ""): 50,
        (40_000, "dp4"): 10,
        (100_000, "pp2"): 6,
        (100_000, "pp8"): 1,
    }
    found = {}
    for tokens, size in wanted:
        sizes: Any = {size[:2]: int(size[2])} if size else {}
        layout = ParallelLayout(tp_rank=0, pp_rank=0, dp_rank=0, **sizes)
        found[tokens, size] = count_parts(tokens, 1000, layout)
    assert found == wanted


SHARING = [[*range(3, 43), *range(60, 60 + length)] for length in (5, 1, 12)]
GROUPS = [Group(1, 0), Group(3, 40)]


def test_prefix_computed_once_and_padding_change_no_reward(
    model: Any, layout: ParallelLayout
) -> None:
    sequences = [SEQUENCES[3], *SHARING]
    once, apart = PackedBatch.pack(sequences, groups=GROUPS), PackedBatch.pack(sequences)
    assert once.num_tokens == 17 + 40 + 5 + 1 + 12
    wanted = infer(model, [apart], layout)
    for batch in (once, once.padded_to_multiple(8), apart.padded_to_multiple(8)):
        torch.testing.assert_close(infer(model, [batch], layout), wanted, atol=1e-6, rtol=1e-5)


def test_prefix_computed_once_changes_no_gradient(base: Path, layout: ParallelLayout) -> None:
    sequences = [SEQUENCES[3], *SHARING]
    wanted = gradients(base, layout, 0, Recompute.none, PackedBatch.pack(sequences))
    once = PackedBatch.pack(sequences, groups=GROUPS)
    for recompute in Recompute:
        for name, gradient in gradients(base, layout, 0, recompute, once).items():
            scale = float(wanted[name].abs().max())
            torch.testing.assert_close(gradient, wanted[name], atol=1e-5 * scale, rtol=1e-4)


def gradients(
    base: Path,
    layout: ParallelLayout,
    frozen: int,
    recompute: Recompute,
    batch: PackedBatch | None = None,
) -> dict[str, torch.Tensor]:
    model = load(base, layout, recompute).model
    freeze_lower_layers(model, frozen, 4)
    wrapped = wrap_for_training(model)
    wrapped.train()

    def loss(rewards: torch.Tensor, records: Records) -> tuple[torch.Tensor, torch.Tensor]:
        return rewards.square().sum(), torch.tensor(rewards.size(0))

    batch = batch or PackedBatch.pack(SEQUENCES)
    forward_backward(wrapped, [batch], layout, loss)
    return {
        name: parameter.main_grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def test_freezing_keeps_the_upper_gradients_at_any_recompute(
    base: Path, layout: ParallelLayout
) -> None:
    whole = gradients(base, layout, 0, Recompute.none)
    assert all(gradient.abs().max() > 0 for gradient in whole.values())
    for recompute in Recompute:
        upper = gradients(base, layout, 3, recompute)
        assert set(upper) < set(whole)
        assert not [name for name in upper if name.startswith(("embedding", "decoder.layers.2"))]
        for name, gradient in upper.items():
            torch.testing.assert_close(gradient, whole[name], atol=1e-6, rtol=1e-5)
    with pytest.raises(ConfigError, match=r"model\.freeze_layers: got 4, wanted less than 4"):
        freeze_lower_layers(load(base, layout).model, 4, 4)


def filled_up(count: int) -> int:
    """To whole vectors, as packs are in evaluation mode."""
    return count + -count % 8


def test_last_layer_computes_only_the_heads_rows(base: Path, layout: ParallelLayout) -> None:
    model = load(base, layout).model
    seen: list[int] = []
    for layer in model.decoder.layers:
        first = layer.mlp.linear_fc1
        first.infer = lambda x, infer=first.infer: seen.append(x.size(0)) or infer(x)
    infer(model, [PackedBatch.pack(SEQUENCES)], layout)
    tokens, scored = (filled_up(count) for count in (sum(map(len, SEQUENCES)), len(SEQUENCES)))
    assert tokens > scored
    assert seen == [tokens] * (len(seen) - 1) + [scored]
    assert len(seen) > 1


def test_recomputed_layers_keep_nothing_but_their_input(base: Path, layout: ParallelLayout) -> None:
    """Floats kept for the backward shrink with every layer that is recomputed."""
    kept = []
    for layers in (None, 1, 2):
        recompute = Recompute.none if layers is None else Recompute.full
        model = wrap_for_training(load(base, layout, recompute, layers).model)
        model.train()
        kept.append(kept_for_backward(model, PackedBatch.pack(SEQUENCES)))
    assert kept[0] > kept[1] > kept[2]

    with pytest.raises(ConfigError, match="num_layers: got 9, wanted at most 4"):
        load(base, layout, Recompute.full, 9)


def test_frozen_layers_run_once_and_keep_nothing_where_others_are_recomputed(
    base: Path, layout: ParallelLayout
) -> None:
    """The recomputed layers are counted from the first one that is trained."""
    kept = []
    for layers in (None, 1, 2):
        recompute = Recompute.none if layers is None else Recompute.full
        model = load(base, layout, recompute, layers).model
        freeze_lower_layers(model, 2, 4)
        wrapped = wrap_for_training(model)
        wrapped.train()
        kept.append(kept_for_backward(wrapped, PackedBatch.pack(SEQUENCES)))
    assert kept[0] > kept[1] > kept[2]

    passes = []
    for layer in model.decoder.layers:
        norm = layer.input_layernorm
        norm.register_forward_pre_hook(lambda *_, n=layer.layer_number: passes.append(n))
    wrapped(PackedBatch.pack(SEQUENCES)).sum().backward()
    assert passes == [1, 2, 3, 4, 4, 3]


def kept_for_backward(model: torch.nn.Module, batch: PackedBatch) -> int:
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(batch)
    for parameter in model.parameters():
        storages.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def test_stream_in_fp32_brings_rewards_nearer_to_those_in_fp32(
    layout: ParallelLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model of many layers, whose weights are numbers of bf16 all the same."""
    path = tiny.write_base_nemo(tmp_path / "deep.nemo", num_hidden_layers=32)
    generator = torch.Generator().manual_seed(0)
    pack = PackedBatch.pack(torch.randint(3, 300, (64, 20), generator=generator).tolist())
    rounded, exact = (
        load_pretrained(path, layout, num_attributes=2, precision=precision).model
        for precision in (Precision.bf16, Precision.fp32)
    )
    with torch.no_grad():
        for ours, theirs in zip(exact.parameters(), rounded.parameters(), strict=True):
            ours.copy_(theirs)
    wanted, found = (infer(model, [pack], layout) for model in (exact, rounded))
    monkeypatch.setattr(GPTRewardModel, "stream_dtype", torch.bfloat16)
    before = infer(rounded, [pack], layout)
    assert (found - wanted).abs().mean() < 0.8 * (before - wanted).abs().mean()
