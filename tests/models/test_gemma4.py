"""Gemma 4: any pack, the prefix cache, layouts, and configs and layouts that are not supported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo
from nemo_aligner.checkpoint.hf.families.gemma4 import GEMMA4
from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained
from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import Recompute
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.gemma4 import Gemma4Attention
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.training_wrap import freeze_lower_layers
from nemo_aligner.serving.engine.scorer import load_scorer
from nemo_aligner.utils.errors import CheckpointError, ConfigError
from tests.checkpoint.hf.exporting import edit_tensors
from tests.checkpoint.refusals import refusals
from tests.harness import families
from tests.models import layouts
from tests.models.test_latent_attention import check_any_pack, sequences_with

every_case = pytest.mark.parametrize("case", ["gemma4", "gemma4_small", "gemma4_moe"])


@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16])
@every_case
def test_gemma4_rewards_are_bit_identical_in_any_pack(
    case: str, precision: Precision, layout: ParallelLayout, tmp_path: Path
) -> None:
    check_any_pack(families.write_base_nemo(tmp_path / "base.nemo", case), precision, layout)


@every_case
def test_gemma4_rewards_are_bit_identical_from_the_prefix_cache(
    case: str, layout: ParallelLayout, tmp_path: Path
) -> None:
    """Layers have pools of different sizes, and layers without keys have none."""
    families.write_reward_model(tmp_path / "hf", case, torch.bfloat16)
    convert_hf_to_nemo(tmp_path / "hf", tmp_path / "rm.nemo")
    plain, cached = (
        load_scorer(tmp_path / "rm.nemo", layout, micro_batch_tokens=1024, **kinds)
        for kinds in ({}, {"prefix_cache_tokens": 4096})
    )
    samples, _ = sequences_with(100)
    expected = np.concatenate([plain.score_token_lists([sample]) for sample in samples])
    for _ in range(2):
        assert (cached.score_token_lists(samples) == expected).all()
    assert cached.counts.cached > 500
    sizes = {"gemma4_small": [(2, 8), (2, 16)]}
    sizes = sizes.get(case, [(2, 8), (4, 16)] * 2)
    pool = cached.model.new_key_value_pool(64)
    assert [pool.layer(number).shape[2:] for number in range(1, 1 + len(sizes))] == sizes
    assert pool.num_bytes == sum(2 * 64 * groups * channels * 2 for groups, channels in sizes)


def test_gemma4_that_is_recomputed_trains_alike(layout: ParallelLayout, tmp_path: Path) -> None:
    for case, full in (("gemma4_moe", [Recompute.full]), ("gemma4", []), ("gemma4_small", [])):
        path = families.write_base_nemo(tmp_path / f"{case}.nemo", case)
        stored = layouts.step(path, layout)
        for recompute in (Recompute.selective, *full):
            again = layouts.step(path, layout, recompute)
            assert again == {key: pytest.approx(stored[key], rel=1e-6) for key in stored}
    with pytest.raises(ConfigError, match="got full, which is not supported for a model whose"):
        layouts.step(path, layout, Recompute.full)


def test_gemma4_freezes_the_layers_embeddings_with_the_tokens(
    layout: ParallelLayout, tmp_path: Path
) -> None:
    path = families.write_base_nemo(tmp_path / "base.nemo", "gemma4_small")
    model = load_pretrained(path, layout, num_attributes=1, precision=Precision.fp32).model
    freeze_lower_layers(model, 3, 4)
    frozen = {name.split(".")[0] for name, w in model.named_parameters() if not w.requires_grad}
    assert frozen == {"embedding", "per_layer_embedding", "decoder"}
    reasons = {
        module.why_not_graphed for module in model.modules() if hasattr(module, "why_not_graphed")
    }
    assert reasons == {Gemma4Attention.why_not_graphed}


def config_of(case: str) -> dict[str, Any]:
    return GEMMA4.to_nemo(families.hf_config(case).to_dict())


def test_gemma4_rejects_layouts_that_cannot_split_it(tmp_path: Path) -> None:
    plain, small = (ModelShape.from_config(config_of(case)) for case in ("gemma4", "gemma4_small"))
    shared = ModelShape.from_config({**config_of("gemma4"), "kv_shared_layers": 1})
    plain.check_fits(2, 4)
    small.check_fits(2, 1)
    for shape, sizes, message in (
        (plain, (4, 1), "got 4, wanted a divisor of the model's 2 query groups. A Gemma 4 cannot"),
        (small, (8, 1), "got 8, wanted a divisor of the 2 query groups of the model's layers with"),
        (small, (1, 2), "pipeline_model_parallel_size: got 2, .*: only the first stage has it"),
        (shared, (1, 2), "got 2, .* as layer 4 reads the keys of layer 2, in an earlier stage"),
    ):
        with pytest.raises(ConfigError, match=message):
            shape.check_fits(*sizes)
    families.write_hf_checkpoint(tmp_path / "hf", "gemma4")
    with pytest.raises(CheckpointError, match=r"tensor_parallel: got 4, .* \[2, 4\]. Query groups"):
        convert_hf_to_nemo(tmp_path / "hf", tmp_path / "base.nemo", tensor_parallel=4)


def test_gemma4_config_of_what_is_not_built_is_rejected() -> None:
    config, experts = (config_of(case) for case in ("gemma4_small", "gemma4_moe"))
    hf = families.hf_config("gemma4_small").to_dict()
    sizes = {"head_dim": 16, "num_key_value_heads": 2}
    with refusals() as refused:
        for changes, pattern in (
            ({"post_layernorms": False}, "post_layernorms: got False together with global_kv_chan"),
            ({"softmax_type": "learnable"}, "softmax_type: got 'learnable' together with global_k"),
            ({"global_query_groups": 3}, "global_query_groups: got 3, wanted a divisor of the 4"),
            ({"global_kv_channels": 15}, "global_kv_channels: got 15, wanted an even number"),
            ({"global_rotary_percentage": 1.5}, "global_rotary_percentage: got 1.5, wanted at"),
            ({"kv_shared_layers": 4}, "kv_shared_layers: got 4, wanted a whole number from 0 to 3"),
            ({"kv_shared_layers": 3}, "kv_shared_layers: got 3 of 4 layers, wanted fewer"),
        ):
            with refused(changes, pattern):
                ModelShape.from_config({**config, **changes})
        for changes, pattern in (
            ({"moe_branch_norms": None}, "num_moe_experts: got 8 together with post_layernorms or"),
            (
                {"num_moe_experts": None},
                "moe_branch_norms: got True together with num_moe_experts=",
            ),
            ({"global_kv_channels": None}, "moe_branch_norms: got True .* and global_kv_channels="),
            ({"moe_layer_freq": 2}, "moe_layer_freq: got 2 together with global_kv_channels, want"),
            (
                {"moe_shared_expert_intermediate_size": 8},
                "intermediate_size: got 8 together with m",
            ),
            ({"moe_shared_expert_gate": True}, "moe_shared_expert_gate: got True together with mo"),
            ({"kv_shared_layers": 2, "kv_shared_double_wide_mlp": True}, "double_wide_mlp: got Tr"),
        ):
            with refused(changes, pattern):
                ModelShape.from_config({**experts, **changes})
        for changes, pattern in (
            ({"enable_moe_block": True}, "use_double_wide_mlp: got True, which is not supported"),
            ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention: got 'all'"),
            ({"vocab_size_per_layer_input": 7}, "vocab_size_per_layer_input: got 7, wanted vocab_"),
            ({"per_layer_config": {"1": sizes}}, "per_layer_config: got .*, wanted the same head"),
            ({"attention_bias": True}, "attention_bias: got True, which is not supported"),
        ):
            with refused(changes, pattern):
                GEMMA4.to_nemo({**hf, **changes})


def test_gemma4_checkpoint_may_have_keys_that_no_layer_reads(tmp_path: Path) -> None:
    """Released checkpoints have them in the layers that read an earlier layer's keys."""
    families.write_hf_checkpoint(tmp_path / "hf", "gemma4_small")
    names = [f"model.layers.3.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm")]
    edit_tensors(tmp_path / "hf", {name: torch.ones(2, 2) for name in names})
    summary = convert_hf_to_nemo(tmp_path / "hf", tmp_path / "base.nemo")
    assert "dropped: 3 tensors model.layers.3.self_attn.k_proj.*, model.l" in str(summary)
