"""What a reward head is made of, where it is more than one matrix; without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nemo_aligner.config.model import HeadConfig
from nemo_aligner.config.numbers import MOST, read_count
from nemo_aligner.errors import CheckpointError, shown

# Of ``model_config.yaml``; heads of one matrix have no such key.
_KEY = "reward_head"


@dataclass(frozen=True)
class HeadShape:
    """A head with a bias, or of two layers.

    Attributes:
        bias: every layer has one.
        mlp_size: width of the layer between; None is a linear map.
    """

    bias: bool = False
    mlp_size: int | None = None

    @classmethod
    def from_settings(cls, config: HeadConfig) -> HeadShape | None:
        """None for a head of one matrix."""
        head = cls(config.bias, config.mlp_size)
        return None if head == cls() else head

    def tensors(self, outputs: int, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """The shape of each of its tensors, by the names behind ``rm_head.``"""
        width = hidden_size if self.mlp_size is None else self.mlp_size
        found: dict[str, tuple[int, ...]] = {"weight": (outputs, width)}
        if self.mlp_size is not None:
            found["hidden.weight"] = (self.mlp_size, hidden_size)
        if self.bias:
            biases = {name.replace("weight", "bias"): size[:1] for name, size in found.items()}
            found |= biases
        return found

    def __str__(self) -> str:
        parts = ["linear" if self.mlp_size is None else f"two layers of {self.mlp_size}"]
        return " ".join([*parts, *(["with bias"] * self.bias)])


def read_head_shape(config: Mapping[str, Any]) -> HeadShape | None:
    """What a model config says; None for a head of one matrix.

    Raises:
        CheckpointError: a value is none that a head could have.
    """
    section = config.get(_KEY)
    if section is None:
        return None
    where = f"model_config.yaml: {_KEY}"
    if not isinstance(section, Mapping) or not set(section) <= set(asdict(HeadShape())):
        raise CheckpointError(f"{where}: got {shown(section)}, wanted bias and mlp_size")
    bias, size = section.get("bias", False), section.get("mlp_size")
    if not isinstance(bias, bool):
        raise CheckpointError(f"{where}.bias: got {shown(bias)}, wanted true or false")
    if size is not None:
        size = read_count(size, f"{where}.mlp_size", f"a whole number from 1 to {MOST}")
    head = HeadShape(bias, size)
    return None if head == HeadShape() else head


def with_head_shape(config: Mapping[str, Any], head: HeadShape | None) -> dict[str, Any]:
    """A model config of the same decoder with this head."""
    others = {key: value for key, value in config.items() if key != _KEY}
    return others if head is None else {**others, _KEY: asdict(head)}


def check_is_linear(head: HeadShape | None, where: str, who: str) -> None:
    """Refuse a head that is not one matrix.

    Raises:
        CheckpointError: it names the file ``where``, and ``who`` has no place for more.
    """
    if head is not None:
        raise CheckpointError(
            f"{where}: its head is {head}, wanted one matrix: {who} has no place for more"
        )
