"""Enumerations and value checks that several sections of the settings share."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import field
from enum import Enum
from math import inf, nan, nextafter
from typing import Any, TypeAlias, TypeVar

from nemo_aligner.utils.errors import CheckpointError, SettingsError, shown

T = TypeVar("T")
# Key of a field's metadata: its line in ``--help``.
ABOUT = "about"
# numpy's RandomState takes no larger one.
MAX_SEED = 2**32 - 1
MAX_PORT = 2**16 - 1
# The bounds of a range belong to it, and 0 must not.
_ABOVE_0 = nextafter(0.0, 1.0)
BLOCK_TOKENS = 16
"""Tokens of a block of the prefix cache, which keeps and finds keys and values by whole blocks."""


class RecordKind(Enum):
    """Kind of a record in a data file."""

    comparison = "comparison"  # two replies, of which one was chosen
    rating = "rating"  # a reply with a label for each attribute


class Aggregate(Enum):
    """What one reward of a text is made of where its turns or steps have several."""

    last = "last"
    min = "min"
    mean = "mean"
    product = "product"


class RewardModelType(Enum):
    """Training task of a reward model; it fixes the kind of record that it learns from."""

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


class Malformed(Enum):
    error = "error"
    drop = "drop"


class Contradicting(Enum):
    keep = "keep"
    drop = "drop"


class Precision(Enum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


IdleRule: TypeAlias = tuple[Mapping[str, Any], tuple[str, ...]]
"""Where all settings of the first have these values, those of the second do nothing."""
ANY = object()
"""In an ``IdleRule``: any value but null."""
RANKS = "processes"
"""In an ``IdleRule``: no setting, but how many ranks there are."""


def setting(default: T, about: str) -> T:
    """Declare a field of a section: its default, and its line in ``--help``.

    A list or a mapping is copied for every section.
    """
    metadata = {ABOUT: about}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def as_yaml(value: Any) -> str:
    """A value as YAML writes it, in one line."""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {as_yaml(each)}' for key, each in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(as_yaml, value))}]"
    return str(value)


class Checks:
    """Collector of invalid values in one section, whose keys begin with ``prefix``.

    As a context manager it raises what was found at its end:

    Raises:
        SettingsError: any check failed; it has a line for each.
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

    def require(self, condition: bool, name: str, wanted: str) -> None:
        """Note a problem with ``name`` (dots lead below the section) unless ``condition``."""
        if not condition:
            got = self._section
            for part in name.split("."):
                got = getattr(got, part)
            shown = got.value if isinstance(got, Enum) else got
            self._problems.append(f"{self._prefix}{name}: got {shown!r}, wanted {wanted}")

    def within(self, least: float, most: float, wanted: str, *names: str) -> None:
        """Require that each of these is null, or from ``least`` to ``most``; NaN is neither."""
        for name in names:
            value = getattr(self._section, name)
            self.require(value is None or least <= value <= most, name, wanted)

    def positive(self, *names: str) -> None:
        """Require that each of these is null or above 0."""
        self.within(_ABOVE_0, inf, "a number above 0", *names)

    def not_negative(self, *names: str) -> None:
        """Require that each of these is null, or 0 or more."""
        self.within(0, inf, "0 or more", *names)

    def prefix_cache(self, name: str) -> None:
        """Require a size in tokens that holds a block, or 0."""
        tokens = getattr(self._section, name)
        wanted = f"0 (no cache), or at least {BLOCK_TOKENS} (one block)"
        self.require(tokens == 0 or tokens >= BLOCK_TOKENS, name, wanted)

    def finite(self, *names: str) -> None:
        """Require that each of these is below infinity; other checks refuse NaN and low values."""
        for name in names:
            self.require(getattr(self._section, name) != inf, name, "a finite number")

    def seed(self, name: str) -> None:
        """Require a seed that every random number generator accepts."""
        self.within(0, MAX_SEED, f"a whole number from 0 to {MAX_SEED}", name)

    def port(self, name: str) -> None:
        """Require a TCP port to listen on."""
        self.within(0, MAX_PORT, f"0 (any free port) to {MAX_PORT}", name)

    def one_token(self, name: str) -> None:
        """Require that ``NAME_file`` and ``NAME_variable`` are not both set."""
        file, variable = f"{name}_file", f"{name}_variable"
        one = getattr(self._section, file) is None or getattr(self._section, variable) is None
        self.require(one, variable, f"a {file} or a {variable}, not both")

    def fraction(self, *names: str) -> None:
        """Require that each of these is from 0 to 1."""
        self.within(0, 1, "a number from 0 to 1", *names)


# Numbers of files that others wrote: checked here, because models and data of every format need it.

# Far beyond any model: a larger number would only be noticed when it overflows something.
MOST = 2**31
LEAST_NUMBER, MOST_NUMBER = 1e-12, 1e12


def read_count(value: object, where: str, wanted: str, least: int = 1, most: int = MOST) -> int:
    """Return ``value`` if it is a whole number from ``least`` to ``most``.

    Raises:
        CheckpointError: it is not; ``wanted`` words what it should be.
    """
    return _read_in_range(value, where, wanted, (int,), least, most)


def read_number(
    value: object,
    where: str,
    wanted: str,
    least: float = LEAST_NUMBER,
    most: float = MOST_NUMBER,
) -> float:
    """Return ``value`` if it is an int or a float from ``least`` to ``most``, never NaN.

    Raises:
        CheckpointError: it is not; ``wanted`` words what it should be.
    """
    return _read_in_range(value, where, wanted, (int, float), least, most)


def count_of_config(config: Mapping[str, Any], key: str, default: Any = None) -> int:
    """Read a whole number above 0 of a ``model_config.yaml``; see ``read_count``."""
    value = config.get(key)
    wanted = f"a whole number above 0 and of at most {MOST}"
    return read_count(default if value is None else value, f"model_config.yaml: {key}", wanted)


def number_of_config(config: Mapping[str, Any], key: str, default: float) -> float:
    """Read a number above 0 of a ``model_config.yaml``; see ``read_number``."""
    value = config.get(key)
    wanted = f"a number above 0, from {LEAST_NUMBER} to {MOST_NUMBER}"
    value = default if value is None else value
    return float(read_number(value, f"model_config.yaml: {key}", wanted))


def optional_number_of_config(config: Mapping[str, Any], key: str) -> float | None:
    """Read a number above 0 of a ``model_config.yaml``, or None; see ``read_number``."""
    return None if config.get(key) is None else number_of_config(config, key, nan)


def _read_in_range(
    value: Any, where: str, wanted: str, kinds: tuple[type, ...], least: float, most: float
) -> Any:
    # ``type``, as True is an instance of int.
    if type(value) not in kinds or not least <= value <= most:
        raise CheckpointError(f"{where}: got {shown(value)}, wanted {wanted}")
    return value
