"""What several sections of the settings have in common: enumerations, and the checks of values."""

from __future__ import annotations

from enum import Enum

from nemo_aligner.errors import ConfigError


class RecordKind(Enum):
    """What one record of a data file is."""

    comparison = "comparison"  # two replies, of which one was chosen
    rating = "rating"  # a reply with a label for each attribute


class RewardModelType(Enum):
    """What a reward model is trained for; its records are what it learns from."""

    binary_ranking = "binary_ranking"
    regression = "regression"

    @property
    def record_kind(self) -> RecordKind:
        """Comparisons or ratings."""
        return RecordKind.rating if self is RewardModelType.regression else RecordKind.comparison


class Overlong(Enum):
    drop = "drop"
    truncate_left = "truncate_left"
    error = "error"


class Precision(Enum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


def require(condition: bool, key: str, got: object, wanted: str) -> None:
    if not condition:
        raise ConfigError(f"{key}: got {got!r}, wanted {wanted}")


def require_positive(section: str, owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        require(value is None or value > 0, f"{section}.{name}", value, "a number above 0")
