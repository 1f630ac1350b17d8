"""Model families: translation of configs, rules and models in both directions, and refusals."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo as convert
from nemo_aligner.checkpoint.hf.families import family_of, find_family
from nemo_aligner.checkpoint.hf.families.base import Rule
from nemo_aligner.checkpoint.hf.families.gemma import GEMMA2
from nemo_aligner.checkpoint.hf.families.query_groups import (
    add_zero_groups,
    pack_qkv,
    remove_zero_groups,
    unpack_qkv,
)
from nemo_aligner.checkpoint.hf.families.qwen import QWEN2
from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.contract.scorer import score_all
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.serving.engine.scorer import load_scorer
from nemo_aligner.utils.errors import CheckpointError
from tests.checkpoint.hf.exporting import config_of, edit, export
from tests.checkpoint.refusals import refusals
from tests.harness import families, family_cases, tiny
from tests.harness.family_cases import CASES, WINDOW

NAMES = tuple(sorted({case["model_type"] for case in CASES.values()}))
# Settings in every config.json.
SIZES = {
    key: value
    for key, value in tiny.SHAPE.items()
    if key not in ("rms_norm_eps", "tie_word_embeddings")
}
# Settings that a family needs in addition. Latent attention has a key for each head, and
# DeepSeek-V2 no default of the experts of a token.
LATENT_SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_key_value_heads": 4},
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 6},
    "glm4_moe_lite": {"num_key_value_heads": 4},
    # The layers' embeddings have as many rows as the token embeddings.
    "gemma4_text": {"vocab_size_per_layer_input": SIZES["vocab_size"]},
}
every_case = pytest.mark.parametrize("case", CASES)


@cache
def model(case: str) -> Any:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(families.hf_config(case), attn_implementation="eager")
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return made.eval()


def nemo_config(case: str) -> dict[str, Any]:
    return find_family(CASES[case]["model_type"]).to_nemo(model(case).config.to_dict())


def find(megatron: str, rules: tuple[Rule, ...]) -> Rule:
    (rule,) = [rule for rule in rules if rule.megatron == megatron]
    return rule


@every_case
def test_family_config_that_came_back_is_the_same_model(case: str) -> None:
    config = nemo_config(case)
    family = find_family(CASES[case]["model_type"])
    assert family.to_nemo(family.to_hf(config)) == config
    of_this = family_of(config)
    assert of_this.name == {"mistral": "llama"}.get(case, family.name)  # without a window
    for back in (family.to_hf(config), of_this.to_hf(config)):
        again = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**{"pad_token_id": 0, **back}), attn_implementation="eager"
        ).eval()
        again.load_state_dict(model(case).state_dict())
        tokens = torch.arange(5, 60)[None]
        with torch.no_grad():
            # A cap on the LM head's logits does not change the decoder.
            expected, actual = (
                decoder.base_model(tokens).last_hidden_state for decoder in (model(case), again)
            )
        assert expected.std() > 0.1
        assert torch.equal(actual, expected)


def test_family_config_leaves_out_what_transformers_adds() -> None:
    actual, expected = {}, {}
    for name in NAMES:
        sizes = {**SIZES, **LATENT_SIZES.get(name, {})}
        full = AutoConfig.for_model(name, **sizes).to_dict()
        actual[name], expected[name] = (
            find_family(name).to_nemo(config) for config in (sizes, full)
        )
    assert actual == expected


KEYS = LATENT_SIZES["deepseek_v3"]
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ("qwen3_moe", {"mlp_only_layers": 0}, "mlp_only_layers: got 0, wanted a list"),
    ("qwen2_moe", {"decoder_sparse_step": 5}, "none of the 4 layers has experts"),
    ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok: got 9, wanted .* at most 8"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv: got 8.0"),
    ("smollm3", {"no_rope_layers": [1, 0]}, r"no_rope_layers: got \[1, 0\], wanted for each"),
    ("smollm3", {"layer_types": ["sliding_attention"] * 4}, "sliding_window=None and 4 layers"),
    ("ministral", {"layer_types": ["chunked_attention"] * 4}, "layer_types: got"),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers: got"),
    ("qwen2", {"use_sliding_window": "yes"}, "use_sliding_window: got 'yes', wanted true or"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "sliding_window=None and 4 layers"),
    ("qwen3", {"attention_bias": True}, "attention_bias: got True"),
    ("qwen3", {"layer_types": ["full_attention"] * 3}, "sliding_window=None and 4 layers"),
    ("mistral", {"layer_types": ["full_attention"] * 4}, "layer_types: got"),
    ("mistral", {"sliding_window": 0}, "sliding_window: got 0"),
    ("llama", {"num_hidden_layers": 10**12}, "num_hidden_layers: got 10{12}, wanted .*"),
    ("llama", {"vocab_size": 320.5}, "vocab_size: got 320.5, wanted a whole number from 1 on"),
    ("llama", {"rope_theta": "x"}, "rope_theta: got 'x'"),
    ("llama", {"rope_scaling": [1]}, r"rope_parameters: got \[1\]"),
    ("llama", {"num_key_value_heads": 3}, "num_query_groups: got 3, wanted a divisor of the 4"),
    ("gemma", {"hidden_activation": "relu"}, "hidden_activation: got 'relu'"),
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention: got True"),
    ("gemma2", {"layer_types": 4}, "layer_types: got 4"),
    ("gemma3_text", {"attn_logit_softcapping": 30.0}, "attn_logit_softcapping: got 30.0"),
    (
        "gemma3_text",
        {"rope_parameters": {"rope_theta": 5.0}},
        "rope_parameters: got .*, wanted a mapping",
    ),
    ("gemma3_text", {"rope_scaling": {"type": "yarn"}}, "rope_type: got 'yarn', .* 'default' or '"),
    ("gemma3_text", {"rope_local_base_freq": "x"}, "rope_theta: got 'x'"),
    ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping: got 0.0"),
    ("nemotron", {"hidden_act": "silu"}, "hidden_act: got 'silu'"),
    ("olmo2", {"clip_qkv": 8.0}, "clip_qkv: got 8.0"),
    ("exaone4", {"sliding_window_pattern": 0}, "sliding_window_pattern: got 0"),
    (
        "olmo3",
        {"rope_parameters": {"rope_theta": 5.0}},
        "rope_parameters: got .*, wanted a mapping",
    ),
    ("phi3", {"rope_scaling": {"type": "su"}}, "longrope_short_factor: got None, wanted 8 numbers"),
    ("granite", {"residual_multiplier": 0.0}, "residual_multiplier: got 0.0, wanted a number"),
    ("granite", {"attention_bias": True}, "attention_bias: got True"),
    ("phi3", {"sliding_window": -1}, "sliding_window: got -1"),
    ("glm", {"attention_bias": 1}, "attention_bias: got 1, wanted true or false"),
    ("seed_oss", {"attention_out_bias": True}, "attention_out_bias: got True"),
    ("nemotron", {"mlp_bias": True}, "mlp_bias: got True"),
    ("deepseek_v3", {}, "num_key_value_heads: got 2, wanted num_attention_heads=4"),
    ("deepseek_v3", {**KEYS, "attention_bias": True}, "attention_bias: got True"),
    ("deepseek_v3", {**KEYS, "scoring_func": "softmax"}, "scoring_func: got 'softmax'"),
    ("deepseek_v3", {**KEYS, "topk_method": "greedy"}, "topk_method: got 'greedy'"),
    ("deepseek_v3", {**KEYS, "moe_layer_freq": 2}, "moe_layer_freq: got 2"),
    ("deepseek_v3", {**KEYS, "v_head_dim": 256}, "v_head_dim: got 256, wanted at most the 192"),
    ("deepseek_v2", {**LATENT_SIZES["deepseek_v2"], "norm_topk_prob": True}, "norm_topk_prob: got"),
    ("deepseek_v2", {**KEYS}, "num_experts_per_tok: got None"),
    ("glm4_moe_lite", {**KEYS, "mlp_layer_types": ["dense"]}, r"mlp_layer_types: got \['dense'\]"),
    ("gpt_oss", {"attention_bias": False}, "attention_bias: got False, which is not supported"),
    ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha: got 1.5, which is not supported"),
    ("gpt_oss", {"num_experts_per_tok": 129}, "num_experts_per_tok: got 129, .* at most 128"),
    ("qwen2", {"rope_parameters": {"rope_type": "proportional"}}, "rope_type: got 'prop"),
    ("ernie4_5", {"use_bias": True}, "use_bias: got True, which is not supported"),
    ("hunyuan_v1_dense", {"use_qk_norm": False}, "use_qk_norm: got False, which is not supported"),
    ("hunyuan_v1_dense", {"attention_bias": True}, "attention_bias: got True"),
    (
        "hunyuan_v1_dense",
        {"rope_scaling": {"type": "dynamic", "alpha": "x"}},
        "alpha: got 'x', wanted a number",
    ),
    ("gpt_neox", {"attention_bias": False}, "attention_bias: got False, which is not supported"),
    ("gpt_neox", {"hidden_act": "relu"}, "hidden_act: got 'relu', which is not supported"),
    ("starcoder2", {"use_bias": False}, "use_bias: got False, which is not supported"),
    ("starcoder2", {"norm_type": "rms"}, "norm_type: got 'rms', which is not supported"),
    ("cohere", {"use_qk_norm": True}, "use_qk_norm: got True, which is not supported"),
    ("cohere2", {"attention_bias": True}, "attention_bias: got True"),
    ("cohere2", {"sliding_window": None}, "layer_types: got .* with sliding_window=None and 4"),
    ("apertus", {"hidden_act": "silu"}, "hidden_act: got 'silu', which is not supported"),
    ("apertus", {"post_norm": True}, "post_norm: got True, which is not supported"),
    ("nemotron_h", {"moe_latent_size": 64}, "moe_latent_size: got 64, which is not supported"),
    (
        "nemotron_h",
        {"layers_block_type": ["conv"]},
        "layers_block_type: got .* of linear_att",
    ),
    ("nemotron_h", {"hybrid_override_pattern": "MX"}, "hybrid_override_pattern: got 'MX', wanted"),
    ("nemotron_h", {"time_step_limit": [0.0, 0.1]}, r"time_step_limit: got \[0.0, 0.1\], which"),
    ("nemotron_h", {"mamba_dt_limit": [0.0, 0.1]}, r"time_step_limit: got \[0.0, 0.1\], which"),
    ("nemotron_h", {"use_bias": True}, "use_bias: got True, which is not supported"),
    ("nemotron_h", {"mamba_num_heads": 5}, "mamba_num_heads: got 5, .* multiple of the 8 groups"),
    *((name, {}, "got .*, wanted one of: llama, mist") for name in (None, ["llama"], 7)),
]
DECODERS: list[tuple[str, dict[str, Any], str]] = [
    ("qwen3", {"rotary_percentage": 0.5}, "qk_layernorm=True, rotary_percentage=0.5"),
    ("exaone4_window", {"no_rope_freq": 2}, "no_rope_freq: got 2, .* the layers without"),
    ("glm", {"window_size": 5}, "window_size=5, which does not belong to the family glm"),
    ("olmo2", {"pre_layernorms": True}, "qk_layernorm_across_heads=True, post_layernorms=True"),
    ("granite", {"qkv_bias": True}, "qkv_bias=True, embedding_multiplier=3.0"),
    ("gemma", {"window_size": 5}, "window_size=5, which does not belong to any family"),
    ("qwen2", {"qk_layernorm": True}, "qkv_bias=True, qk_layernorm=True"),
    ("nemotron", {"activation": "swiglu"}, "normalization=layernorm1p"),
    ("smollm3", {"qk_layernorm": True}, "qk_layernorm=True, no_rope_freq=2"),
    ("hunyuan", {"qkv_bias": True}, "qk_norm_after_rope=True, which does not belong to any"),
    ("gpt_neox", {"num_query_groups": 2}, "got 2 and 16, but a .* always has as many groups"),
    ("starcoder2", {"parallel_residual": True}, "parallel_residual=True, which does not belong to"),
    ("cohere", {"kv_channels": 8}, "kv_channels: got 8, wanted 16 .hidden_size / "),
    ("cohere2", {"no_rope_freq": None}, "no_rope_freq: got None, but in a Cohere 2 exactly"),
    ("deepseek_v3", {"latent_layernorm_epsilon": 1e-5}, "latent_layernorm_epsilon: got 1e-05, but"),
    ("deepseek_v2", {"moe_layer_freq": [1, 0, 1, 1]}, "moe_layer_freq=.*does not belong to the"),
    ("gpt_oss", {"proj_bias": False}, "attention_sinks=True, which does not belong to any family"),
    ("gpt_oss", {"ffn_hidden_size": 48}, "got 40, but ffn_hidden_size is 48"),
    ("nemotron_h", {"no_rope_freq": None}, "hybrid_pattern=M-\\*M, which does not belong to any"),
    ("llama3", {"seq_len_interpolation_factor": 2.0}, r"seq_len_interpolation_factor=2\.0 and"),
]


def test_family_config_that_cannot_be_carried_is_refused() -> None:
    """Unsupported settings of Hugging Face and decoders that fit no family are refused."""
    with refusals() as refused:
        for name, changes, pattern in REFUSED:
            with refused((name, changes), pattern):
                find_family(name).to_nemo({**SIZES, **changes})
        for case, changes, pattern in DECODERS:
            config = {**nemo_config(case), **changes}
            with refused((case, changes), pattern):
                family_of(config).to_hf(config)


@pytest.mark.parametrize("case", ["mixtral", "qwen3_5_moe", "qwen3_next", "nemotron_h_moe"])
def test_family_of_experts_reads_those_that_are_stored_as_one(case: str, tmp_path: Path) -> None:
    """transformers 5 can write fused experts; a Mixtral's router then has another name."""
    families.write_hf_checkpoint(tmp_path / "single", case)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "single")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    tiny.write_tokenizer(tmp_path / "fused")
    down = "3.mixer" if case == "nemotron_h_moe" else "0.mlp"
    assert f"model.layers.{down}.experts.down_proj" in load_file(
        tmp_path / "fused/model.safetensors"
    )
    for name in ("single", "fused"):
        convert(tmp_path / name, tmp_path / f"{name}.nemo")
    with open_nemo(tmp_path / "single.nemo") as single, open_nemo(tmp_path / "fused.nemo") as fused:
        stored = single.store.tensors
        assert fused.store.tensors == stored
        assert all(torch.equal(single.store.read(k), fused.store.read(k)) for k in stored)


