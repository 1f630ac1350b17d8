"""Preference data in memory: comparisons and ratings, each with the file and line it is from."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypeAlias

from nemo_aligner.errors import short
from nemo_aligner.text.messages import Text, question_of, said


@dataclass(frozen=True)
class Origin:
    """Where a record begins; lines count from 1."""

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True)
class MalformedRecord:
    """What stands where a record should, and cannot be used as one."""

    origin: Origin
    reason: str

    def __str__(self) -> str:
        return f"{self.origin}: {short(self.reason)}"


@dataclass(frozen=True)
class Comparison:
    """Two or more completions of a prompt that people, or a rule, put in order.

    Attributes:
        texts: K of them, the prompt included.
        ranks: of every text, a lower one is better, and equal ones are tied.
        source: where the record says it is from; "" if it does not.
        labels: of the columns that were asked for, None where one is missing.
    """

    texts: tuple[Text, ...]
    ranks: tuple[int, ...]
    origin: Origin
    source: str = ""
    labels: tuple[float | None, ...] = ()

    @property
    def is_tied(self) -> bool:
        """Whether none of its completions is better than another."""
        return len(set(self.ranks)) == 1

    @property
    def has_ties(self) -> bool:
        """Whether any two of its completions are tied."""
        return len(set(self.ranks)) < len(self.ranks)

    @classmethod
    def of_pair(
        cls, chosen: Text, rejected: Text, origin: Origin, labels: tuple[float | None, ...] = ()
    ) -> Comparison:
        """One chosen and one rejected text."""
        return cls((chosen, rejected), (0, 1), origin, labels=labels)


@dataclass(frozen=True)
class Rating:
    """A text with one label per attribute, None where it is missing; ``source`` may be ""."""

    response: Text
    labels: tuple[float | None, ...]
    origin: Origin
    source: str = ""

    @property
    def texts(self) -> tuple[Text, ...]:
        return (self.response,)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of one text alone."""
        return (0,)


Record: TypeAlias = Comparison | Rating
_NO_CHANCE = 20  # characters that two texts begin with


def prompt_key(record: Record) -> str:
    """What two records of the same prompt have in common, whatever its case and white space.

    Raw text does not say where its prompt ends: a pair's is the whole lines that both texts begin
    with, or else a beginning that is too long for chance; other texts stand for themselves.
    """
    first = record.texts[0]
    if isinstance(first, str):
        return _normal(_common_start(record))
    return "\n".join(f"{turn['role']}: {_normal(said(turn))}" for turn in question_of(first))


def _common_start(record: Record) -> str:
    texts = [str(text) for text in record.texts]
    start = os.path.commonprefix(texts)  # noqa: RUF071 - of texts, not of paths
    if len(texts) == 1:
        return start
    lines = start[: start.rfind("\n") + 1]
    if lines.strip():
        return lines
    return start if len(start.strip()) >= _NO_CHANCE else "\n".join(texts)


def _normal(text: str) -> str:
    return " ".join(text.casefold().split())
