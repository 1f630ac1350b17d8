"""Building blocks of all settings: enumerations, ``setting`` (declares a field), ``Checks``.

``read_count``, ``read_number`` and the ``*_of_config`` functions check numbers that come from
checkpoints, such as the hidden size in NeMo's ``model_config.yaml``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import field
from enum import Enum
from math import inf, nan, nextafter
from typing import Any, TypeAlias, TypeVar

from nemo_aligner.utils.errors import CheckpointError, SettingsError, shown

T = TypeVar("T")
# Key in the metadata of a dataclass field; its value is the setting's line in ``--help``.
HELP = "help"
# The largest seed of numpy's RandomState.
MAX_SEED = 2**32 - 1
MAX_PORT = 2**16 - 1
# The smallest float above 0. ``require_range`` also accepts its bounds, so "above 0" uses this one.
_ABOVE_0 = nextafter(0.0, 1.0)
BLOCK_TOKENS = 16
"""Tokens per block of the prefix cache, which stores keys and values in whole blocks."""
PREFIX_CACHE_STATES = 32
"""Default of ``server.prefix_cache_states``."""


class RecordKind(Enum):
    """The two kinds of records in data files: compared replies, and replies with labels."""

    comparison = "comparison"  # a chosen and a rejected reply
    rating = "rating"  # a reply with a label for each attribute


class Aggregate(Enum):
    """The rule that combines the rewards of a sample's turns or steps into one reward.

    ``product`` multiplies the probabilities that the steps are right; for its formula see
    ``aggregate_steps`` in ``contract/steps.py``.
    """

    last = "last"
    min = "min"
    mean = "mean"
    product = "product"


class RewardModelType(Enum):
    """The task of a reward model: to rank the replies of a pair, or to predict labels."""

    binary_ranking = "binary_ranking"
    regression = "regression"

    @property
    def record_kind(self) -> RecordKind:
        """The kind of records that training on this task needs."""
        return RecordKind.rating if self is RewardModelType.regression else RecordKind.comparison


class Overlong(Enum):
    """The rule for a sample of more than ``seq_length`` tokens.

    ``truncate_left`` keeps its last tokens; ``drop`` skips the sample; ``error`` stops.
    """

    drop = "drop"
    truncate_left = "truncate_left"
    error = "error"


class Malformed(Enum):
    """The rule for a record that cannot be read: stop with an error, or skip the record."""

    error = "error"
    drop = "drop"


class Contradicting(Enum):
    """The rule for pairs of a file that prefer opposite replies to the same prompt."""

    keep = "keep"
    drop = "drop"


class Precision(Enum):
    """Dtype of a model's weights and activations."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


IneffectiveRule: TypeAlias = tuple[Mapping[str, Any], tuple[str, ...]]
"""A mapping from settings to values, and the keys that have no effect if all of these match."""
ANY = object()
"""In an ``IneffectiveRule``: matches every value except null."""
RANKS = "processes"
"""In an ``IneffectiveRule``: a key that stands for the number of ranks instead of a setting."""


def setting(default: T, help_text: str) -> T:
    """Declare a setting as a field of the dataclass of its section.

    Args:
        default: default value; a list or mapping is copied for every instance.
        help_text: the setting's line in ``--help``.
    """
    metadata = {HELP: help_text}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def as_yaml(value: Any) -> str:
    """Return the value of a setting as YAML in one line, for messages and ``--help``."""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {as_yaml(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_yaml, value))}]"
    return str(value)


