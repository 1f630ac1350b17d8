"""The names of a reward model's outputs, where a checkpoint does not say them itself."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_aligner.errors import ConfigError


def attribute_names(given: Sequence[str], count: int) -> tuple[str, ...]:
    """The names that were given for ``count`` outputs, without the spaces around them.

    Raises:
        ConfigError: they are too few or too many, or one is empty or there twice.
    """
    names = tuple(name.strip() for name in given)
    if len(names) != count or len(set(names)) != count or not all(names):
        raise ConfigError(f"attributes: got {list(names)}, wanted {count} different names")
    return names
