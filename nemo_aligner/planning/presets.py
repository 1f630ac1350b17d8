"""Shapes of well-known models, so that ``nemo-aligner plan`` needs no checkpoint."""

from __future__ import annotations

from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.utils.errors import ConfigError

# name, layers, hidden size, MLP width, heads, query groups, channels of a head, vocabulary size
_SHAPES = {
    "1B": ("Llama 3.2 1B", 16, 2048, 8192, 32, 8, 64, 128256),
    "3B": ("Llama 3.2 3B", 28, 3072, 8192, 24, 8, 128, 128256),
    "7B": ("Llama 2 7B", 32, 4096, 11008, 32, 32, 128, 32000),
    "8B": ("Llama 3 8B", 32, 4096, 14336, 32, 8, 128, 128256),
    "13B": ("Llama 2 13B", 40, 5120, 13824, 40, 40, 128, 32000),
    "70B": ("Llama 3 70B", 80, 8192, 28672, 64, 8, 128, 128256),
    "405B": ("Llama 3 405B", 126, 16384, 53248, 128, 8, 128, 128256),
}
PRESETS = tuple(_SHAPES)


def preset(params: str) -> tuple[ModelShape, str]:
    """Return the shape and the name of a Llama model by its size, such as ``8B``.

    Raises:
        ConfigError: ``params`` is none of ``PRESETS``.
    """
    presets = {size.lower(): values for size, values in _SHAPES.items()}
    if params.lower() not in presets:
        raise ConfigError(f"params: got {params}, wanted one of {', '.join(PRESETS)}")
    name, layers, hidden, ffn, heads, groups, channels, vocabulary = presets[params.lower()]
    config = {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": channels,
        "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
    }
    return ModelShape.from_config(config), name
