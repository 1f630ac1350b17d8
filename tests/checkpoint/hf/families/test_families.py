"""The registry, and the configs of every family: there and back, and what is refused."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from nemo_aligner.checkpoint.hf.families import family_of, find_family
from nemo_aligner.errors import CheckpointError
from tests.checkpoint.hf.families.models import SIZES, every_case, model, nemo_config
from tests.families import CASES

NAMES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "nemotron")


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


@pytest.mark.parametrize("name", NAMES)
def test_what_a_config_leaves_out_is_as_transformers_has_it(name: str) -> None:
    from transformers import AutoConfig

    family = find_family(name)
    full = AutoConfig.for_model(name, **SIZES).to_dict()
    assert family.to_nemo(SIZES) == family.to_nemo(full)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
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
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        find_family(name).to_nemo({**SIZES, **changes})


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("llama", {"rotary_percentage": 0.5}, "a decoder with rotary_percentage=0.5"),
        ("gemma", {"window_size": 5}, "window_size=5, which is not of any family"),
        ("qwen2", {"qk_layernorm": True}, "qkv_bias=True, qk_layernorm=True"),
        ("nemotron", {"activation": "swiglu"}, "normalization=layernorm1p"),
        ("mistral_untied_window", {"window_pattern": "alternate"}, "window_pattern=alternate"),
    ],
)
def test_a_decoder_of_no_family_is_refused(
    case: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        family_of({**nemo_config(case), **changes})


@pytest.mark.parametrize("model_type", [None, "mamba", ["llama"], 7])
def test_unknown_model_types_are_named(model_type: Any) -> None:
    with pytest.raises(CheckpointError, match=r"model_type: got .*, wanted one of: llama, mistral"):
        find_family(model_type)


@pytest.mark.skipif(
    find_spec("transformer_engine") is not None, reason="TransformerEngine is installed"
)
@pytest.mark.skipif(
    not version("megatron-core").startswith("0.16."),
    reason="since megatron-core 0.17 its router needs no TransformerEngine",
)
def test_megatron_core_carries_no_experts_yet() -> None:
    """Why Mixtral and Qwen's mixtures are refused while 0.16 is allowed."""
    router = import_module("megatron.core.transformer.moe.moe_utils").router_gating_linear
    with pytest.raises(NameError, match="te_general_gemm"):
        router(torch.ones(1, 4), torch.ones(2, 4), None, torch.float32)


def test_smollm_is_a_llama() -> None:
    config = {**SIZES, "model_type": "llama", "tie_word_embeddings": True, "rope_theta": 100000}
    nemo = find_family(config["model_type"]).to_nemo(config)
    assert nemo["share_embeddings_and_output_weights"]
    assert family_of(nemo).to_hf(nemo)["rope_theta"] == 100000
