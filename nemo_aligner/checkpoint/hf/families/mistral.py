"""Mistral: Llama with a window in all layers, or in none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nemo_aligner.checkpoint.hf.families.decoder import decoder_to_hf, decoder_to_nemo
from nemo_aligner.checkpoint.hf.families.family import ANY
from nemo_aligner.checkpoint.hf.families.llama import LLAMA
from nemo_aligner.checkpoint.hf.families.settings import Config, HfSettings
from nemo_aligner.checkpoint.hf.families.windows import window_everywhere
from nemo_aligner.models.shape import ModelShape


def _to_nemo(config: Config) -> dict[str, Any]:
    read = HfSettings(config)
    read.only("hidden_act", "silu", "swish")
    read.only("layer_types", None)
    size = read.window()
    return decoder_to_nemo(config, **({} if size is None else window_everywhere(size)))


def _to_hf(config: Config) -> dict[str, Any]:
    window = ModelShape.from_config(config).window_size
    return decoder_to_hf(config, "mistral", sliding_window=window)


MISTRAL = replace(
    LLAMA,
    name="mistral",
    to_nemo=_to_nemo,
    to_hf=_to_hf,
    made_of={"window_size": ANY},
    gguf=None,  # llama.cpp writes a Llama
)
