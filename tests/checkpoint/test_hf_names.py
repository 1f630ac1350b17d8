"""Name tables: configs and tensors of every family, there and back, and what is refused."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from nemo_aligner.checkpoint.hf.families import family_of, find_family
from nemo_aligner.checkpoint.hf.families.gemma2 import GEMMA2
from nemo_aligner.checkpoint.hf.families.query_groups import add_zero_groups, remove_zero_groups
from nemo_aligner.checkpoint.hf.families.qwen2 import QWEN2
from nemo_aligner.checkpoint.hf.families.rules import Rule
from nemo_aligner.errors import CheckpointError
from nemo_aligner.models.shape import ModelShape
from tests import families, tiny
from tests.families import CASES, WINDOW

every_case = pytest.mark.parametrize("case", CASES)
# What every config.json says.
SIZES = {
    key: value
    for key, value in tiny.SHAPE.items()
    if key not in ("rms_norm_eps", "tie_word_embeddings")
}
NAMES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "nemotron")


@cache
def model(case: str) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(families.hf_config(case), attn_implementation="eager")
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return made.eval()


def nemo_config(case: str) -> dict[str, Any]:
    return find_family(CASES[case]["model_type"]).to_nemo(model(case).config.to_dict())


@every_case
def test_transformers_reads_a_config_that_came_back_as_the_same_model(case: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = nemo_config(case)
    family = find_family(CASES[case]["model_type"])
    assert family.to_nemo(family.to_hf(config)) == config
    # A Mistral without a window is a Llama.
    of_this = family_of(config)
    assert of_this.name == ("llama" if case == "mistral" else family.name)
    for back in (family.to_hf(config), of_this.to_hf(config)):
        again = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**back), attn_implementation="eager"
        ).eval()
        again.load_state_dict(model(case).state_dict())
        tokens = torch.arange(5, 60)[None]
        with torch.no_grad():
            # The cap of an LM head's logits is not the decoder's.
            wanted, found = (each.model(tokens).last_hidden_state for each in (model(case), again))
        assert wanted.std() > 0.1
        assert torch.equal(found, wanted)


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


def find(megatron: str, rules: tuple[Rule, ...]) -> Rule:
    (rule,) = [rule for rule in rules if rule.megatron == megatron]
    return rule


@pytest.mark.parametrize("name", NAMES)
def test_what_a_config_leaves_out_is_as_transformers_has_it(name: str) -> None:
    from transformers import AutoConfig

    family = find_family(name)
    full = AutoConfig.for_model(name, **SIZES).to_dict()
    assert family.to_nemo(SIZES) == family.to_nemo(full)


def test_older_keys_read_the_same() -> None:
    llama3 = dict(families.LLAMA3_ROPE)
    base = llama3.pop("rope_theta")
    old = {**SIZES, "rope_theta": base, "rope_scaling": llama3}
    new = {**SIZES, "rope_parameters": families.LLAMA3_ROPE}
    assert find_family("llama").to_nemo(old) == find_family("llama").to_nemo(new)
    half = {"rope_theta": base, "rope_parameters": {**llama3, "rope_theta": None}}
    assert find_family("llama").to_nemo({**SIZES, **half}) == find_family("llama").to_nemo(new)
    gemma = find_family("gemma")
    older = {**SIZES, "hidden_act": "gelu", "hidden_activation": None}
    assert gemma.to_nemo(older) == gemma.to_nemo(SIZES)
    qwen = find_family("qwen2")
    uncapped = {**SIZES, "attn_logit_softcapping": None, "sliding_window": 5}
    assert find_family("gemma2").to_nemo(uncapped)["attn_logit_softcapping"] is None
    kinds = {**SIZES, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 4}
    assert qwen.to_nemo(kinds) == qwen.to_nemo(SIZES)


def test_layers_may_alternate_in_any_family_that_names_them() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    config = {**SIZES, "use_sliding_window": True, "sliding_window": WINDOW, "layer_types": kinds}
    shape = ModelShape.from_config(find_family("qwen3").to_nemo(config))
    assert [shape.window_of(layer) for layer in (1, 2, 3, 4)] == [WINDOW, None, WINDOW, None]


@pytest.mark.parametrize(
    ("name", "changes", "complaint"),
    [
        ("mixtral", {}, "got 'mixtral', a mixture of experts, wanted one of: llama, mistral"),
        ("qwen3_moe", {}, "got 'qwen3_moe', a mixture of experts"),
        ("smollm3", {}, "got 'smollm3', wanted one of: llama, mistral"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, "layer_types: got"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers: got"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "a window of None and 4 layers"),
        ("qwen3", {"attention_bias": True}, "attention_bias: got True"),
        ("qwen3", {"layer_types": ["full_attention"] * 3}, "a window of None and 4 layers"),
        ("mistral", {"layer_types": ["full_attention"] * 4}, "layer_types: got"),
        ("mistral", {"sliding_window": 0}, "sliding_window: got 0"),
        ("llama", {"num_hidden_layers": 10**12}, "num_hidden_layers: got 10{12}, wanted .*"),
        ("llama", {"vocab_size": 320.5}, "vocab_size: got 320.5, wanted a whole number from 1 on"),
        ("llama", {"rope_theta": "x"}, "rope_theta: got 'x'"),
        ("llama", {"rope_scaling": [1]}, r"rope_parameters: got \[1\]"),
        ("llama", {"num_key_value_heads": 3}, "num_query_groups: got 3, wanted a divisor of the 4"),
        ("gemma", {"hidden_activation": "relu"}, "hidden_activation: got 'relu'"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention: got True"),
        ("gemma2", {"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types"),
        ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping: got 0.0"),
        ("nemotron", {"hidden_act": "silu"}, "hidden_act: got 'silu'"),
        ("nemotron", {"mlp_bias": True}, "mlp_bias: got True"),
        ("qwen2", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type: got"),
    ],
)
def test_what_cannot_be_carried_is_refused(
    name: str, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        find_family(name).to_nemo({**SIZES, **changes})


@pytest.mark.parametrize(
    ("case", "changes", "complaint"),
    [
        ("llama", {"rotary_percentage": 0.5}, "a decoder with rotary_percentage=0.5"),
        ("gemma", {"window_size": 5}, "window_size=5, which is not of any family"),
        ("qwen2", {"qk_layernorm": True}, "qkv_bias=True, qk_layernorm=True"),
        ("nemotron", {"activation": "swiglu"}, "normalization=layernorm1p"),
        ("mistral_untied_window", {"window_pattern": "alternate"}, "window_pattern=alternate"),
    ],
)
def test_a_decoder_of_no_family_is_refused(
    case: str, changes: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(CheckpointError, match=complaint):
        family_of({**nemo_config(case), **changes})


def test_two_rotations_at_once_have_no_name() -> None:
    config = {**nemo_config("llama3"), "seq_len_interpolation_factor": 2.0}
    with pytest.raises(CheckpointError, match=r"seq_len_interpolation_factor=2\.0 and"):
        family_of(config).to_hf(config)


@pytest.mark.parametrize("model_type", [None, "mamba", ["llama"], 7])
def test_unknown_model_types_are_named(model_type: Any) -> None:
    with pytest.raises(CheckpointError, match=r"model_type: got .*, wanted one of: llama, mistral"):
        find_family(model_type)


def test_groups_that_the_config_does_not_have_are_refused() -> None:
    config = nemo_config("qwen2")
    rule = find("self_attention.linear_qkv.bias", QWEN2.layer)
    parts = [torch.zeros(rows) for rows in (64, 16, 16)]
    with pytest.raises(CheckpointError, match=r"got \[64, 16, 16\] rows, wanted \[64, 32, 32\]"):
        rule.join(parts, config)


def test_added_groups_have_biases_of_zeros() -> None:
    config = nemo_config("qwen2")
    rule = find("self_attention.linear_qkv.bias", QWEN2.layer)
    bias = rule.join([torch.ones(rows) for rows in (64, 32, 32)], config)
    padded = add_zero_groups(rule.megatron, bias, 2, 3)
    assert padded.shape == (3 * (2 + 2) * 16,)
    assert padded[: bias.numel()].equal(bias)
    assert not padded[bias.numel() :].any()
    assert remove_zero_groups(rule.megatron, padded, 3, 2).equal(bias)


@pytest.mark.skipif(
    find_spec("transformer_engine") is not None, reason="TransformerEngine is installed"
)
def test_megatron_core_carries_no_experts_yet() -> None:
    """Why Mixtral and Qwen's mixtures are refused; once this fails, they need not be."""
    router = import_module("megatron.core.transformer.moe.moe_utils").router_gating_linear
    with pytest.raises(NameError, match="te_general_gemm"):
        router(torch.ones(1, 4), torch.ones(2, 4), None, torch.float32)


def test_smollm_is_a_llama() -> None:
    config = {**SIZES, "model_type": "llama", "tie_word_embeddings": True, "rope_theta": 100000}
    nemo = find_family(config["model_type"]).to_nemo(config)
    assert nemo["share_embeddings_and_output_weights"]
    assert family_of(nemo).to_hf(nemo)["rope_theta"] == 100000
