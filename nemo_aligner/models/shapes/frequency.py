"""A choice of some of a model's layers, read from ``model_config.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_aligner.config.common import MAX_COUNT
from nemo_aligner.utils.errors import CheckpointError, shown

Frequency = int | tuple[int, ...] | None
"""A choice of layers as in megatron-core: every N-th, or a 0 or 1 for each; None means no layer."""


def read_frequency(config: Mapping[str, Any], key: str) -> Frequency:
    """Read a key that chooses layers: N for every N-th, or a list with 0 or 1 for each layer.

    Raises:
        CheckpointError: the value is neither of them.
    """
    value, layers = config.get(key), config.get("num_layers")
    if value is None or (type(value) is int and 0 < value <= MAX_COUNT):
        return value
    marks = value if isinstance(value, list | tuple) else ()
    if len(marks) == layers and all(type(mark) in (int, bool) and 0 <= mark <= 1 for mark in marks):
        return tuple(map(int, marks))
    raise CheckpointError(
        f"model_config.yaml: {key}: got {shown(value)}, wanted a number N for every N-th layer, or "
        f"0 or 1 for each of the {layers} layers"
    )


def is_in(frequency: Frequency, layer_number: int, mark: int) -> bool:
    """Tell if ``frequency`` chooses a layer.

    Args:
        layer_number: number of the layer, from 1.
        mark: 0 or 1, whichever marks a chosen layer if ``frequency`` is a list.
    """
    if isinstance(frequency, tuple):
        return frequency[layer_number - 1] == mark
    return frequency is not None and layer_number % frequency == 0