def test_family_config_of_old_keys_reads_the_same() -> None:
    llama3 = dict(family_cases.LLAMA3_ROPE)
    base = llama3.pop("rope_theta")
    gelu = {"hidden_act": "gelu", "hidden_activation": None}
    half = {"rope_theta": base, "rope_parameters": {**llama3, "rope_theta": None}}
    new = {"rope_parameters": family_cases.LLAMA3_ROPE}
    no_layer = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 4}
    for name, older, newer in (
        ("llama", {"rope_theta": base, "rope_scaling": llama3}, new),
        ("llama", half, new),
        ("gemma", gelu, {}),
        ("qwen2", no_layer, {}),
    ):
        actual, expected = (find_family(name).to_nemo({**SIZES, **keys}) for keys in (older, newer))
        assert actual == expected, (name, older)
    uncapped = {**SIZES, "attn_logit_softcapping": None, "sliding_window": 5}
    assert find_family("gemma2").to_nemo(uncapped)["attn_logit_softcapping"] is None
    smollm = {**SIZES, "tie_word_embeddings": True, "rope_theta": 100000}
    nemo = find_family("llama").to_nemo(smollm)
    assert nemo["share_embeddings_and_output_weights"]
    assert family_of(nemo).to_hf(nemo)["rope_theta"] == 100000


