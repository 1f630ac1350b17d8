"""Sliding windows, as ``config.json`` and as ``model_config.yaml`` describe them."""

from __future__ import annotations

from typing import Any

from nemo_aligner.checkpoint.hf.families.settings import Config
from nemo_aligner.errors import CheckpointError, shown
from nemo_aligner.models.shape import ModelShape

SLIDING, FULL = "sliding_attention", "full_attention"


def window_to_nemo(config: Config, size: int | None, kinds: list[str]) -> dict[str, Any]:
    """NeMo's keys of a window of ``size`` keys, in the layers that ``layer_types`` names.

    ``kinds``, one for each layer, are ``layer_types`` where the config has none.

    Raises:
        CheckpointError: the layers that have it are not all, none, or every other one.
    """
    count, kinds = len(kinds), config.get("layer_types") or kinds
    if kinds == [FULL] * count:
        return {}
    if size is not None and kinds == [SLIDING] * count:
        return window_everywhere(size)
    if size is not None and kinds == alternating_layers(count):
        return {"window_size": size, "window_pattern": "alternate"}
    raise CheckpointError(
        f"layer_types: got {shown(kinds)}, a window of {size} and {count} layers, which is not "
        "supported; wanted a window in all layers, in none, or in the first, the third, and so on"
    )


def window_everywhere(size: int) -> dict[str, Any]:
    """NeMo's keys of a window in every layer."""
    return {"window_size": size, "window_pattern": "all"}


def alternating_layers(layers: int) -> list[str]:
    """``layer_types`` of a model whose first, third, ... layers have the window."""
    return [FULL if layer % 2 else SLIDING for layer in range(layers)]


def layer_types(config: Config) -> list[str]:
    """``layer_types`` of a NeMo config."""
    shape = ModelShape.from_config(config)
    windows = [shape.window_of(layer + 1) for layer in range(shape.num_layers)]
    return [FULL if window is None else SLIDING for window in windows]
