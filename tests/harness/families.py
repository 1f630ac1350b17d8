"""Tiny random models of every supported family, whose norms and biases are not the defaults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nemo_aligner.batch.packed import Group
from tests.harness import tiny

WINDOW = 8
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 1.0,
    "beta_slow": 0.1,
}
GEMMA2 = {
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": WINDOW,
    "attn_logit_softcapping": 2.0,
}
DELTA_NET = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
GROUPED_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3}
# Models by name, each with 4 layers and hidden size 64; the values are fields of its config.json.
CASES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama_untied": {"model_type": "llama", "tie_word_embeddings": False},
    "llama3": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE},
    "llama_linear": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    },
    "llama_yarn": {"model_type": "llama", "rope_parameters": YARN_ROPE},
    "llama_dynamic": {
        "model_type": "llama",
        # One of SEQUENCES has this length, and one is longer; the latter shares a prefix.
        "max_position_embeddings": 52,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 8.0},
    },
    "qwen2": {"model_type": "qwen2"},
    "qwen2_untied_window": {
        "model_type": "qwen2",
        "tie_word_embeddings": False,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "max_window_layers": 0,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3_untied": {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": False},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "mistral_untied_window": {
        "model_type": "mistral",
        "sliding_window": WINDOW,
        "tie_word_embeddings": False,
    },
    "qwen2_yarn": {
        "model_type": "qwen2",
        "rope_parameters": {
            **YARN_ROPE,
            "beta_slow": 0.25,
            "truncate": False,
            "mscale": 2.0,
            "mscale_all_dim": 0.5,
        },
    },
    "ministral": {
        "model_type": "ministral",
        "head_dim": 32,
        "sliding_window": WINDOW,
        "layer_types": ["full_attention", *["sliding_attention"] * 3],
    },
    "ministral3": {
        "model_type": "ministral3",
        "head_dim": 32,
        "rope_parameters": {**YARN_ROPE, "llama_4_scaling_beta": 0.5},
    },
    "smollm3": {"model_type": "smollm3", "pad_token_id": 0, "no_rope_layer_interval": 2},
    "smollm3_untied_window": {
        "model_type": "smollm3",
        "pad_token_id": 0,
        "no_rope_layers": [1, 0, 0, 1],
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "tie_word_embeddings": False,
    },
    "gemma": {"model_type": "gemma", "head_dim": 32},
    "gemma_untied": {"model_type": "gemma", "head_dim": 16, "tie_word_embeddings": False},
    "gemma2": {"model_type": "gemma2", **GEMMA2},
    "gemma2_untied": {"model_type": "gemma2", **GEMMA2, "tie_word_embeddings": False},
    "gemma3": {
        "model_type": "gemma3_text",
        "head_dim": 32,
        "query_pre_attn_scalar": 24,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 3,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "gemma3_untied": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "sliding_window": WINDOW,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "tie_word_embeddings": False,
    },
    "nemotron": {
        "model_type": "nemotron",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
        "norm_eps": 1e-5,
    },
    "nemotron_untied": {
        "model_type": "nemotron",
        "partial_rotary_factor": 0.25,
        "tie_word_embeddings": False,
    },
    "olmo2": {"model_type": "olmo2", "tie_word_embeddings": False},
    "olmo3": {
        "model_type": "olmo3",
        "sliding_window": WINDOW,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 4.0,
        },
        "rope_theta": 1000.0,
    },
    "exaone4": {
        "model_type": "exaone4",
        "sliding_window": None,
        "layer_types": ["full_attention"] * 4,
        "head_dim": 32,
    },
    "exaone4_window": {
        "model_type": "exaone4",
        "sliding_window": WINDOW,
        "sliding_window_pattern": 4,
        "tie_word_embeddings": False,
    },
    "granite": {
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.6,
        "attention_multiplier": 0.35,
        "logits_scaling": 4.0,
    },
    "phi3_window": {
        "model_type": "phi3",
        "sliding_window": WINDOW,
        "partial_rotary_factor": 0.75,
        "pad_token_id": 0,
    },
    "phi3_longrope": {
        "model_type": "phi3",
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.5, 2.0, 2.5],
            "long_factor": [2.0, 4.0, 8.0, 16.0],
        },
        # All but two of SEQUENCES are longer.
        "original_max_position_embeddings": 14,
        "pad_token_id": 0,
    },
    "phi3_untied": {"model_type": "phi3", "tie_word_embeddings": False, "pad_token_id": 0},
    "glm": {"model_type": "glm", "head_dim": 32, "pad_token_id": 0},
    "glm4": {
        "model_type": "glm4",
        "head_dim": 16,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
    },
    "helium": {"model_type": "helium", "head_dim": 16, "tie_word_embeddings": False},
    "arcee": {"model_type": "arcee"},
    "seed_oss": {"model_type": "seed_oss", "head_dim": 32},
    "qwen3_5": {"model_type": "qwen3_5_text", **DELTA_NET},
    "qwen3_5_untied": {
        "model_type": "qwen3_5_text",
        **DELTA_NET,
        # The last layer has a state, and the stages of a pipeline have other kinds.
        "layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2],
        "tie_word_embeddings": False,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **LATENT,
        **GROUPED_EXPERTS,
        "first_k_dense_replace": 1,
    },
    "deepseek_v3_untied": {
        "model_type": "deepseek_v3",
        **LATENT,
        "q_lora_rank": None,
        "first_k_dense_replace": 4,
        "rope_interleave": False,
        "rope_parameters": {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.7},
        "tie_word_embeddings": False,
    },
    "deepseek_v2": {
        "model_type": "deepseek_v2",
        **LATENT,
        **GROUPED_EXPERTS,
        "topk_method": "group_limited_greedy",
        "n_shared_experts": 2,
        "routed_scaling_factor": 4.0,
        "rope_parameters": {**YARN_ROPE, "mscale_all_dim": 0.7},
    },
    "glm4_moe_lite": {
        "model_type": "glm4_moe_lite",
        **LATENT,
        **GROUPED_EXPERTS,
        "n_group": 1,
        "topk_group": 1,
        # As many channels as in a key.
        "v_head_dim": 24,
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        "tie_word_embeddings": False,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **EXPERTS,
        "norm_topk_prob": True,
        "head_dim": 32,
        "moe_intermediate_size": 48,
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        **EXPERTS,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 40,
        "tie_word_embeddings": False,
    },
    "qwen3_moe_dense": {
        "model_type": "qwen3_moe",
        **EXPERTS,
        "norm_topk_prob": True,
        "head_dim": 32,
        "moe_intermediate_size": 40,
        # Layers 1 and 2, a stage of a pipeline of two, have no experts.
        "mlp_only_layers": [0, 1],
    },
    "qwen2_moe_dense": {
        "model_type": "qwen2_moe",
        **EXPERTS,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 40,
        # The last layer has no experts.
        "decoder_sparse_step": 2,
        "mlp_only_layers": [3],
    },
    "mixtral": {
        "model_type": "mixtral",
        "num_local_experts": 4,
        "intermediate_size": 64,
        "sliding_window": WINDOW,
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "first_k_dense_replace": 2,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
        "head_dim": 32,
    },
    "glm4_moe_untied": {
        "model_type": "glm4_moe",
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    "ernie4_5_moe": {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_intermediate_size": 40,
        "moe_num_shared_experts": 2,
        "moe_layer_interval": 2,
    },
    "ernie4_5_moe_unshared": {
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 0,
        "moe_layer_end_index": 2,
        "tie_word_embeddings": False,
    },
    "olmoe": {
        "model_type": "olmoe",
        **EXPERTS,
        "intermediate_size": 32,
        "pad_token_id": 0,
        "eos_token_id": 2,
    },
    "ernie4_5": {"model_type": "ernie4_5", "head_dim": 32, "tie_word_embeddings": False},
    "hunyuan": {"model_type": "hunyuan_v1_dense", "head_dim": 16},
    "hunyuan_alpha": {
        "model_type": "hunyuan_v1_dense",
        "head_dim": 32,
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 100.0,
            "alpha": 50.0,
            "factor": 1.0,
        },
        "tie_word_embeddings": False,
    },
    "gpt_neox": {
        "model_type": "gpt_neox",
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 100.0,
            "partial_rotary_factor": 0.25,
        },
    },
    "gpt_neox_sequential": {
        "model_type": "gpt_neox",
        "use_parallel_residual": False,
        "hidden_act": "gelu_pytorch_tanh",
        "partial_rotary_factor": 0.5,
    },
    "cohere": {"model_type": "cohere"},
    "cohere2": {
        "model_type": "cohere2",
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2],
        "tie_word_embeddings": False,
    },
    "apertus": {
        "model_type": "apertus",
        "head_dim": 32,
        "rope_parameters": LLAMA3_ROPE,
        "tie_word_embeddings": False,
    },
    "starcoder2": {
        "model_type": "starcoder2",
        "hidden_act": "gelu_pytorch_tanh",
        "sliding_window": WINDOW,
    },
    "qwen3_5_moe": {
        "model_type": "qwen3_5_moe_text",
        **DELTA_NET,
        **EXPERTS,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 40,
    },
    "qwen3_next": {
        "model_type": "qwen3_next",
        **DELTA_NET,
        **EXPERTS,
        "norm_topk_prob": False,
        "moe_intermediate_size": 40,
        "shared_expert_intermediate_size": 32,
        # The last layer has a state, and one layer with a state has no experts.
        "layer_types": ["full_attention", *["linear_attention"] * 3],
        "mlp_only_layers": [2],
        "tie_word_embeddings": False,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "head_dim": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 40,
        "sliding_window": WINDOW,
        # Some gates and up projections are beyond it.
        "swiglu_limit": 0.5,
        "rope_parameters": {**YARN_ROPE, "truncate": False},
        "tie_word_embeddings": False,
    },
}


# A case for each model_type.
BODIES = {config["model_type"]: case for case, config in reversed(CASES.items())}

# A shape that reveals rounding errors and swapped axes: the hidden size is neither a square nor a
# power of two, the root of a head's size is not exact in 16 bits, and there are three query groups
# of three heads and an odd vocabulary size.
ODD_SHAPE = {
    "vocab_size": 337,
    "hidden_size": 216,
    "intermediate_size": 152,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 24,
    "initializer_range": 0.06,
}


def odd_settings(case: str) -> dict[str, Any]:
    """Settings that give a case ``ODD_SHAPE``, and adapt the settings that depend on it."""
    config, settings = CASES[case], dict(ODD_SHAPE)
    if "query_pre_attn_scalar" in config:
        settings["query_pre_attn_scalar"] = 29
    if "num_experts" in config or "num_local_experts" in config:
        counts = "num_experts" if "num_experts" in config else "num_local_experts"
        settings |= {counts: 7, "moe_intermediate_size": 44}
    if "moe_num_experts" in config:
        settings |= {"moe_num_experts": 7, "moe_intermediate_size": 44}
    if "n_routed_experts" in config:
        settings |= {"n_routed_experts": 12, "moe_intermediate_size": 44}
    if "kv_lora_rank" in config:
        del settings["head_dim"]
        settings["num_key_value_heads"] = settings["num_attention_heads"]
        settings["kv_lora_rank"] = 28
    rope = config.get("rope_parameters", {})
    if rope.get("rope_type") == "longrope":
        # RoPE needs a factor for each pair of rotated channels.
        factors = [1.1 + 0.3 * pair for pair in range(6)]
        longer = {"short_factor": factors, "long_factor": [1.7 * factor for factor in factors]}
        settings["rope_parameters"] = {**rope, **longer}
    return settings


def hf_config(case: str, **settings: Any) -> Any:
    """The transformers configuration of a case, updated by ``settings``."""
    from transformers import AutoConfig

    shape = {**tiny.SHAPE, "initializer_range": 0.1, **CASES[case], **settings}
    return AutoConfig.for_model(**shape)


def classifier(config: Any) -> Any:
    """transformers' sequence classification class for ``config``; made here where it has none."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, MODEL_MAPPING
    from transformers.modeling_layers import GenericForSequenceClassification

    if type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)]
    base = MODEL_MAPPING[type(config)].__base__
    names = {"config_class": type(config)}
    return type("Classifier", (GenericForSequenceClassification, base), names)


