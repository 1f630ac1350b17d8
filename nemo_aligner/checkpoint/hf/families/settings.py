"""A ``config.json`` of Hugging Face, read key by key; every error names the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_aligner.config.numbers import LEAST_NUMBER, MOST, MOST_NUMBER, read_count, read_number
from nemo_aligner.errors import CheckpointError, shown

Config = Mapping[str, Any]
# Far more than any model has: a config may ask for a list of them, before a weight is looked at.
_MOST_LAYERS = 10_000


class HfSettings:
    """Reads a ``config.json``; a key that is null counts as absent.

    Raises:
        CheckpointError: from every method: the value is not supported; it names the key.
    """

    def __init__(self, config: Config) -> None:
        self.config = config

    def number(self, key: str, default: float | None = None) -> Any:
        """A number above 0."""
        value = self.config.get(key)
        wanted = f"a number above 0, from {LEAST_NUMBER} to {MOST_NUMBER}"
        return read_number(default if value is None else value, key, wanted)

    def count(self, key: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        """A whole number."""
        value = self.config.get(key)
        wanted = f"a whole number from {least} on, at most {most}"
        return read_count(default if value is None else value, key, wanted, least, most)

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.config.get(key)
        if not isinstance(value, bool | None):
            raise CheckpointError(f"{key}: got {shown(value)}, wanted true or false")
        return default if value is None else value

    def layers(self) -> int:
        """``num_hidden_layers``."""
        return self.count("num_hidden_layers", most=_MOST_LAYERS)

    def window(self) -> int | None:
        """``sliding_window``, whose null is none, and whose absence is 4096."""
        is_null = self.config.get("sliding_window", 4096) is None
        return None if is_null else self.count("sliding_window", 4096)

    def only(self, key: str, *allowed: Any) -> None:
        """Refuse any value but ``allowed``; the first one is the default."""
        value = self.config.get(key, allowed[0])
        if value not in allowed:
            wanted = " or ".join(repr(choice) for choice in allowed)
            raise CheckpointError(
                f"{key}: got {shown(value)}, which is not supported; wanted {wanted}"
            )
