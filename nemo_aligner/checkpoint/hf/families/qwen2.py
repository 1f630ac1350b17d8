"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nemo_aligner.checkpoint.hf.families.decoder import decoder_to_hf, decoder_to_nemo
from nemo_aligner.checkpoint.hf.families.family import ANY_WINDOW
from nemo_aligner.checkpoint.hf.families.gguf_format import GgufFormat
from nemo_aligner.checkpoint.hf.families.layer_names import LAYER, QKV_BIAS
from nemo_aligner.checkpoint.hf.families.llama import LLAMA
from nemo_aligner.checkpoint.hf.families.settings import Config, HfSettings
from nemo_aligner.checkpoint.hf.families.windows import FULL, SLIDING, layer_types, window_to_nemo
from nemo_aligner.models.shape import ModelShape


def qwen_to_nemo(config: Config, **family: Any) -> dict[str, Any]:
    """A Qwen's ``config.json``: a window, if it is used, in the layers behind the first ones."""
    read = HfSettings(config)
    read.only("hidden_act", "silu", "swish")
    layers, size = read.layers(), None
    kinds = [FULL] * layers
    if read.flag("use_sliding_window", False):
        size = read.window()
    if size is not None:
        without = read.count("max_window_layers", 28, least=0)
        kinds = [FULL if layer < without else SLIDING for layer in range(layers)]
    return decoder_to_nemo(config, **family, **window_to_nemo(config, size, kinds))


def qwen_window_to_hf(config: Config) -> dict[str, Any]:
    """The keys of ``config.json`` that say which layers of a Qwen have a window."""
    window = ModelShape.from_config(config).window_size
    kinds = layer_types(config)
    return {
        "use_sliding_window": window is not None,
        "sliding_window": window,
        "max_window_layers": kinds.count(FULL),
        "layer_types": kinds,
    }


def _to_nemo(config: Config) -> dict[str, Any]:
    return qwen_to_nemo(config, qkv_bias=True)


def _to_hf(config: Config) -> dict[str, Any]:
    return decoder_to_hf(config, "qwen2", **qwen_window_to_hf(config))


QWEN2 = replace(
    LLAMA,
    name="qwen2",
    to_nemo=_to_nemo,
    to_hf=_to_hf,
    layer=(*LAYER, QKV_BIAS),
    made_of={"qkv_bias": True, **ANY_WINDOW},
    gguf=GgufFormat("qwen2"),
)
