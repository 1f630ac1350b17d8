"""Rules of tensors that several families have under the same names."""

from __future__ import annotations

from collections.abc import Callable

from nemo_aligner.checkpoint.hf.families.rules import Rule, norm_rule, qkv_rule, stacked_rule

FINAL_NORM = "decoder.final_layernorm.weight"
ATTENTION_NORM = "self_attention.linear_qkv.layer_norm_weight"
MLP_NORM = "mlp.linear_fc1.layer_norm_weight"

EMBEDDING = Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",))
OUTPUT = Rule("output_layer.weight", ("lm_head.weight",))
PROJECTION = Rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",))
GATED = stacked_rule("mlp.linear_fc1.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight")
DOWN = Rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight",))


def _qkv(kind: str) -> Rule:
    query, key, value = (f"self_attn.{part}_proj.{kind}" for part in "qkv")
    return qkv_rule(f"self_attention.linear_qkv.{kind}", query, key, value)


QKV, QKV_BIAS = _qkv("weight"), _qkv("bias")


def model_rules_with(norm: Callable[[str, str], Rule]) -> tuple[Rule, ...]:
    """Outside the layers: the embeddings, and the last norm."""
    return (EMBEDDING, norm(FINAL_NORM, "model.norm.weight"))


def layer_rules_with(
    norm: Callable[[str, str], Rule], mlp: tuple[Rule, ...] = (GATED, DOWN)
) -> tuple[Rule, ...]:
    """A layer with a norm before attention, and one before the MLP, as Llama calls them."""
    return (
        norm(ATTENTION_NORM, "input_layernorm.weight"),
        QKV,
        PROJECTION,
        norm(MLP_NORM, "post_attention_layernorm.weight"),
        *mlp,
    )


MODEL, LAYER = model_rules_with(norm_rule), layer_rules_with(norm_rule)
