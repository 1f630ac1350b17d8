"""Layers of the reward head, read from ``model_config.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nemo_aligner.config.common import MAX_COUNT, read_count
from nemo_aligner.config.model import HeadConfig
from nemo_aligner.utils.errors import CheckpointError, shown

# Key in ``model_config.yaml``. Models whose head is one matrix, and older archives, lack it.
_KEY = "reward_head"


@dataclass(frozen=True)
class HeadShape:
    """Layers of a reward head.

    Attributes:
        bias: every layer has a bias.
        mlp_size: width of the hidden layer; None is a single linear layer.
    """

    bias: bool = False
    mlp_size: int | None = None

    @classmethod
    def from_settings(cls, config: HeadConfig) -> HeadShape | None:
        """Convert the settings to a shape; None for a head of one matrix."""
        head = cls(config.bias, config.mlp_size)
        return None if head == cls() else head

    def tensors(self, outputs: int, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the head's tensors by their names after ``rm_head.``"""
        width = hidden_size if self.mlp_size is None else self.mlp_size
        shapes: dict[str, tuple[int, ...]] = {"weight": (outputs, width)}
        if self.mlp_size is not None:
            shapes["hidden.weight"] = (self.mlp_size, hidden_size)
        if self.bias:
            biases = {name.replace("weight", "bias"): size[:1] for name, size in shapes.items()}
            shapes |= biases
        return shapes

    def __str__(self) -> str:
        parts = ["linear" if self.mlp_size is None else f"two layers of {self.mlp_size}"]
        return " ".join([*parts, *(["with bias"] * self.bias)])


def read_head_shape(config: Mapping[str, Any]) -> HeadShape | None:
    """Read the head's shape from a model config; None for a head of one matrix.

    Raises:
        CheckpointError: the section has an unknown key or a value out of range.
    """
    section = config.get(_KEY)
    if section is None:
        return None
    location = f"model_config.yaml: {_KEY}"
    if not isinstance(section, Mapping) or not set(section) <= set(asdict(HeadShape())):
        raise CheckpointError(f"{location}: got {shown(section)}, wanted bias and mlp_size only")
    bias, size = section.get("bias", False), section.get("mlp_size")
    if not isinstance(bias, bool):
        raise CheckpointError(f"{location}.bias: got {shown(bias)}, wanted true or false")
    if size is not None:
        size = read_count(size, f"{location}.mlp_size", f"a whole number from 1 to {MAX_COUNT}")
    head = HeadShape(bias, size)
    return None if head == HeadShape() else head


def with_head_shape(config: Mapping[str, Any], head: HeadShape | None) -> dict[str, Any]:
    """Return a copy of a model config that describes ``head``; None removes the section."""
    remaining = {key: value for key, value in config.items() if key != _KEY}
    return remaining if head is None else {**remaining, _KEY: asdict(head)}


def head_to_train(
    stored: HeadShape | None, settings: HeadConfig, *, is_new: bool
) -> HeadShape | None:
    """Choose the shape of the head to train.

    It is the shape in the settings. If they have none, a new head is one matrix, and a head that is
    not new keeps the checkpoint's shape, ``stored``.
    """
    requested = HeadShape.from_settings(settings)
    return stored if requested is None and not is_new else requested


def check_is_linear(head: HeadShape | None, location: str, format_name: str) -> None:
    """Check that the head is one matrix, because ``format_name`` can store no other head.

    Raises:
        CheckpointError: the head has a hidden layer. The message names the file ``location``.
    """
    if head is not None and head.mlp_size is not None:
        raise CheckpointError(
            f"{location}: its head is {head}, wanted one matrix, as {format_name} stores no other"
        )
