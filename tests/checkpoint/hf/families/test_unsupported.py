"""Models of no family: one line says what is missing, which families are near, and what to do."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo
from nemo_aligner.checkpoint.hf.families import _FAMILIES, find_family, unsupported
from nemo_aligner.utils.errors import CheckpointError
from tests.harness import tiny

SIZES = tiny.SHAPE
# model_type, further keys of its config.json, and what the message has.
UNSUPPORTED: list[tuple[str, dict[str, Any], str]] = [
    ("mamba2", {}, "'mamba2', which is not supported: state-space layers"),
    ("falcon_h1", {}, "layers with Mamba-2"),
    ("t5", {}, "it is an encoder-decoder"),
    ("modernbert", {}, "it is an encoder; a reward model needs a decoder"),
    ("gpt2", {}, "learned position embeddings are not supported, only RoPE"),
    ("bloom", {}, "ALiBi is not supported"),
    ("phimoe", {"num_local_experts": 16}, "router.*Near families: .*phi3.*by the name; .*mixtral"),
    ("minimax", {}, "this kind of linear attention is not supported"),
    ("lama", {}, "Near families: llama by the name. A model"),
    ("my_decoder", {}, "supported. Near families: llama, because its config.json has no key"),
    ("my_moe", {"num_experts": 8}, r"mixtral and .* for experts \(num_experts\). A model"),
    ("hybrid", {"linear_num_key_heads": 2}, "qwen3_5_text.* for linear attention"),
    ("parallel", {"parallel_attn": True}, "gpt_neox and cohere and cohere2 for attention and MLP"),
    ("capped", {"attn_logit_softcapping": 50.0}, "gemma2 for soft caps"),
    ("minicpm", {"scale_emb": 12}, r"families: granite for multipliers \(scale_emb\)\. A model"),
    ("minicpm", {"dim_model_base": 256}, r"multipliers \(dim_model_base\)"),
    ("my_ssm", {"mamba_d_state": 16}, r"no family has state-space layers \(mamba_d_state\)"),
    ("shapeless", {"hidden_size": None}, "supported: its config.json lacks hidden_size. A model"),
    (
        "old",
        {"n_positions": 512, "vocab_size": None},
        r"learned position embeddings \(n_positions\); its config.json lacks vocab_size",
    ),
]


@pytest.mark.parametrize(("model_type", "changes", "pattern"), UNSUPPORTED)
def test_model_of_no_family_is_explained_in_one_line(
    model_type: str, changes: dict[str, Any], pattern: str
) -> None:
    with pytest.raises(CheckpointError) as raised:
        find_family(model_type, {**SIZES, "model_type": model_type, **changes})
    message = str(raised.value)
    assert re.search(pattern, message), message
    assert "\n" not in message
    assert message.endswith("register_family (docs/extending.md)")


def test_model_of_no_family_in_latent_attention_is_near_those_that_have_it() -> None:
    names = ("llama", "deepseek_v3", "glm4_moe_lite")
    error = unsupported.unsupported_model("latent", {**SIZES, "kv_lora_rank": 32}, names)
    assert "deepseek_v3 and glm4_moe_lite for latent attention (kv_lora_rank)" in str(error)


def test_reasons_are_of_models_that_transformers_has_and_no_family_is() -> None:
    names = unsupported._REASON_BY_NAME.keys()
    assert len(names) == sum(len(listed.split()) for listed in unsupported._REASONS.values())
    assert names <= CONFIG_MAPPING_NAMES.keys()
    assert not names & _FAMILIES.keys()


def test_convert_says_why_a_folder_is_not_supported(tmp_path: Path) -> None:
    tiny.write_hf_checkpoint(tmp_path / "hf")
    path = tmp_path / "hf/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "bloom"}))
    with pytest.raises(CheckpointError, match=r"hf: model_type: got 'bloom', .*: ALiBi is not"):
        convert_hf_to_nemo(tmp_path / "hf", tmp_path / "out.nemo")
