"""The reward model against transformers, and its head, packing and freezing, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_aligner.batch import Group, PackedBatch, Records
from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import Recompute
from nemo_aligner.errors import ConfigError
from nemo_aligner.parallel.layout import ParallelLayout
from tests import tiny

SEQUENCES = [list(range(3, 3 + length)) for length in (5, 40, 1, 17)]


def load(
    path: Path,
    layout: ParallelLayout,
    recompute: Recompute = Recompute.none,
    recompute_layers: int | None = None,
) -> Any:
    from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained

    return load_pretrained(
        path,
        layout,
        num_attributes=2,
        precision=Precision.fp32,
        recompute=recompute,
        recompute_layers=recompute_layers,
    )


def test_reward_is_the_head_on_transformers_last_hidden_state(
    layout: ParallelLayout, tmp_path: Path
) -> None:
    """Where nothing is grouped, tied or as wide as usual: what no case of ``families`` has."""
    from transformers import LlamaForCausalLM

    from nemo_aligner.models.step import infer

    changes = {
        "tie_word_embeddings": False,
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "head_dim": 32,
    }
    pretrained = load(tiny.write_base_nemo(tmp_path / "base.nemo", **changes), layout)
    assert pretrained.head_is_new
    rewards = infer(pretrained.model, [PackedBatch.pack(SEQUENCES)], layout)

    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "base.hf").eval()
    with torch.no_grad():
        states = [theirs.model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in SEQUENCES]
    wanted = torch.stack(states) @ pretrained.model.rm_head.weight.T
    assert rewards.dtype == pretrained.model.rm_head.weight.dtype == torch.float32
    torch.testing.assert_close(rewards, wanted, atol=1e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_base_nemo(tmp_path_factory.mktemp("base") / "base.nemo")


@pytest.fixture(scope="module")
def model(base: Path, layout: ParallelLayout) -> Any:
    """For tests that leave it as it is."""
    return load(base, layout).model


def test_rewards_in_parts_are_those_of_the_whole(model: Any, layout: ParallelLayout) -> None:
    from nemo_aligner.models.step import infer, infer_in_parts

    batches = [PackedBatch.pack([ids]) for ids in SEQUENCES]
    wanted = infer(model, batches, layout)
    for parts in (1, 2, len(batches), len(batches) + 3):
        shares: list[float] = []
        found = infer_in_parts(model, batches, layout, parts, shares.append)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        assert shares == [(part + 1) / parts for part in range(parts)]
    assert infer_in_parts(model, [], layout, 3, shares.append) is None
    assert shares[-1] == 1.0


def test_parts_are_so_few_that_a_pipeline_is_seldom_empty() -> None:
    from nemo_aligner.models.step import count_parts

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
    from nemo_aligner.models.step import infer

    sequences = [SEQUENCES[3], *SHARING]
    once, apart = PackedBatch.pack(sequences, groups=GROUPS), PackedBatch.pack(sequences)
    assert once.num_tokens == 17 + 40 + 5 + 1 + 12
    wanted = infer(model, [apart], layout)
    for batch in (once, once.padded_to_multiple(8), apart.padded_to_multiple(8)):
        torch.testing.assert_close(infer(model, [batch], layout), wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("recompute", Recompute)
def test_prefix_computed_once_changes_no_gradient(
    base: Path, layout: ParallelLayout, recompute: Recompute
) -> None:
    sequences = [SEQUENCES[3], *SHARING]
    once = PackedBatch.pack(sequences, groups=GROUPS)
    apart = PackedBatch.pack(sequences)
    got = gradients(base, layout, 0, recompute, once)
    wanted = gradients(base, layout, 0, recompute, apart)
    for name, gradient in got.items():
        scale = float(wanted[name].abs().max())
        torch.testing.assert_close(gradient, wanted[name], atol=1e-5 * scale, rtol=1e-4)


def gradients(
    base: Path,
    layout: ParallelLayout,
    frozen: int,
    recompute: Recompute,
    batch: PackedBatch | None = None,
) -> dict[str, torch.Tensor]:
    from nemo_aligner.models.step import forward_backward
    from nemo_aligner.models.trainable import freeze_lower_layers, wrap_for_training

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
    from nemo_aligner.models.trainable import freeze_lower_layers

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


def test_embedding_smaller_than_the_vocabulary_is_refused(
    base: Path, layout: ParallelLayout, tmp_path: Path
) -> None:
    from nemo_aligner.checkpoint.nemo.open import open_nemo
    from nemo_aligner.checkpoint.nemo.write import write_nemo
    from nemo_aligner.errors import CheckpointError

    with open_nemo(base) as folder:
        config = {**folder.config, "vocab_size": 5000}
        write_nemo(tmp_path / "larger.nemo", config, folder.weights, folder.tokenizer)
    with pytest.raises(CheckpointError, match=r"want at least \[5000, 64\]"):
        load(tmp_path / "larger.nemo", layout)


def filled_up(count: int) -> int:
    """To whole vectors, as packs are in evaluation mode."""
    return count + -count % 32


def test_last_layer_computes_only_the_heads_rows(base: Path, layout: ParallelLayout) -> None:
    from nemo_aligner.models.step import infer

    model = load(base, layout).model
    seen: list[int] = []
    for layer in model.decoder.layers:
        layer.mlp.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].size(0)))
    infer(model, [PackedBatch.pack(SEQUENCES)], layout)
    tokens, scored = (filled_up(count) for count in (sum(map(len, SEQUENCES)), len(SEQUENCES)))
    assert tokens > scored
    assert seen == [tokens] * (len(seen) - 1) + [scored]
    assert len(seen) > 1


def test_recomputed_layers_keep_nothing_but_their_input(base: Path, layout: ParallelLayout) -> None:
    """Floats kept for the backward shrink with every layer that is recomputed."""
    from nemo_aligner.models.trainable import wrap_for_training

    kept = []
    for layers in (None, 1, 2):
        recompute = Recompute.none if layers is None else Recompute.full
        model = wrap_for_training(load(base, layout, recompute, layers).model)
        model.train()
        kept.append(kept_for_backward(model, PackedBatch.pack(SEQUENCES)))
    assert kept[0] > kept[1] > kept[2]

    with pytest.raises(ConfigError, match="num_layers: got 9, wanted at most 4"):
        load(base, layout, Recompute.full, 9)


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
