"""Settings of the tiny models of every supported family, by the name of the case."""

from __future__ import annotations

from typing import Any

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
# Heads of whole vectors, as cpu/gated_delta.c needs them; torch computes those of DELTA_NET.
VECTOR_DELTA_NET = {**DELTA_NET, "linear_key_head_dim": 32, "linear_value_head_dim": 48}
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
MAMBA = {
    "head_dim": 32,
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "ssm_state_size": 16,
    "n_groups": 2,
}
GEMMA4 = {
    "model_type": "gemma4_text",
    # Queries and keys are normed, and scores are not scaled, so wide heads have sharp scores.
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 0,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 1000.0,
            "partial_rotary_factor": 0.5,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
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
    "qwen3_5": {"model_type": "qwen3_5_text", **VECTOR_DELTA_NET},
    "qwen3_5_untied": {
        "model_type": "qwen3_5_text",
        **VECTOR_DELTA_NET,
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
    "nemotron_h": {
        "model_type": "nemotron_h",
        **MAMBA,
        # The last layer has a state, and the stages of a pipeline have other kinds.
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
        "tie_word_embeddings": False,
    },
    "nemotron_h_moe": {
        "model_type": "nemotron_h",
        **MAMBA,
        **GROUPED_EXPERTS,
        # The second stage of a pipeline has neither attention nor states.
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe"],
        "moe_shared_expert_intermediate_size": 40,
        "use_conv_bias": False,
        "routed_scaling_factor": 2.5,
        "tie_word_embeddings": False,
    },
    "gemma4": {
        **GEMMA4,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "gemma4_small": {
        **GEMMA4,
        # Layers 3 and 4 read the keys of layers 1 and 2.
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": tiny.SHAPE["vocab_size"],
    },
    "gemma4_moe": {
        **GEMMA4,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 4,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 3,
        "moe_intermediate_size": 32,
    },
}
# Cases whose gradients are compared in fp64. In fp32 rounding moves those of transformers by up to
# 2.6e-5 of a tensor's largest, and ours as far: decays (Gated DeltaNet) and the factors of xIELU
# (Apertus) get sums that nearly cancel, and unscaled scores (Gemma 4) enlarge rounding. In fp64
# both sides are within 4e-14.
IN_FP64 = [
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "gemma4",
    "gemma4_small",
    "gemma4_moe",
    "apertus",
]