def test_family_layers_may_alternate_where_they_are_named() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    config = {**SIZES, "use_sliding_window": True, "sliding_window": WINDOW, "layer_types": kinds}
    shape = ModelShape.from_config(find_family("qwen3").to_nemo(config))
    assert [shape.window_of(layer) for layer in (1, 2, 3, 4)] == [WINDOW, None, WINDOW, None]


def test_family_layers_have_the_windows_of_transformers_where_none_are_named() -> None:
    for name in ("qwen2", "qwen3", "qwen2_moe"):
        for limit in (0, 3, 28):
            window = {"sliding_window": WINDOW, "max_window_layers": limit}
            given = {**SIZES, "use_sliding_window": True, **window}
            full = AutoConfig.for_model(name, **given).to_dict()
            shapes = [
                ModelShape.from_config(find_family(name).to_nemo(config))
                for config in (given, full)
            ]
            assert shapes[0] == shapes[1], (name, limit)
    windows = [shapes[0].window_of(layer) for layer in (1, 2, 3, 4)]
    assert windows == [WINDOW, None, WINDOW, None]


def test_family_takes_a_null_size_of_heads_and_other_names_as_transformers_does() -> None:
    for name, given in (
        ("seed_oss", {"head_dim": None}),
        ("ernie4_5", {"head_dim": None}),
        ("ernie4_5_moe", {"num_experts": 8, "num_experts_per_tok": 3}),
        ("ernie4_5_moe", {"num_experts_per_tok": 3, "moe_k": 2}),
    ):
        full = AutoConfig.for_model(name, **SIZES, **given).to_dict()
        to_nemo = find_family(name).to_nemo
        assert to_nemo({**SIZES, **given}) == to_nemo(full) != to_nemo(SIZES), name


