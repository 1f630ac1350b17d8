"""Latent attention: any pack, the prefix cache, layouts, and configs that are not supported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_aligner.batch.packed import Group, PackedBatch
from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo
from nemo_aligner.checkpoint.hf.families.deepseek import DEEPSEEK_V3
from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained
from nemo_aligner.config.common import Precision
from nemo_aligner.config.dtypes import ELEMENT_BYTES
from nemo_aligner.config.model import Recompute
from nemo_aligner.cpu.matmuls import BATCH_INVARIANT_ROWS
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.batch_invariance import make_batch_invariant
from nemo_aligner.models.latent_attention import LatentAttention
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.latent_attention import LatentAttentionShape
from nemo_aligner.models.step import infer
from nemo_aligner.planning.planner import PlanRequest
from nemo_aligner.planning.render import render_heading
from nemo_aligner.serving.engine.scorer import load_scorer
from nemo_aligner.utils.errors import CheckpointError, ConfigError
from tests.checkpoint.hf.exporting import assert_same, edit_tensors, export, tensors_of
from tests.harness import families, tiny
from tests.models import layouts
from tests.serving.engine import cached_states

both = pytest.mark.parametrize("case", ["deepseek_v3", "deepseek_v3_untied"])


def sequences_with(shared: int) -> tuple[list[list[int]], list[Group]]:
    """Eight samples: three with a prefix of ``shared`` tokens, two pairs, and one alone."""
    generator = torch.Generator().manual_seed(shared)

    def draw(count: int) -> list[int]:
        return torch.randint(3, 300, (count,), generator=generator).tolist()

    samples, groups = [], []
    for size, prefix in ((3, shared), (2, 201 - shared), (2, 1 + shared // 2), (1, 0)):
        start = draw(prefix)
        samples += [[*start, *draw(count)] for count in (1, 70, 40)[:size]]
        groups.append(Group(size, prefix))
    return samples, groups


def check_any_pack(archive: Path, precision: Precision, layout: ParallelLayout) -> None:
    """Check that rewards are bit-identical alone, with shared prefixes, and in another order."""
    model = load_pretrained(archive, layout, num_attributes=2, precision=precision).model
    make_batch_invariant(model, BATCH_INVARIANT_ROWS)
    for shared in (1, 31, 64, 129):
        samples, groups = sequences_with(shared)
        alone = infer(model, [PackedBatch.pack([sample]) for sample in samples], layout)
        prefixed = infer(model, [PackedBatch.pack(samples, groups=groups)], layout)
        backwards = infer(model, [PackedBatch.pack(samples[::-1])], layout)
        assert alone is not None
        assert prefixed is not None
        assert backwards is not None
        assert torch.equal(prefixed, alone), shared
        assert torch.equal(backwards.flip(0), alone), shared


@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16])
@both
def test_latent_attention_rewards_are_bit_identical_in_any_pack(
    case: str, precision: Precision, layout: ParallelLayout, tmp_path: Path
) -> None:
    check_any_pack(families.write_base_nemo(tmp_path / "base.nemo", case), precision, layout)


def write_scored(folder: Path, case: str, tensor_parallel: int = 1) -> Path:
    families.write_reward_model(folder / "hf", case, torch.float32)
    options = {"seq_length": cached_states.BUDGET, "tensor_parallel": tensor_parallel}
    convert_hf_to_nemo(folder / "hf", folder / "rm.nemo", **options)
    return folder / "rm.nemo"


def check_cached(found: dict[str, Any], case: str, stages: int = 1) -> None:
    """Check a result of ``cached_states.compare``; a rank has whole latents of its stage."""
    assert found["changed"] == dict.fromkeys(found["changed"], 0)
    assert found["spread"] > 0.3
    shape = ModelShape.from_config(config_of(case))
    tokens = {name: tokens for name, (tokens, _) in cached_states.CACHES.items()}
    assert len(found["counts"]) == 4
    for name, counts in found["counts"].items():
        room, precision = name.rsplit(" ", 1)
        per_token = shape.cached_token_bytes(ELEMENT_BYTES[Precision(precision)])
        assert counts["bytes"] == tokens[room] * per_token // stages
        assert counts["cached"] > 2000


@both
def test_latent_attention_rewards_are_bit_identical_from_the_prefix_cache(
    case: str, layout: ParallelLayout, tmp_path: Path
) -> None:
    check_cached(cached_states.compare(write_scored(tmp_path, case), layout), case)


def test_latent_attention_rewards_are_bit_identical_from_the_prefix_cache_at_any_layout(
    tmp_path: Path,
) -> None:
    """With as many heads of zeros, so that the second tensor parallel rank has no others."""
    stages = {"TP=2": 1, "PP=2": 2, "CP=2": 1}
    archive = write_scored(tmp_path, "deepseek_v3_untied", tensor_parallel=8)
    script = "tests/serving/engine/cached_states.py"
    done = tiny.run_script(script, str(archive), *stages, processes=2)
    found = json.loads(done.stdout.splitlines()[-1])
    for name, of_layout in found.items():
        check_cached(of_layout, "deepseek_v3_untied", stages[name])
        assert of_layout["spread"] == pytest.approx(found["PP=2"]["spread"], rel=0.01)


@both
def test_latent_attention_takes_heads_of_zeros(
    case: str, layout: ParallelLayout, tmp_path: Path
) -> None:
    """Four heads become six: rewards stay, and an export has the four again."""
    samples, _ = sequences_with(31)
    plain = write_scored(tmp_path / "plain", case)
    padded = write_scored(tmp_path / "padded", case, tensor_parallel=3)
    expected, rewards = (
        load_scorer(archive, layout, micro_batch_tokens=1200).score_token_lists(samples)
        for archive in (plain, padded)
    )
    np.testing.assert_allclose(rewards, expected, atol=1e-5)
    export(padded, tmp_path / "out", layout)
    assert_same(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "padded/hf"))


def test_plan_shows_the_memory_of_cached_latents() -> None:
    shape = ModelShape.from_config(config_of("deepseek_v3"))
    request = PlanRequest()
    heading = render_heading("tiny", request.planner(shape), request)
    size = "A server's prefix cache: 0.3 kB for each of server.prefix_cache_tokens"
    assert f"{size}, split over the pipeline parallel ranks\n" in heading
    # docs/decoders.md: the sizes of DeepSeek-V3
    latent = LatentAttentionShape(128, 1536, 512, 128, 64, 128, 1e-6, 1.0)
    published = replace(shape, num_layers=61, latent_attention=latent, moe_layer_freq=None)
    assert published.cached_token_bytes(2) == 70_272


@both
def test_latent_attention_that_is_recomputed_trains_alike(
    case: str, layout: ParallelLayout, tmp_path: Path
) -> None:
    path = families.write_base_nemo(tmp_path / "base.nemo", case)
    stored = layouts.step(path, layout)
    for kind in (Recompute.selective, Recompute.full):
        assert layouts.step(path, layout, kind) == {
            key: pytest.approx(stored[key], rel=1e-6) for key in stored
        }


def test_latent_attention_rejects_layouts_that_cannot_split_it() -> None:
    shape = ModelShape.from_config(config_of("deepseek_v3"))
    shape.check_fits(2, 1)
    assert shape.latent_attention is not None
    latent = replace(shape.latent_attention, q_lora_rank=33)
    with pytest.raises(ConfigError, match="got 2, wanted a divisor of the 65 channels of the mod"):
        replace(shape, latent_attention=latent).check_fits(2, 1)
    with pytest.raises(ConfigError, match="got 8, wanted a divisor of the model's 4 attention"):
        shape.check_fits(8, 1)


def config_of(case: str) -> dict[str, Any]:
    return DEEPSEEK_V3.to_nemo(families.hf_config(case).to_dict())


def test_latent_attention_config_of_what_is_not_built_is_rejected() -> None:
    plain, with_latent = config_of("deepseek_v3_untied"), config_of("deepseek_v3")
    bad: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        (
            with_latent,
            {"window_size": 8},
            "window_size: got 8 together with multi_latent_attention",
        ),
        (with_latent, {"qk_layernorm": True}, "qk_layernorm: got True together with multi_latent"),
        (with_latent, {"no_rope_freq": 2}, "no_rope_freq: got 2 together with multi_latent"),
        (with_latent, {"num_query_groups": 2}, "num_query_groups: got 2, wanted 4, a key for each"),
        (with_latent, {"qk_pos_emb_head_dim": 7}, "qk_pos_emb_head_dim: got 7, wanted an even"),
        (with_latent, {"v_head_dim": 25}, "v_head_dim: got 25, wanted at most the 24 channels"),
        (with_latent, {"kv_lora_rank": 0}, "kv_lora_rank: got 0, wanted a whole number above 0"),
        (
            plain,
            {"kv_lora_rank": 33},
            "kv_lora_rank: got 33 without q_lora_rank, wanted kv_lora_rank",
        ),
        (plain, {"zero_query_groups": 4}, "zero_query_groups: got 4, wanted a whole number from 0"),
    ]
    for config, changes, message in bad:
        with pytest.raises(CheckpointError, match=message):
            ModelShape.from_config({**config, **changes})


@pytest.mark.parametrize(("rotated", "plain"), [(64, 128), (2, 96), (6, 43), (10, 183), (48, 1)])
def test_fraction_of_rotated_channels_is_exact(rotated: int, plain: int) -> None:
    shape = LatentAttentionShape(1, None, 8, plain, rotated, 8, 1e-6, 1.0)
    assert int(shape.key_channels * shape.rotary_percentage) == rotated


def test_latent_attention_is_not_graphed(layout: ParallelLayout, tmp_path: Path) -> None:
    path = families.write_base_nemo(tmp_path / "base.nemo", "deepseek_v3_untied")
    model = load_pretrained(path, layout, num_attributes=1, precision=Precision.fp32).model
    reasons = {
        module.why_not_graphed for module in model.modules() if hasattr(module, "why_not_graphed")
    }
    assert reasons == {LatentAttention.why_not_graphed}


def test_checkpoint_may_have_layers_for_several_tokens(tmp_path: Path) -> None:
    families.write_hf_checkpoint(tmp_path / "hf", "deepseek_v3")
    names = ("model.layers.4.embed_tokens.weight", "model.layers.4.self_attn.q_a_proj.weight")
    edit_tensors(tmp_path / "hf", {name: torch.ones(2, 2) for name in names})
    summary = convert_hf_to_nemo(tmp_path / "hf", tmp_path / "base.nemo")
    assert "dropped: 2 tensors model.layers.4.*" in str(summary)
