"""Enumerations and value checks that several sections of the settings share."""

from __future__ import annotations

import copy
from dataclasses import field
from enum import Enum
from math import inf
from typing import TypeVar

from nemo_aligner.utils.errors import CheckpointError, SettingsError, shown

T = TypeVar("T")
# Under this key a field's metadata has what it is for.
ABOUT = "about"
MAX_SEED = 2**32 - 1
BLOCK_TOKENS = 16
"""Tokens of a block of the prefix cache: keys and values are kept and found by whole blocks."""


class RecordKind(Enum):
    """Kind of a record in a data file."""

    comparison = "comparison"  # two replies, of which one was chosen
    rating = "rating"  # a reply with a label for each attribute


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


class Precision(Enum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


def setting(default: T, about: str) -> T:
    """A field of a section: its default, and the one line that ``--help`` says of it.

    A list or a mapping is copied for every section.
    """
    metadata = {ABOUT: about}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy.copy(default), metadata=metadata)
    return field(default=default, metadata=metadata)


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
        """The setting ``name`` (below the section where it has dots) is fit if ``condition``."""
        if not condition:
            got = self._section
            for part in name.split("."):
                got = getattr(got, part)
            shown = got.value if isinstance(got, Enum) else got
            self._problems.append(f"{self._prefix}{name}: got {shown!r}, wanted {wanted}")

    def positive(self, *names: str) -> None:
        """Require that each of these is null or above 0."""
        for name in names:
            value = getattr(self._section, name)
            self.require(value is None or value > 0, name, "a number above 0")

    def not_negative(self, *names: str) -> None:
        """Require that each of these is 0 or more."""
        for name in names:
            self.require(getattr(self._section, name) >= 0, name, "0 or more")

    def prefix_cache(self, name: str) -> None:
        """It is a size in tokens that holds a block, or none."""
        tokens = getattr(self._section, name)
        wanted = f"0 (no cache), or at least {BLOCK_TOKENS} (one block)"
        self.require(tokens == 0 or tokens >= BLOCK_TOKENS, name, wanted)

    def finite(self, *names: str) -> None:
        """Require that each of these is below infinity; other checks refuse NaN and low values."""
        for name in names:
            self.require(getattr(self._section, name) != inf, name, "a finite number")

    def seed(self, name: str) -> None:
        """Require a seed that every random number generator accepts."""
        fits = 0 <= getattr(self._section, name) <= MAX_SEED
        self.require(fits, name, f"a whole number from 0 to {MAX_SEED}")

    def one_token(self, name: str) -> None:
        """``NAME_file`` and ``NAME_variable`` are not both set."""
        file, variable = f"{name}_file", f"{name}_variable"
        one = getattr(self._section, file) is None or getattr(self._section, variable) is None
        self.require(one, variable, f"a {file} or a {variable}, not both")

    def fraction(self, *names: str) -> None:
        """Require that each of these is from 0 to 1."""
        for name in names:
            self.require(0 <= getattr(self._section, name) <= 1, name, "a number from 0 to 1")


# Numbers in a file that somebody else wrote: the number, or an error that says where it stands.
#
# Here, on the lowest floor, because a model's shape and its files of every format are read by it.

# Far past any model: what is larger would only be found out by what it overflows.
MOST = 2**31
LEAST_NUMBER, MOST_NUMBER = 1e-12, 1e12


def read_count(value: object, where: str, wanted: str, least: int = 1, most: int = MOST) -> int:
    """``value``, a whole number from ``least`` to ``most``.

    Raises:
        CheckpointError: it is none; ``wanted`` are the words for what it should be.
    """
    if type(value) is not int or not least <= value <= most:
        raise CheckpointError(f"{where}: got {shown(value)}, wanted {wanted}")
    return value


def read_number(
    value: object,
    where: str,
    wanted: str,
    least: float = LEAST_NUMBER,
    most: float = MOST_NUMBER,
) -> float:
    """``value``, an int or a float from ``least`` to ``most``, and so neither infinite nor nan.

    Raises:
        CheckpointError: it is none; ``wanted`` are the words for what it should be.
    """
    if type(value) not in (int, float) or not least <= value <= most:  # type: ignore[operator]
        raise CheckpointError(f"{where}: got {shown(value)}, wanted {wanted}")
    return value  # type: ignore[return-value]
