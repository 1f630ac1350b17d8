"""Dense decoders whose layers differ from Llama's in their order: a reward depends on no batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.serving.engine.scorer import load_scorer
from tests.harness import families

VARIANTS = ("ernie4_5", "hunyuan_alpha", "gpt_neox", "starcoder2", "cohere2", "apertus")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", VARIANTS)
def test_variant_has_the_same_bits_alone_packed_and_from_the_prefix_cache(
    case: str, dtype: torch.dtype, layout: ParallelLayout, tmp_path: Path
) -> None:
    families.write_reward_model(tmp_path / "hf", case, dtype)
    convert_hf_to_nemo(tmp_path / "hf", tmp_path / "rm.nemo", seq_length=128)
    scorer, plain = (
        load_scorer(
            tmp_path / "rm.nemo", layout, micro_batch_tokens=512, prefix_cache_tokens=tokens
        )
        for tokens in (4096, 0)
    )
    samples = families.SEQUENCES
    alone = np.concatenate([plain.score_token_lists([tokens]) for tokens in samples])
    assert alone.std() > 1e-3
    for name, rewards in (
        ("packed, with shared prefixes", plain.score_token_lists(samples)),
        ("into the cache", scorer.score_token_lists(samples)),
        ("from the cache", scorer.score_token_lists(samples)),
        ("from the cache, reversed", scorer.score_token_lists(samples[::-1])[::-1]),
    ):
        assert np.array_equal(rewards, alone), name
    assert scorer.counts.cached > 0