def test_family_nemotron_h_prefers_the_other_names_of_its_keys() -> None:
    """As transformers' class does, also where a config has both names."""
    usual = {"n_groups": 8, "conv_kernel": 4, "use_conv_bias": True, "time_step_min": 0.001}
    others = {
        "mamba_n_groups": 2,
        "mamba_d_conv": 3,
        "mamba_conv_bias": False,
        "mamba_dt_min": 0.01,
        "layer_types": ["linear_attention", "full_attention", "mlp", "linear_attention"],
    }
    family = find_family("nemotron_h")
    for given in ({**SIZES, **others}, {**SIZES, **usual, **others}):
        full = AutoConfig.for_model("nemotron_h", **given).to_dict()
        actual = family.to_nemo(given)
        assert actual == family.to_nemo(full)
        assert actual["hybrid_override_pattern"] == "M*-M"
        shape = ModelShape.from_config(actual).linear_attention
        assert shape.num_key_heads == 2
        assert (shape.conv_kernel, shape.conv_bias, shape.least_step) == (3, False, 0.01)


def test_family_rules_come_apart_as_they_were_put_together() -> None:
    """Joining and splitting are inverse, also for Gemma's norms, which store gamma - 1."""
    for case in CASES:
        family = find_family(CASES[case]["model_type"])
        state = families.single_experts(family, nemo_config(case), model(case).state_dict())
        for zero_centered in (False, True):
            config = {**nemo_config(case), "layernorm_zero_centered_gamma": zero_centered}
            names: list[str] = []
            for rule, _ in family.rules(config):
                names += rule.hf
                parts = [state[name] for name in rule.hf]
                again = rule.split(rule.join(parts, config), config)
                for actual, expected in zip(again, parts, strict=True):
                    # Adding 1 has rounded off the last bits.
                    torch.testing.assert_close(actual, expected, atol=2e-7, rtol=0)
                    assert "norm" in rule.megatron or torch.equal(actual, expected)
            untied = set(family.untied.hf) if model(case).config.tie_word_embeddings else set()
            assert set(names) == state.keys() - untied, case
            assert len(names) == len(set(names)), case


