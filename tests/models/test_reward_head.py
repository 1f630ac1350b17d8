"""Reward heads with a bias, of two layers: their numbers, their bits, and what reads them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_aligner.batch.packed import PackedBatch
from nemo_aligner.checkpoint.merge import merge_checkpoints
from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.checkpoint.nemo.reward_model import (
    load_pretrained,
    load_reward_model,
    save_reward_model,
)
from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import LORA_TARGETS, HeadConfig
from nemo_aligner.contract.scorer import score_all
from nemo_aligner.models.reward_head import RewardHead
from nemo_aligner.models.reward_model import build_reward_model
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.head import HeadShape, read_head_shape, with_head_shape
from nemo_aligner.models.shapes.lora import LoraShape
from nemo_aligner.planning.cost import Packs, Plan, head_size
from nemo_aligner.serving.engine.scorer import load_scorer
from nemo_aligner.utils.errors import CheckpointError
from tests.harness import tiny
from tests.harness.once import Once

TWO_LAYERS = HeadShape(bias=True, mlp_size=24)
TEXTS = ["the cat sings", "why", "no stone is where the bird sleeps", "yes please thank you"] * 3


# Before there is a layout: it is made in one of its own.
@pytest.fixture(scope="module", autouse=True)
def archive(once: Once) -> Path:
    """A reward model of two attributes whose head has two layers and biases that are not 0."""

    def build(folder: Path) -> None:
        from nemo_aligner.distributed.launch import launch
        from nemo_aligner.distributed.layout import destroy_layout, initialize_layout

        tiny.write_reward_nemo(folder / "linear.nemo")
        with launch():
            layout = initialize_layout()
            plain = load_reward_model(folder / "linear.nemo", layout)
            loaded = load_pretrained(
                folder / "linear.nemo",
                layout,
                num_attributes=2,
                precision=Precision.fp32,
                new_head=True,
                head=HeadConfig(bias=True, mlp_size=24),
            )
            for parameter in loaded.model.rm_head.parameters():
                torch.nn.init.normal_(parameter, std=0.2)
            save_reward_model(
                folder / "rm.nemo",
                loaded.model,
                loaded.config,
                loaded.tokenizer,
                plain.contract,
            )
            destroy_layout()

    return once("two_layers", build) / "rm.nemo"


@pytest.mark.usefixtures("layout")
def test_head_of_two_layers_is_a_product_a_relu_and_a_product() -> None:
    head = RewardHead(8, 3, seed=1, shape=HeadShape(bias=True, mlp_size=5))
    assert head.hidden is not None
    for name, parameter in head.named_parameters():
        if "bias" in name:
            assert not parameter.any()
            torch.nn.init.normal_(parameter)
    hidden = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    first = (hidden @ head.hidden.weight.T + head.hidden.bias).clamp(min=0)
    torch.testing.assert_close(head(hidden), first @ head.weight.T + head.bias)
    sizes = {name: tuple(each.shape) for name, each in head.named_parameters()}
    assert sizes == HeadShape(bias=True, mlp_size=5).tensors(3, 8)
    wide = RewardHead(800, 1, 1, TWO_LAYERS).hidden
    assert wide is not None
    assert float(wide.weight.detach().std()) == pytest.approx(0.05, rel=0.05)

    # A bias leaves the matrix that a seed gives.
    plain, biased = RewardHead(8, 3, 7), RewardHead(8, 3, 7, HeadShape(bias=True))
    assert torch.equal(plain.weight, biased.weight)
    assert [name for name, _ in plain.named_parameters()] == ["weight"]


def test_head_is_kept_in_an_archive_and_a_reward_has_the_same_bits_alone(
    archive: Path, layout: Any
) -> None:
    scorer = load_scorer(archive, layout)
    together = score_all(scorer, TEXTS)
    assert (
        together.tobytes()
        == np.concatenate([score_all(scorer, [text]) for text in TEXTS]).tobytes()
    )
    plain = score_all(load_scorer(archive.with_name("linear.nemo"), layout), TEXTS)
    assert float(np.abs(together - plain).min()) > 1e-3
    again = load_pretrained(archive, layout, num_attributes=2, precision=Precision.fp32)
    assert not again.head_is_new
    with open_nemo(archive) as folder:
        wanted = folder.store.read("model.rm_head.hidden.bias")
        assert ModelShape.from_config(folder.config).head == TWO_LAYERS
    torch.testing.assert_close(again.model.rm_head.hidden.bias, wanted, rtol=0, atol=0)


def test_head_that_is_trained_on_is_the_same_or_a_new_one(archive: Path, layout: Any) -> None:
    def load(**options: Any) -> Any:
        given = {"num_attributes": 2, "precision": Precision.fp32, **options}
        return load_pretrained(archive, layout, **given)

    kept = load(head=HeadConfig())
    assert (kept.head_is_new, read_head_shape(kept.config)) == (False, TWO_LAYERS)
    message = r"rm_head\.: got bias, hidden.bias, .* wanted bias, weight"
    with pytest.raises(CheckpointError, match=message) as caught:
        load(head=HeadConfig(bias=True))
    assert "pretrained_checkpoint.new_head=true" in str(caught.value)
    assert read_head_shape(load(head=HeadConfig(), new_head=True).config) is None
    with pytest.raises(CheckpointError, match=r"got shape \[24, 64\], wanted \[25, 64\]|\[2, 24\]"):
        load(head=HeadConfig(bias=True, mlp_size=25))
    with pytest.raises(CheckpointError, match="got 2 outputs, wanted 6"):
        load(head=HeadConfig(bias=True, mlp_size=24), outputs_per_attribute=3)
    new = load(head=HeadConfig(bias=True), new_head=True)
    assert (new.head_is_new, read_head_shape(new.config)) == (True, HeadShape(bias=True))


def test_head_is_merged_whole(archive: Path, tmp_path: Path) -> None:
    sources = (archive.with_name("linear.nemo"), archive)
    with pytest.raises(CheckpointError, match="the models differ: head"):
        merge_checkpoints(sources, (0.5, 0.5), tmp_path / "no.nemo")
    merge_checkpoints((archive, archive), (0.25, 0.75), tmp_path / "same.nemo")
    with open_nemo(archive) as one, open_nemo(tmp_path / "same.nemo") as other:
        for name in ("weight", "bias", "hidden.weight", "hidden.bias"):
            first, second = (each.store.read(f"model.rm_head.{name}") for each in (one, other))
            torch.testing.assert_close(first, second)


def test_head_section_of_what_is_no_head_is_refused() -> None:
    for section, said in (
        (1, "reward_head: got 1, wanted bias and mlp_size"),
        ({"depth": 3}, "wanted bias and mlp_size"),
        ({"bias": "yes"}, "reward_head.bias: got 'yes', wanted true or false"),
        ({"mlp_size": 0}, "reward_head.mlp_size: got 0, wanted a whole number"),
    ):
        with pytest.raises(CheckpointError, match=re.escape(said)):
            read_head_shape({"reward_head": section})


def test_head_is_in_a_config_only_if_it_is_unusual() -> None:
    assert with_head_shape({"a": 1, "reward_head": {"bias": True}}, None) == {"a": 1}
    assert read_head_shape(with_head_shape({}, TWO_LAYERS)) == TWO_LAYERS
    assert read_head_shape({"reward_head": {"bias": False}}) is None
    assert HeadShape.from_settings(HeadConfig()) is None
    assert HeadShape.from_settings(HeadConfig(bias=True, mlp_size=24)) == TWO_LAYERS


def test_head_is_counted_whole_by_a_plan() -> None:
    config = {
        "num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 1,
        "vocab_size": 8, "max_position_embeddings": 8,
    }  # fmt: skip
    shape, packs = ModelShape.from_config(config), Packs(tokens=1, sequences=1, keys=1.0)
    plan = Plan(packs, tp=1, pp=1, dp=1, sequence_parallel=False, num_attributes=3)
    assert head_size(shape, plan) == 24
    assert head_size(replace(shape, head=HeadShape(True, 5)), plan) == 15 + 3 + 40 + 5


def test_head_and_adapters_are_called_wherever_they_have_weights(layout: Any) -> None:
    """Between data parallel ranks Megatron waits for updated weights as their module is called."""
    config = {
        "num_layers": 1, "hidden_size": 16, "ffn_hidden_size": 16, "num_attention_heads": 2,
        "vocab_size": 64, "max_position_embeddings": 64,
    }  # fmt: skip
    shape = ModelShape.from_config(config)
    lora = LoraShape(2, 4.0, LORA_TARGETS)
    unseen = {}
    for head in (None, HeadShape(bias=True), HeadShape(mlp_size=4), TWO_LAYERS):
        for adapted in (None, lora):
            model = build_reward_model(
                replace(shape, head=head, lora=adapted),
                layout,
                num_attributes=2,
                precision=Precision.fp32,
            )
            model.rm_head.add_learned_scalars([1.0])
            missed = modules_that_are_not_called(model, PackedBatch.pack([[1, 2, 3], [4, 5]]))
            if missed:
                unseen[head, adapted] = missed
    assert not unseen, unseen


def modules_that_are_not_called(model: Any, batch: PackedBatch) -> set[str]:
    """The names of those with parameters of their own, in a forward pass of training."""
    owners = {n: m for n, m in model.named_modules() if list(m.parameters(recurse=False))}
    called: set[str] = set()
    handles = [
        module.register_forward_pre_hook(lambda *given, name=name: called.add(name))
        for name, module in owners.items()
    ]
    model.train()(batch)
    for handle in handles:
        handle.remove()
    return set(owners) - called
