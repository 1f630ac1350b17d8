"""Errors for models of unsupported families: what is missing, and which families are similar.

``_REASONS`` explains the values of ``model_type`` that transformers knows. For any other model, the
keys of its ``config.json`` tell what it has in common with supported families.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from nemo_aligner.utils.errors import CheckpointError, shown

# Why models are not supported, with the transformers' model_types to which each reason applies,
# separated by spaces.
_REASONS = {
    "state-space layers (Mamba) are not supported": "mamba mamba2 falcon_mamba",
    "layers with Mamba-2 and other parts are not supported, only those of nemotron_h": (
        "bamba falcon_h1 granitemoehybrid jamba zamba zamba2"
    ),
    "recurrent layers of this kind are not supported": "recurrent_gemma rwkv xlstm",
    "layers of short convolutions are not supported": "lfm2 lfm2_moe lfm3",
    "this kind of linear attention is not supported": "kimi_linear minimax olmo_hybrid",
    "it is an encoder-decoder; a reward model needs a decoder": (
        "bart blenderbot longt5 mbart mt5 pegasus switch_transformers t5 t5gemma t5gemma2 umt5"
    ),
    "it is an encoder; a reward model needs a decoder with causal attention": (
        "albert bert deberta deberta-v2 distilbert electra eurobert modernbert mpnet nomic_bert "
        "roberta xlm-roberta xlnet"
    ),
    "learned position embeddings are not supported, only RoPE": (
        "biogpt gpt2 gpt_bigcode gpt_neo openai-gpt opt"
    ),
    "sinusoidal position embeddings are not supported, only RoPE": "ctrl xglm",
    "ALiBi is not supported, only RoPE": "bloom mpt",
    "biases of some linear layers only are not supported": "codegen gpt_neox_japanese gptj",
    "its layouts of fused queries, keys and values are not supported": "falcon",
    "a bias of the output layer is not supported": "phi",
    "LayerNorms of queries and keys are not supported": "persimmon stablelm",
    "norms without weights are not supported": "nanochat olmo",
    "differential attention is not supported": "diffllama",
    "norms inside attention and MLP, and ternary weights, are not supported": "bitnet",
    "the kind of its router is not supported (sparse mixer)": "phimoe",
    "sparse attention, where an index chooses the keys, is not supported": (
        "deepseek_v32 deepseek_v4 glm_moe_dsa"
    ),
    "chunked attention and its layout of experts are not supported": "llama4 llama4_text",
    "its kind of router or of experts is not supported": (
        "afmoe dbrx dots1 exaone_moe flex_olmo granitemoe granitemoeshared "
        "hunyuan_v1_moe jetmoe longcat_flash mimo_v2_flash minimax_m2 solar_open"
    ),
    "latent attention with experts and scaled queries is not supported": "mistral4",
    "latent attention with scaled embeddings is not supported": "minicpm3",
    "embeddings in every layer are not supported": "gemma3n_text",
    "Gemma 2 without norms of the outputs of attention and MLP is not supported": ("vaultgemma"),
}
_REASON_BY_NAME = {name: reason for reason, names in _REASONS.items() for name in names.split()}

# Keys of a ``config.json`` that reveal a kind of layer; the name of that kind; supported families
# that have such layers.
_KINDS: tuple[tuple[tuple[str, ...], str, tuple[str, ...]], ...] = (
    (
        ("kv_lora_rank",),
        "latent attention",
        ("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
    ),
    (
        ("linear_num_key_heads",),
        "linear attention",
        ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"),
    ),
    (
        ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
        "experts",
        ("mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "glm4_moe", "deepseek_v3", "gpt_oss"),
    ),
    (("attn_logit_softcapping",), "soft caps of attention scores", ("gemma2",)),
    (
        # The last three are MiniCPM's.
        (
            "embedding_multiplier",
            "residual_multiplier",
            "scale_emb",
            "scale_depth",
            "dim_model_base",
        ),
        "multipliers",
        ("granite",),
    ),
    (("no_rope_layers", "no_rope_layer_interval"), "layers without RoPE", ("smollm3",)),
    (("use_qk_norm", "qk_layernorm", "qk_norm"), "norms of queries and keys", ("qwen3",)),
    (("sliding_window",), "sliding windows", ("mistral", "qwen3", "olmo3")),
    (
        ("use_parallel_residual", "parallel_attn"),
        "attention and MLP in parallel",
        ("gpt_neox", "cohere", "cohere2"),
    ),
    (("partial_rotary_factor",), "RoPE over a part of a head's channels", ("glm4", "nemotron")),
)
# Keys of a ``config.json`` that reveal a feature that no family supports, with its name.
_MISSING = {
    "mamba_d_state": "state-space layers",
    "ssm_state_size": "state-space layers",
    "ssm_cfg": "state-space layers",
    "state_size": "state-space layers",
    "is_encoder_decoder": "an encoder-decoder",
    "alibi": "ALiBi",
    "n_positions": "learned position embeddings",
    "index_topk": "sparse attention",
}
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "vocab_size",
)
_NEXT_STEP = (
    "A model whose layers equal those of a supported family can be registered by register_family "
    "(docs/extending.md)"
)


def unsupported_model(
    model_type: Any, config: Mapping[str, Any], names: Collection[str]
) -> CheckpointError:
    """Build the one-line error for a model that belongs to no supported family.

    Args:
        model_type: ``model_type`` in ``config``, of any type.
        config: the model's ``config.json``.
        names: names of the supported families.
    """
    start = f"model_type: got {shown(model_type)}"
    if not isinstance(model_type, str):
        return CheckpointError(f"{start}, wanted one of: {', '.join(names)}")
    reason = _REASON_BY_NAME.get(model_type)
    lacks = f": {reason}" if reason else _describe_missing(config)
    near = _describe_near(model_type, config, names)
    return CheckpointError(f"{start}, which is not supported{lacks}. {near}{_NEXT_STEP}")


def _describe_missing(config: Mapping[str, Any]) -> str:
    """Name unsupported features of a config, and required sizes that it lacks; "" if none."""
    parts = [f"{missing} ({key})" for key, missing in _MISSING.items() if config.get(key)]
    described = f": no family has {', '.join(parts)}" if parts else ""
    absent = [key for key in _SIZES if config.get(key) is None]
    if absent:
        described += f"{';' if parts else ':'} its config.json lacks {', '.join(absent)}"
    return described


def _describe_near(model_type: str, config: Mapping[str, Any], names: Collection[str]) -> str:
    """Describe, for the error, families with a similar name or the same kinds of layers."""
    near = [f"{' and '.join(has)} for {kind}" for kind, has in _shared_kinds(config, names)]
    similar = get_close_matches(model_type, names, n=3, cutoff=0.6)
    if similar:
        near.insert(0, f"{', '.join(similar)} by the name")
    if not near and all(config.get(key) is not None for key in _SIZES):
        near.append("llama, because its config.json has no key of another family")
    return f"Near families: {'; '.join(near)}. " if near else ""


def _shared_kinds(
    config: Mapping[str, Any], names: Collection[str]
) -> Iterator[tuple[str, list[str]]]:
    """Yield the kinds of layers that a config's keys reveal, with the families that have them."""
    for keys, kind, families in _KINDS:
        key = next((key for key in keys if config.get(key)), None)
        supported = [name for name in families if name in names]
        if key is not None and supported:
            yield f"{kind} ({key})", supported