def test_family_gammas_are_stored_plain_unless_the_config_says_otherwise() -> None:
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


def test_family_biases_of_query_groups_have_zeros_added() -> None:
    config = nemo_config("qwen2")
    rule = find("self_attention.linear_qkv.bias", QWEN2.layer)
    bias = rule.join([torch.ones(rows) for rows in (64, 32, 32)], config)
    padded = add_zero_groups(rule.group_axis, bias, 2, 3)
    assert padded.shape == (3 * (2 + 2) * 16,)
    assert padded[: bias.numel()].equal(bias)
    assert not padded[bias.numel() :].any()
    assert remove_zero_groups(rule.group_axis, padded, 3, 2).equal(bias)
    with pytest.raises(CheckpointError, match=r"got \[64, 16, 16\] rows, .* \[64, 32, 32\]"):
        rule.join([torch.zeros(rows) for rows in (64, 16, 16)], config)


def test_family_qkv_is_interleaved_by_group_and_comes_apart_again() -> None:
    heads, groups, size = 4, 2, 3
    query = torch.arange(heads * size * 5).reshape(heads * size, 5)
    key, value = (
        offset + torch.arange(groups * size * 5).reshape(-1, 5) for offset in (1000, 2000)
    )
    packed = pack_qkv(query, key, value, heads, groups)
    assert packed.shape == ((heads + 2 * groups) * size, 5)
    torch.testing.assert_close(packed[: 2 * size], query[: 2 * size])
    torch.testing.assert_close(packed[2 * size : 3 * size], key[:size])
    torch.testing.assert_close(packed[3 * size : 4 * size], value[:size])
    for actual, expected in zip(
        unpack_qkv(packed, heads, groups), (query, key, value), strict=True
    ):
        torch.testing.assert_close(actual, expected)


