"""Fields of shapes that checkpoints of earlier versions lack, with the values of their models."""

from __future__ import annotations

# Fields of ``ModelShape`` that older checkpoints lack, with the values that their models have.
ADDED_FIELDS = {
    "qk_layernorm_across_heads": False,
    "pre_layernorms": True,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_output_gate": False,
    "qk_norm_after_rope": False,
    "linear_bias": False,
    "parallel_residual": False,
    "one_norm_per_layer": False,
    "attention_sinks": False,
    "proj_bias": False,
    "has_mixer": True,
    "has_mlp": True,
    "gemma4": None,
    "rope_fp32": None,
}
# Fields of ``ExpertShape`` that older checkpoints lack, with the values that their models have.
ADDED_EXPERT_FIELDS = {
    "score_function": "softmax",
    "expert_bias": False,
    "num_groups": 1,
    "group_topk": 1,
    "scaling_factor": 1.0,
    "has_biases": False,
    "router_bias": False,
    "clamp_value": None,
    "branch_norms": False,
}
