"""Llama, and SmolLM, which is one."""

from __future__ import annotations

from typing import Any

from nemo_aligner.checkpoint.hf.families.decoder import decoder_to_hf, decoder_to_nemo
from nemo_aligner.checkpoint.hf.families.family import ModelFamily
from nemo_aligner.checkpoint.hf.families.gguf_format import GgufFormat
from nemo_aligner.checkpoint.hf.families.layer_names import LAYER, MODEL, OUTPUT
from nemo_aligner.checkpoint.hf.families.settings import Config, HfSettings


def _to_nemo(config: Config) -> dict[str, Any]:
    read = HfSettings(config)
    read.only("hidden_act", "silu", "swish")
    read.only("sliding_window", None)
    return decoder_to_nemo(config)


def _to_hf(config: Config) -> dict[str, Any]:
    return decoder_to_hf(config, "llama", attention_bias=False, mlp_bias=False)


LLAMA = ModelFamily(
    name="llama",
    to_nemo=_to_nemo,
    to_hf=_to_hf,
    model=MODEL,
    layer=LAYER,
    untied=OUTPUT,
    # Mistral's files have this name, too, without a word on its window.
    gguf=GgufFormat("llama", is_permuted=True),
    unused=("rotary_emb.inv_freq",),
)
