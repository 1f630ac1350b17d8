"""The residual stream of models in 16 bits: fp32 where nothing is learnt."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_aligner.batch import PackedBatch, Records
from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import Recompute
from nemo_aligner.models.reward_model import GPTRewardModel
from nemo_aligner.parallel.layout import ParallelLayout
from tests import families, tiny
from tests.families import CASES, GROUPS, SEQUENCES
from tests.models.family_layouts import LAYOUTS, batches
from tests.models.stream_layouts import rewards
from tests.models.test_families import LAYOUT_CASES

HALF = [Precision.bf16, Precision.fp16]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("streams")
    return cache(lambda case: families.write_base_nemo(folder / f"{case}.nemo", case))


def load(path: Path, layout: ParallelLayout, precision: Precision, **options: Any) -> Any:
    from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained

    return load_pretrained(path, layout, num_attributes=1, precision=precision, **options).model


def watch(model: Any) -> dict[str, set[torch.dtype]]:
    """The dtypes of what goes into layers, and into their products."""
    seen: dict[str, set[torch.dtype]] = {"layers": set(), "products": set()}

    def note(name: str) -> Any:
        return lambda module, given, named: seen[name].add((*given, *named.values())[0].dtype)

    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(note("layers"), with_kwargs=True)
        for each in (layer.self_attention.linear_qkv, layer.mlp.linear_fc1):
            each.register_forward_pre_hook(note("products"), with_kwargs=True)
    return seen


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("case", CASES)
def test_it_is_fp32_in_scoring_and_products_are_not(
    case: str, precision: Precision, archive: Any, layout: ParallelLayout
) -> None:
    from nemo_aligner.models.step import infer

    model = load(archive(case), layout, precision)
    seen = watch(model)
    infer(model, [PackedBatch.pack(SEQUENCES, groups=GROUPS)], layout)
    assert seen == {"layers": {torch.float32}, "products": {model.config.params_dtype}}


@pytest.mark.parametrize("recompute", Recompute)
@pytest.mark.parametrize("case", ["llama", "gemma2", "nemotron", "qwen3"])
def test_it_takes_no_memory_in_training(
    case: str, recompute: Recompute, archive: Any, layout: ParallelLayout
) -> None:
    from nemo_aligner.models.step import forward_backward
    from nemo_aligner.models.trainable import wrap_for_training

    def loss(rewards: torch.Tensor, records: Records) -> tuple[torch.Tensor, torch.Tensor]:
        return rewards.square().sum(), torch.tensor(rewards.size(0))

    model = load(archive(case), layout, Precision.bf16, recompute=recompute)
    seen = watch(model)
    wrapped = wrap_for_training(model)
    wrapped.train()
    forward_backward(wrapped, batches(), layout, loss)
    assert seen == {"layers": {torch.bfloat16}, "products": {torch.bfloat16}}
    assert all(weight.main_grad.abs().max() > 0 for weight in model.decoder.parameters())


def test_it_brings_rewards_nearer_to_those_in_fp32(
    layout: ParallelLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model of many layers, whose weights are numbers of bf16 all the same."""
    from nemo_aligner.models.step import infer

    path = tiny.write_base_nemo(tmp_path / "deep.nemo", num_hidden_layers=32)
    generator = torch.Generator().manual_seed(0)
    pack = PackedBatch.pack(torch.randint(3, 300, (64, 20), generator=generator).tolist())
    rounded = load(path, layout, Precision.bf16)
    exact = load(path, layout, Precision.fp32)
    with torch.no_grad():
        for ours, theirs in zip(exact.parameters(), rounded.parameters(), strict=True):
            ours.copy_(theirs)
    wanted, found = (infer(model, [pack], layout) for model in (exact, rounded))
    monkeypatch.setattr(GPTRewardModel, "stream_dtype", torch.bfloat16)
    before = infer(rounded, [pack], layout)
    assert (found - wanted).abs().mean() < 0.8 * (before - wanted).abs().mean()


@pytest.mark.slow(seconds=6)
def test_it_is_the_same_at_all_layouts(archive: Any, layout: ParallelLayout) -> None:
    """Bit for bit between pipeline stages; tensor parallel products are summed otherwise."""
    paths = [archive(case) for case in LAYOUT_CASES]
    script = "tests/models/stream_layouts.py"
    done = tiny.run_script(script, *map(str, paths), processes=2, timeout=600)
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == set(LAYOUTS)
    for path in paths:
        alone = rewards(path, layout, Precision.bf16)
        assert found["PP=2"][path.stem] == alone, path.stem
        size = max(map(abs, alone))
        for name in ("TP=2", "TP=2+SP"):
            assert found[name][path.stem] == pytest.approx(alone, abs=0.05 * size), path.stem
