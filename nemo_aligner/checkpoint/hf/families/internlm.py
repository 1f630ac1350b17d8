"""InternLM2, as its reward models are published: Llama under other names, with q, k and v fused.

Names and the order of ``wqkv`` (the queries of a group, its key, its value: Megatron's own) are
those of ``modeling_internlm2.py`` in those models' folders. transformers has no such class, so
exports of it are Llama's.
"""

from __future__ import annotations

from typing import Any

from nemo_aligner.checkpoint.hf.families.base import (
    ATTENTION_NORM,
    FINAL_NORM,
    MLP_NORM,
    ModelFamily,
    Rule,
    norm_rule,
    stacked_rule,
)
from nemo_aligner.checkpoint.hf.families.llama import LLAMA
from nemo_aligner.checkpoint.hf.families.settings import Config, HfSettings, decoder_to_nemo


def _to_nemo(config: Config) -> dict[str, Any]:
    read = HfSettings(config)
    read.only("hidden_act", "silu", "swish")
    # Absent, it is true in their class.
    HfSettings({"bias": True, **config}).only("bias", False)
    return decoder_to_nemo(config)


INTERNLM2 = ModelFamily(
    name="internlm2",
    to_nemo=_to_nemo,
    to_hf=LLAMA.to_hf,
    model=(
        Rule("embedding.word_embeddings.weight", ("model.tok_embeddings.weight",)),
        norm_rule(FINAL_NORM, "model.norm.weight"),
    ),
    layer=(
        norm_rule(ATTENTION_NORM, "attention_norm.weight"),
        Rule("self_attention.linear_qkv.weight", ("attention.wqkv.weight",)),
        Rule("self_attention.linear_proj.weight", ("attention.wo.weight",)),
        norm_rule(MLP_NORM, "ffn_norm.weight"),
        stacked_rule("mlp.linear_fc1.weight", "feed_forward.w1.weight", "feed_forward.w3.weight"),
        Rule("mlp.linear_fc2.weight", ("feed_forward.w2.weight",)),
    ),
    untied=Rule("output_layer.weight", ("output.weight",)),
    unused=("rotary_emb.inv_freq",),
)