# One of each kind of decoder, attention and feed-forward layer.
IN_FP32 = (
    "llama3", "gemma2", "phi3_window", "mixtral", "deepseek_v3", "qwen3_5", "nemotron_h",
    "gpt_neox",
)  # fmt: skip


@pytest.mark.parametrize(
    ("case", "is_odd"), [*((c, False) for c in IN_FP32), *((c, True) for c in CASES)]
)
def test_family_export_is_what_was_converted(
    case: str, is_odd: bool, layout: Any, tmp_path: Path
) -> None:
    """An export in bf16 has the converted tensors, whatever a library rounds to 16 bits itself.

    Every case has odd sizes in bf16; some also have other sizes in fp32.
    """
    dtype = torch.bfloat16 if is_odd else torch.float32
    shape = families.odd_settings(case) if is_odd else {}
    families.write_reward_model(tmp_path / "there", case, dtype, **shape)
    # Two or three query groups; a group of zeros is added, and removed by the export. Latent
    # attention without a latent of queries takes no more heads than divide its latents, and a Gemma
    # 4 takes no groups of zeros.
    tensor_parallel = 2 if is_odd else 3
    if case == "deepseek_v3_untied" or case.startswith("gemma4"):
        tensor_parallel = 1
    convert(tmp_path / "there", tmp_path / "rm.nemo", tensor_parallel=tensor_parallel)
    summary = export(tmp_path / "rm.nemo", tmp_path / "back", layout)
    # The export has compared samples that are longer than any window.
    assert summary.largest_difference < 2e-5
    there, back = (load_file(tmp_path / name / "model.safetensors") for name in ("there", "back"))
    family = find_family(CASES[case]["model_type"])
    there = {family.published_name(name): tensor for name, tensor in there.items()}
    assert there.keys() == back.keys()
    for name, tensor in there.items():
        expected = tensor.float() if name == "score.weight" else tensor
        assert torch.equal(back[name], expected), name


def test_family_export_is_named_and_scaled_as_vllm_reads_it(layout: Any, tmp_path: Path) -> None:
    """The export has the names and scales that vLLM reads; test_export_heads.py runs vLLM."""
    scaling = {"original_max_position_embeddings": 16, "beta": 0.5}
    for case, name, expected in (
        ("gemma3", "architectures", ["Gemma3ForSequenceClassification"]),
        ("ministral3", "llama_4_scaling", scaling),
    ):
        families.write_reward_model(tmp_path / case, case, torch.float32)
        convert(tmp_path / case, tmp_path / f"{case}.nemo")
        export(tmp_path / f"{case}.nemo", tmp_path / f"{case}.out", layout)
        assert config_of(tmp_path / f"{case}.out")[name] == expected


def test_family_of_longrope_as_released(layout: Any, tmp_path: Path) -> None:
    """LongRoPE as released: an older name, and the original length outside ``rope_scaling``."""
    rope = {
        "rope_type": "su",
        "short_factor": [1.0 + 0.1 * index for index in range(8)],
        "long_factor": [4.0] * 8,
    }
    source = tmp_path / "hf"
    families.write_reward_model(source, "phi3_untied", torch.float32)
    edit(source, rope_scaling=rope, original_max_position_embeddings=100, rope_parameters=None)
    convert(source, tmp_path / "rm.nemo")
    assert export(tmp_path / "rm.nemo", tmp_path / "back", layout).largest_difference < 2e-5
    exported = AutoConfig.from_pretrained(tmp_path / "back").rope_parameters
    assert {key: exported[key] for key in rope} == {**rope, "rope_type": "longrope"}
    assert exported["original_max_position_embeddings"] == 100
    # transformers 4 accepts no other keys.
    assert config_of(tmp_path / "back")["rope_scaling"] == {
        "type": "longrope",
        "short_factor": rope["short_factor"],
        "long_factor": rope["long_factor"],
    }