def write_hf_checkpoint(folder: Path, case: str, **settings: Any) -> None:
    """A random causal language model in safetensors, with a tokenizer."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf_config(case, **settings))
    _shift_norms(model)
    model.save_pretrained(folder)
    tiny.write_tokenizer(folder)


def _shift_norms(model: Any) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("proj_bias"):
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
            if name.endswith("A_log"):
                # Drawn as they are, states would be forgotten within a few tokens.
                parameter.sub_(6)
        for name, constant in (*model.named_buffers(), *model.named_parameters()):
            if name.endswith("e_score_correction_bias"):
                constant.add_(torch.randn_like(constant), alpha=0.1)


def internlm2_names(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A Llama's tensors, renamed and fused as in InternLM2's modeling_internlm2.py.

    The rows of ``wqkv`` are groups of several query heads, a key head and a value head.
    """
    outside = {
        "model.embed_tokens.weight": "model.tok_embeddings.weight",
        "model.norm.weight": "model.norm.weight",
        "lm_head.weight": "output.weight",
    }
    inside = {
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    hidden, groups = tiny.SHAPE["hidden_size"], tiny.SHAPE["num_key_value_heads"]
    width = hidden // tiny.SHAPE["num_attention_heads"]
    renamed = {name: tensors[theirs] for theirs, name in outside.items()}
    for layer in range(tiny.SHAPE["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for theirs, name in inside.items():
            renamed[f"{prefix}{name}.weight"] = tensors[f"{prefix}{theirs}.weight"]
        parts = [
            tensors[f"{prefix}self_attn.{part}_proj.weight"].view(groups, -1, width, hidden)
            for part in "qkv"
        ]
        renamed[f"{prefix}attention.wqkv.weight"] = torch.cat(parts, dim=1).reshape(-1, hidden)
    return renamed


def write_reward_model(folder: Path, case: str, dtype: torch.dtype, **settings: Any) -> None:
    """A random reward model of two labels."""
    config = hf_config(case, **settings)
    config.num_labels, config.pad_token_id = 2, 0
    config.problem_type = "regression"
    torch.manual_seed(0)
    model = classifier(config)(config)
    _shift_norms(model)
    model.to(dtype).save_pretrained(folder)
    tiny.write_tokenizer(folder)


def single_experts(
    family: Any, config: Any, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Tensors with the names of files: transformers fuses all experts of a layer in memory."""
    from nemo_aligner.checkpoint.hf.source import split_fused_experts
    from nemo_aligner.checkpoint.weights.save import LazyTensor

    lazy_tensors = {
        name: LazyTensor(tuple(tensor.shape), tensor.dtype, tensor.clone, tensor.__getitem__)
        for name, tensor in tensors.items()
    }
    # In memory transformers gives the output layer of a GPT-NeoX another name, and ERNIE's bias for
    # the choice of experts.
    (output,) = family.untied.hf
    lazy_tensors = {
        output
        if name == "lm_head.weight"
        else name.replace(".gate.moe_statics", ".moe_statics"): lazy
        for name, lazy in lazy_tensors.items()
    }
    renamed = split_fused_experts(family, family.rules(config), lazy_tensors)
    return {name: tensor.read() for name, tensor in renamed.items()}


def write_base_nemo(path: Path, case: str) -> Path:
    """Write a base ``.nemo`` by the converter, from the folder ``path`` with the suffix ``.hf``."""
    from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo

    source = path.with_suffix(".hf")
    write_hf_checkpoint(source, case)
    convert_hf_to_nemo(source, path)
    return path


def _sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)

    def draw(count: int) -> list[int]:
        return torch.randint(3, 300, (count,), generator=generator).tolist()

    first, second = draw(30), draw(12)
    return [
        [*first, *draw(5)],
        [*first, *draw(25)],
        draw(1),
        draw(WINDOW + 1),
        [*second, *draw(40)],
        [*second, *draw(3)],
    ]


# Some are shorter and some longer than the window, which ends inside or before shared prefixes.
SEQUENCES = _sequences()
GROUPS = [Group(2, 30), Group(1, 0), Group(1, 0), Group(2, 12)]
