"""Packs of fixed sizes, and graphs of a decoder, replayed without a GPU."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch

from nemo_aligner.batch.cache_use import CachedPrefix, Stored
from nemo_aligner.batch.packed import Group, PackedBatch
from nemo_aligner.config.model import Recompute
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.fixed_sizes import pad_to_fixed_sizes, round_up_tokens
from nemo_aligner.models.step import infer
from tests.harness import tiny
from tests.models.graphed import (
    PACKS,
    RecordedCapture,
    attention_by_bounds,  # noqa: F401
    gradients,
    load,
    plain,
    sharing,
)

pytestmark = pytest.mark.usefixtures("attention_by_bounds")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_base_nemo(tmp_path_factory.mktemp("base") / "base.nemo")


def test_sizes_are_few_and_waste_little() -> None:
    sizes = [round_up_tokens(count) for count in range(1, 32769)]
    assert len(set(sizes)) == 8 + 5 * 8
    assert {1: 128, 1024: 1024, 1025: 1152, 2049: 2304, 8192: 8192, 8193: 9216}.items() <= {
        count: round_up_tokens(count) for count in (1, 1024, 1025, 2049, 8192, 8193)
    }.items()
    assert all(size < count * 1.126 for count, size in enumerate(sizes, 1) if count > 1024)


def test_padded_pack_has_fillers_no_longer_than_its_texts_may_be() -> None:
    padded = pad_to_fixed_sizes(plain(*[400] * 20, 241))
    assert padded.num_tokens == 9216
    assert padded.cu_seqlens.diff().tolist() == [400] * 20 + [241, 512, 463]
    assert padded.position_ids[-463:].tolist() == list(range(463))
    assert padded.sizes is not None
    assert (padded.sizes.segments, padded.sizes.keys, padded.sizes.length) == (24, None, 512)
    padded = pad_to_fixed_sizes(sharing(40, 5, 1, 12, 9))
    assert padded.sizes is not None
    # 128 tokens, of which 40 twice and 80 twice more are keys.
    assert padded.num_tokens == 128
    assert padded.sizes.keys == 320


@pytest.mark.parametrize("kind", PACKS)
def test_scoring_by_graphs_changes_no_bit(kind: str, base: Path, layout: ParallelLayout) -> None:
    wanted = load(base, layout, False)
    model = load(base, layout, RecordedCapture())
    for _ in range(2):
        for pack in PACKS[kind]:
            found = infer(model, [pack], layout)
            assert torch.equal(found, infer(wanted, [pack], layout))
        # Weights are read where they are, with the values that they have.
        for each in (model, wanted):
            with torch.no_grad():
                each.decoder.layers[1].mlp.linear_fc1.weight.mul_(1.5)
    packs = 2 * len(PACKS[kind])
    assert (model.graphs.replayed, model.graphs.eager) == (packs - 1, 1)


def test_scoring_by_graphs_uses_the_prefix_cache(base: Path, layout: ParallelLayout) -> None:
    wanted, model = load(base, layout, False), load(base, layout, RecordedCapture())
    pools = [each.new_key_value_pool(256) for each in (wanted, model)]
    for start in (0, 64, 128, 20):
        slots = torch.arange(start, start + 50)
        text = list(range(3 + start % 7, 70 + start % 7))
        first = PackedBatch.pack([text, [5, 6]], stored=[Stored(0, slots), None])
        cached = CachedPrefix(slots)
        groups = [Group(2, 52, cached), Group(1, 0)]
        texts = [text[:60], [*text[:52], 9, 8], [4] * 30]
        later = PackedBatch.pack(texts, groups=groups, stored=[None, None, None])
        for pack in (first, later):
            found, plainly = (
                infer(each, [pack], layout, pool)
                for each, pool in zip((model, wanted), pools, strict=True)
            )
            assert torch.equal(found, plainly)
    assert (model.graphs.replayed, model.graphs.eager) == (6, 2)


@pytest.mark.parametrize("kind", PACKS)
def test_training_by_graphs_gives_the_same_gradients(
    kind: str, base: Path, layout: ParallelLayout
) -> None:
    wanted = gradients(load(base, layout, False), PACKS[kind], layout)
    model = load(base, layout, RecordedCapture())
    found = gradients(model, PACKS[kind], layout)
    for name, gradient in found.items():
        scale = float(wanted[name].abs().max())
        torch.testing.assert_close(gradient, wanted[name], atol=1e-5 * scale, rtol=1e-4)
    packs = 2 * len(PACKS[kind])
    assert (model.graphs.replayed, model.graphs.eager) == (packs - 1, 1)
    # Hooks are Megatron's, and parameters the model's, again.
    assert all(hasattr(each, "main_grad") for each in model.parameters())


def test_graphs_are_not_for_all_training(base: Path, layout: ParallelLayout) -> None:
    model = load(base, layout, RecordedCapture(), recompute=Recompute.full)
    gradients(model, PACKS["plain"], layout)
    assert (model.graphs.replayed, model.graphs.eager) == (0, 0)


def test_graphs_are_dropped_when_weights_move(base: Path, layout: ParallelLayout) -> None:
    wanted, model = load(base, layout, False), load(base, layout, RecordedCapture())
    for pack in PACKS["plain"][:3]:
        infer(model, [pack], layout)
    assert model.graphs.replayed == 2
    weight = model.decoder.layers[0].mlp.linear_fc1.weight
    weight.data = weight.data.clone()
    for pack in PACKS["plain"]:
        assert torch.equal(infer(model, [pack], layout), infer(wanted, [pack], layout))
    assert model.graphs.replayed == 6


def test_backward_of_a_pass_that_was_overwritten_is_refused(
    base: Path, layout: ParallelLayout
) -> None:
    model = load(base, layout, RecordedCapture())
    gradients(model, PACKS["plain"], layout)
    padded = pad_to_fixed_sizes(PACKS["plain"][0])
    first, last = model(padded), model(padded)
    last.sum().backward()
    with pytest.raises(RuntimeError, match="between the forward and the backward pass"):
        first.sum().backward()


def test_graphs_that_are_dropped_keep_no_weights(base: Path, layout: ParallelLayout) -> None:
    """Hooks on what stands in for parameters are held where Python's collector cannot see."""
    model = load(base, layout, RecordedCapture())
    gradients(model, PACKS["plain"], layout)
    stand_in = weakref.ref(model.graphs._leaves._places[0][3])
    assert stand_in() is not None
    model.graphs = None
    gc.collect()
    assert stand_in() is None