def test_family_with_windows_is_exported_without_one(layout: Any, tmp_path: Path) -> None:
    """transformers' classes compute the mask of a window that no layer has, which needs a size."""
    full = ["full_attention"] * 4
    families.write_reward_model(tmp_path / "hf", "gemma2", torch.float32, layer_types=full)
    convert(tmp_path / "hf", tmp_path / "rm.nemo")
    assert export(tmp_path / "rm.nemo", tmp_path / "out", layout).largest_difference < 2e-5
    assert config_of(tmp_path / "out")["layer_types"] == full
    for case in ("gemma2", "gemma3", "gemma4", "ministral", "olmo3", "cohere2", "gpt_oss"):
        family = find_family(families.hf_config(case).model_type)
        settings = families.hf_config(case, layer_types=full).to_dict()
        exported = family.to_hf(family.to_nemo(settings))
        assert exported["sliding_window"] is not None, case
        assert family.to_nemo(exported).get("window_size") is None, case


def test_family_of_llama3_rope_takes_the_original_length_from_the_top() -> None:
    """As transformers does for llama3, yarn and longrope."""
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    key, top = "original_max_position_embeddings", {"original_max_position_embeddings": 64}
    family, settings = find_family("llama"), {**tiny.SHAPE, "model_type": "llama"}
    for rope, outside, length in (
        ({**llama3, key: 32}, {}, 32),
        ({**llama3, key: 32}, top, 64),
        (llama3, top, 64),
        (llama3, {}, tiny.SHAPE["max_position_embeddings"]),
    ):
        config = {**settings, **outside, "rope_scaling": rope}
        assert family.to_nemo(config)["old_context_len"] == length
        theirs = AutoConfig.for_model(**deepcopy(config))
        theirs.standardize_rope_params()
        assert theirs.rope_parameters[key] == length


def test_family_without_a_class_in_transformers_has_a_card_whose_program_scores(
    layout: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    families.write_reward_model(tmp_path / "hf", "granite", torch.float32)
    convert(tmp_path / "hf", tmp_path / "rm.nemo")
    export(tmp_path / "rm.nemo", tmp_path / "out", layout)
    config = config_of(tmp_path / "out")
    assert config["architectures"] == ["GraniteForSequenceClassification"]
    _, _, program = (tmp_path / "out/README.md").read_text().partition("```python\n")
    monkeypatch.chdir(tmp_path)
    variables: dict[str, Any] = {}
    exec(program.partition("```")[0], variables)
    expected = score_all(load_scorer(tmp_path / "rm.nemo", layout), [variables["conversation"]])
    np.testing.assert_allclose(variables["rewards"].numpy(), expected, atol=1e-5, rtol=0)
    # The export can be converted to a reward model again.
    back = convert(tmp_path / "out", tmp_path / "back.nemo")
    assert back.contract is not None


def test_family_of_a_dynamic_rotation_is_exported(layout: Any, tmp_path: Path) -> None:
    """The comparison has a sample longer than the model's context, which RoPE extends."""
    rope = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0}
    source, longest = tmp_path / "hf", tiny.SHAPE["max_position_embeddings"]
    families.write_reward_model(source, "llama", torch.float32, rope_parameters=rope)
    summary = convert(source, tmp_path / "usual.nemo")
    assert summary.contract is not None
    assert summary.contract.seq_length == longest
    convert(source, tmp_path / "rm.nemo", seq_length=longest + 9)
    assert export(tmp_path / "rm.nemo", tmp_path / "back", layout).largest_difference < 2e-5
    assert AutoConfig.from_pretrained(tmp_path / "back").rope_parameters == rope
