"""The tensors of every family, put together and taken apart."""

from __future__ import annotations

import pytest
import torch

from nemo_aligner.checkpoint.hf.families import find_family
from nemo_aligner.checkpoint.hf.families.gemma2 import GEMMA2
from nemo_aligner.checkpoint.hf.families.qwen2 import QWEN2
from nemo_aligner.errors import CheckpointError
from tests.checkpoint.hf.families.models import every_case, find, model, nemo_config
from tests.families import CASES


@every_case
@pytest.mark.parametrize("zero_centered", [False, True])
def test_rules_come_apart_as_they_were_put_together(case: str, zero_centered: bool) -> None:
    config = {**nemo_config(case), "layernorm_zero_centered_gamma": zero_centered}
    state = model(case).state_dict()
    names: list[str] = []
    for rule, _ in find_family(CASES[case]["model_type"]).rules(config):
        names += rule.hf
        parts = [state[name] for name in rule.hf]
        again = rule.split(rule.join(parts, config), config)
        for found, wanted in zip(again, parts, strict=True):
            # What had 1 added to it has lost its last bits.
            torch.testing.assert_close(found, wanted, atol=2e-7, rtol=0)
            assert "norm" in rule.megatron or torch.equal(found, wanted)
    untied = {"lm_head.weight"} if model(case).config.tie_word_embeddings else set()
    assert set(names) == state.keys() - untied
    assert len(names) == len(set(names))


def test_gammas_are_stored_plain_unless_the_config_says_otherwise() -> None:
    stored = torch.tensor([-0.5, 0.0, 0.25])
    rules = {rule.megatron: rule for rule in (*GEMMA2.layer, *GEMMA2.model, *QWEN2.layer)}
    assert len([name for name in rules if "norm" in name]) == 5
    plain = find("mlp.linear_fc2.post_layernorm.weight", GEMMA2.layer)
    assert plain.join([stored], {}).tolist() == [0.5, 1.0, 1.25]
    zero_centered = {"layernorm_zero_centered_gamma": True}
    assert plain.join([stored], zero_centered).tolist() == stored.tolist()
    ours = find("mlp.linear_fc1.layer_norm_weight", QWEN2.layer)
    (out,) = ours.split(stored, zero_centered)
    assert out.tolist() == [0.5, 1.0, 1.25]


def test_groups_that_the_config_does_not_have_are_refused() -> None:
    config = nemo_config("qwen2")
    rule = find("self_attention.linear_qkv.bias", QWEN2.layer)
    parts = [torch.zeros(rows) for rows in (64, 16, 16)]
    with pytest.raises(CheckpointError, match=r"got \[64, 16, 16\] rows, wanted \[64, 32, 32\]"):
        rule.join(parts, config)