class Checks:
    """Context manager that checks the values of one section.

    The ``require`` methods do not raise; they collect problems. At its end, the ``with`` block
    raises all of them as one error, so that a user sees every invalid setting at once.

    Args:
        prefix: the section's key, which error messages begin with.
        section: the section's dataclass instance.

    Raises:
        SettingsError: at the end of the block; ``problems`` has a line for each failed check.
    """

    def __init__(self, prefix: str, section: object) -> None:
        self._prefix = f"{prefix}." if prefix else ""
        self._section = section
        self._problems: list[str] = []

    def __enter__(self) -> Checks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *unused: object) -> None:
        if kind is None and self._problems:
            raise SettingsError(self._problems)

    def require(self, condition: bool, name: str, expected: str) -> None:
        """Record a problem unless the condition holds.

        Args:
            name: key of the setting without the section's prefix; may contain dots.
            expected: what the value should be, for the error message.
        """
        if not condition:
            value = self._section
            for part in name.split("."):
                value = getattr(value, part)
            printable = value.value if isinstance(value, Enum) else value
            self._problems.append(f"{self._prefix}{name}: got {printable!r}, wanted {expected}")

    def require_range(self, minimum: float, maximum: float, expected: str, *names: str) -> None:
        """Require that settings are null, or from ``minimum`` to ``maximum``; NaN is rejected.

        Args:
            expected: what the values should be, for the error message.
            names: keys of the settings without the section's prefix.
        """
        for name in names:
            value = getattr(self._section, name)
            self.require(value is None or minimum <= value <= maximum, name, expected)

    def require_positive(self, *names: str) -> None:
        """Require that the settings ``names`` are null or above 0."""
        self.require_range(_ABOVE_0, inf, "a number above 0", *names)

    def require_not_negative(self, *names: str) -> None:
        """Require that the settings ``names`` are null, or 0 or more."""
        self.require_range(0, inf, "0 or more", *names)

    def require_prefix_cache(self, name: str) -> None:
        """Require that a prefix cache has 0 tokens, or at least a block of ``BLOCK_TOKENS``."""
        tokens = getattr(self._section, name)
        expected = f"0 (no cache), or at least {BLOCK_TOKENS} (one block)"
        self.require(tokens == 0 or tokens >= BLOCK_TOKENS, name, expected)

    def require_finite(self, *names: str) -> None:
        """Require that the settings ``names`` are not infinite; ``require_range`` rejects NaN."""
        for name in names:
            self.require(getattr(self._section, name) != inf, name, "a finite number")

    def require_seed(self, name: str) -> None:
        """Require a seed that numpy and torch accept; numpy has the smaller maximum."""
        self.require_range(0, MAX_SEED, f"a whole number from 0 to {MAX_SEED}", name)

    def require_port(self, name: str) -> None:
        """Require a TCP port to listen on; 0 is any free port."""
        self.require_range(0, MAX_PORT, f"0 (any free port) to {MAX_PORT}", name)

    def require_one_token(self, name: str) -> None:
        """Require that a bearer token has at most one source: a file or a variable.

        The settings are called ``NAME_file`` and ``NAME_variable`` for the ``name`` NAME.
        """
        file, variable = f"{name}_file", f"{name}_variable"
        at_most_one = (
            getattr(self._section, file) is None or getattr(self._section, variable) is None
        )
        self.require(at_most_one, variable, f"a {file} or a {variable}, not both")

    def require_fraction(self, *names: str) -> None:
        """Require that the settings ``names`` are from 0 to 1."""
        self.require_range(0, 1, "a number from 0 to 1", *names)


# Checks of numbers in files of other programs: configs of models, headers of weights.

# Bounds far beyond any real model. Without them a wrong number would be noticed late, as an
# overflow.
MAX_COUNT = 2**31
MIN_NUMBER, MAX_NUMBER = 1e-12, 1e12


def read_count(
    value: object, location: str, expected: str, minimum: int = 1, maximum: int = MAX_COUNT
) -> int:
    """Return ``value`` if it is a whole number from ``minimum`` to ``maximum``.

    Args:
        location: file and key, for the error message.
        expected: what the value should be, for the error message.

    Raises:
        CheckpointError: the value is not an int, or is out of range.
    """
    return _read_in_range(value, location, expected, (int,), minimum, maximum)


def read_number(
    value: object,
    location: str,
    expected: str,
    minimum: float = MIN_NUMBER,
    maximum: float = MAX_NUMBER,
) -> float:
    """Return ``value`` if it is an int or float from ``minimum`` to ``maximum``.

    For the arguments see ``read_count``.

    Raises:
        CheckpointError: the value is not a number, is out of range, or is NaN.
    """
    return _read_in_range(value, location, expected, (int, float), minimum, maximum)


def count_of_config(config: Mapping[str, Any], key: str, default: Any = None) -> int:
    """Read a whole number above 0 from the content of a ``model_config.yaml``.

    Args:
        default: the value for a key that is null or missing; None makes this an error.

    Raises:
        CheckpointError: see ``read_count``.
    """
    value = config.get(key)
    expected = f"a whole number above 0 and of at most {MAX_COUNT}"
    return read_count(default if value is None else value, f"model_config.yaml: {key}", expected)


def number_of_config(config: Mapping[str, Any], key: str, default: float) -> float:
    """Read a number above 0 from the content of a ``model_config.yaml``.

    Args:
        default: the value for a key that is null or missing.

    Raises:
        CheckpointError: see ``read_number``.
    """
    value = config.get(key)
    expected = f"a number above 0, from {MIN_NUMBER} to {MAX_NUMBER}"
    value = default if value is None else value
    return float(read_number(value, f"model_config.yaml: {key}", expected))


def optional_number_of_config(config: Mapping[str, Any], key: str) -> float | None:
    """Read a number above 0 from a ``model_config.yaml``; None if it is null or missing."""
    return None if config.get(key) is None else number_of_config(config, key, nan)


def _read_in_range(
    value: Any,
    location: str,
    expected: str,
    types: tuple[type, ...],
    minimum: float,
    maximum: float,
) -> Any:
    # ``isinstance`` would accept True as an int.
    if type(value) not in types or not minimum <= value <= maximum:
        raise CheckpointError(f"{location}: got {shown(value)}, wanted {expected}")
    return value
