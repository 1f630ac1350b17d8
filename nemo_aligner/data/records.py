"""Preference records in memory, their rewards, and lines of JSON."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, time, timedelta
from decimal import Decimal
from filecmp import cmp
from itertools import combinations
from pathlib import Path, PurePath
from typing import Any, TypeAlias
from unicodedata import category
from uuid import UUID

from nemo_aligner.config.common import RecordKind
from nemo_aligner.contract.messages import (
    Conversation,
    Text,
    flatten_message,
    is_plain,
    question_of,
    without_struct_nulls,
)
from nemo_aligner.contract.messages import as_json as conversation_as_json
from nemo_aligner.utils.errors import ConfigError, DataError, short, shown
from nemo_aligner.utils.writing import write_problem, write_whole

# Preference data in memory: comparisons and ratings, each with the file and line it is from.


@dataclass(frozen=True)
class Origin:
    """File and line where a record begins; lines count from 1."""

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True)
class MalformedRecord:
    """A place in a file whose content cannot be used as a record."""

    origin: Origin
    reason: str

    def __str__(self) -> str:
        return f"{self.origin}: {short(self.reason)}"


@dataclass(frozen=True)
class Comparison:
    """Two or more completions of a prompt that people, or a rule, put in order.

    Attributes:
        texts: K of them, the prompt included.
        ranks: rank of every text; a lower one is better, equal ones are tied.
        source: where the record says it is from; "" if it does not.
        labels: labels in the columns asked for, None where one is missing.
    """

    texts: tuple[Text, ...]
    ranks: tuple[int, ...]
    origin: Origin
    source: str = ""
    labels: tuple[float | None, ...] = ()

    @property
    def is_tied(self) -> bool:
        """True if no completion is better than another."""
        return len(set(self.ranks)) == 1

    @property
    def has_ties(self) -> bool:
        """True if any two completions are tied."""
        return len(set(self.ranks)) < len(self.ranks)

    @classmethod
    def of_pair(
        cls, chosen: Text, rejected: Text, origin: Origin, labels: tuple[float | None, ...] = ()
    ) -> Comparison:
        """One chosen and one rejected text."""
        return cls((chosen, rejected), (0, 1), origin, labels=labels)

    def swapped(self) -> Comparison:
        """The same texts in the opposite order: the best becomes the worst, and stands last."""
        ends = min(self.ranks) + max(self.ranks)
        ranks = tuple(ends - rank for rank in reversed(self.ranks))
        return replace(self, texts=self.texts[::-1], ranks=ranks)


@dataclass(frozen=True)
class Rating:
    """A text with one label per attribute, None where it is missing; ``source`` may be "".

    Where the record has labels for each of its turns or steps, ``steps`` are those of every one,
    and ``labels`` are empty.
    """

    response: Text
    labels: tuple[float | None, ...]
    origin: Origin
    source: str = ""
    steps: tuple[tuple[float | None, ...], ...] | None = None

    @property
    def texts(self) -> tuple[Text, ...]:
        return (self.response,)

    @property
    def ranks(self) -> tuple[int, ...]:
        """A single rank, as there is one text."""
        return (0,)


Record: TypeAlias = Comparison | Rating


def label_rows(record: Record) -> Sequence[tuple[float | None, ...]]:
    """Labels of a record, or of each of its steps."""
    steps = record.steps if isinstance(record, Rating) else None
    return [record.labels] if steps is None else steps


def lengths_of_rewards(record: Record, reply_tokens: int, step_tokens: Sequence[int]) -> list[int]:
    """Return the length, in tokens, of the text that each reward of a sample belongs to.

    Args:
        reply_tokens: length of the whole reply.
        step_tokens: length of each of its steps.

    A reward belongs to its step alone. The last reward of a sample without step labels is that of
    the whole reply.
    """
    if isinstance(record, Rating) and record.steps is not None:
        return list(step_tokens)
    return [*step_tokens[:-1], reply_tokens]


def text_names(record: Record) -> list[str]:
    """Names of a record's texts, as errors and listings call them."""
    if isinstance(record, Rating):
        return [RATED_COLUMN]
    if record.ranks == (0, 1):
        return [*PAIR_COLUMNS]
    return [f"rank {rank}" for rank in record.ranks]


# Letters that fonts draw as nothing though Unicode has them as letters or symbols: Hangul fillers
# and the braille pattern without dots; and marks that only change the letter before them.
_DRAWN_AS_NOTHING = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0") | frozenset(
    map(chr, (*range(0x180B, 0x1810), *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)))
)
# Spaces, line ends, controls (NUL) and formats (zero width space, byte order mark).
_UNSEEN = ("Zs", "Zl", "Zp", "Cc", "Cf")


def is_blank(text: str) -> bool:
    """True if nobody can see anything of a text, as of one of spaces or zero width spaces alone."""
    return all(
        letter.isspace() or letter in _DRAWN_AS_NOTHING or category(letter) in _UNSEEN
        for letter in text
    )


_NO_CHANCE = 20  # characters that two texts begin with


def prompt_key(record: Record) -> str:
    """A key that records of the same prompt share, whatever its case and white space.

    Raw text does not say where its prompt ends: a pair's is the whole lines that both texts begin
    with, or else a beginning that is too long for chance; other texts stand for themselves.
    """
    first = record.texts[0]
    if isinstance(first, str):
        return _normal(_common_start(record))
    return "\n".join(
        f"{turn['role']}: {_normal(flatten_message(turn))}" for turn in question_of(first)
    )


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


def short_hash(*parts: bytes) -> int:
    """64 bits that are the same in every process."""
    # Not hash(), which has another salt in every process.
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little")


def prompt_hash(record: Record) -> int:
    """64 bits that records of the same prompt share, by ``prompt_key``."""
    # JSON can hold half of a surrogate pair, which plain UTF-8 cannot.
    return short_hash(prompt_key(record).encode(errors="surrogatepass"))


def verdict_keys(record: Record) -> list[int]:
    """A 64-bit key for every two completions of which one is better.

    The keys of two opposite verdicts on the same texts differ in the lowest bit alone.
    """
    if isinstance(record, Rating):
        return []
    keys = [short_hash(_text_bytes(text)) for text in record.texts]
    return [
        short_hash(b"%d %d" % (min(better, worse), max(better, worse))) & ~1 | (better < worse)
        for (rank, better), (other, worse) in combinations(
            sorted(zip(record.ranks, keys, strict=True)), 2
        )
        if rank < other and better != worse
    ]


def _text_bytes(text: Text) -> bytes:
    """Bytes that differ between texts that do."""
    if isinstance(text, str):
        return text.encode(errors="surrogatepass")
    if isinstance(text, Conversation) or not is_plain(text):
        return json.dumps(conversation_as_json(text)).encode()
    # Much quicker than JSON, and most conversations are so.
    parts = (part for turn in text for part in (turn["role"], turn["content"]))
    return "\0".join(parts).encode(errors="surrogatepass")


def better_and_worse(records: Sequence[Record], lengths: Sequence[int]) -> list[tuple[int, int]]:
    """The lengths of the better and of the worse one of any two completions; ties are left out.

    ``lengths`` are of the replies of all texts of ``records``.
    """
    rest = iter(lengths)
    pairs = []
    for record in records:
        ranked = sorted(zip(record.ranks, rest, strict=False))
        pairs += [
            (better, worse)
            for (rank, better), (other, worse) in combinations(ranked, 2)
            if rank < other
        ]
    return pairs


# Rewards of held-out records as lines of JSON, as training and evaluation write them.

PAIR_COLUMNS = ("chosen", "rejected")
RATED_COLUMN = "response"


def reward_row(
    kind: RecordKind,
    origin: Origin | str,
    source: str,
    rewards: Mapping[str, float],
    texts: Sequence[Text],
    **more: Mapping[str, float],
) -> dict[str, Any]:
    """Build a row: a record's origin, rewards and texts; ``more`` are labels and the like.

    ``rewards`` are of a pair ``chosen`` and ``rejected``, of a rating by attribute. A number that
    is not finite is null.
    """
    row: dict[str, Any] = {"record": str(origin), "rewards": _finite(rewards)}
    if source:
        row["source"] = source
    sides = PAIR_COLUMNS if kind is RecordKind.comparison else (RATED_COLUMN,)
    row["texts"] = {
        side: text if isinstance(text, str) else conversation_as_json(text)
        for side, text in zip(sides, texts, strict=True)
    }
    return row | {name: _finite(values) for name, values in more.items() if values}


def row_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The line of each row."""
    return [json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows]


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


# Writing lines of preference data, and records of a program.


def write_lines(path: Path, lines: Iterable[str]) -> str:
    """Write the lines, in UTF-8, into a file whose folder is made if need be.

    It may be read at any time: it is whole, old or new. What to say of it: its path, and whether
    another file was there.

    Raises:
        ConfigError: there is something in the way of the folder, named ``output``.
    """
    text = "".join(f"{line}\n" for line in lines).encode()
    try:
        replaces = path.is_file() and path.read_bytes() != text
        write_whole(path, text)
    except OSError as error:
        raise ConfigError(
            f"output: got {path.parent}, wanted a folder to write to: {write_problem(path, error)}"
        ) from error
    return f"{path} (in place of another)" if replaces else str(path)


def write_records(
    path: Path, records: Iterable[Mapping[str, Any]], may_replace: bool = True
) -> int:
    """Write records of a program as JSON lines; how many there are.

    Record N is line N, counted from 1. A file that holds the same already stays as it is, so that
    what is known of it by its time does, too; no other one is replaced unless ``may_replace``.

    Raises:
        ConfigError: the file holds other records and may not be replaced, or its folder cannot be
            written.
        DataError: one of them is no mapping, or holds what JSON has no kind for (``as_json``).
    """
    unnamed, count = path.with_name(f"{path.name}.partial"), 0
    is_arrow = type(records).__module__.partition(".")[0] == "datasets"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unnamed.open("w", encoding="utf-8") as lines:
            for count, record in enumerate(records, start=1):
                if not isinstance(record, Mapping):
                    raise DataError(f"record {count}: got {shown(record)}, wanted a dict")
                row = without_struct_nulls(dict(record)) if is_arrow else dict(record)
                try:
                    lines.write(f"{as_json(row)}\n")
                except DataError as error:
                    raise DataError(f"record {count}: {error}") from error
                except (ValueError, RecursionError) as error:
                    raise DataError(f"record {count}: it is no JSON object: {error}") from error
        if path.exists() and cmp(unnamed, path, shallow=False):
            return count
        if path.exists() and not may_replace:
            raise ConfigError(
                f"{path}: it has the records that the run in this folder began with, got "
                "different ones; wanted the same, or another output"
            )
        os.replace(unnamed, path)
    except OSError as error:
        raise ConfigError(f"{path}: it cannot be written: {write_problem(path, error)}") from error
    finally:
        unnamed.unlink(missing_ok=True)
    return count


# Levels of lists and objects in a record; Python could read some hundreds.
DEEPEST = 100


def is_too_deep(raw: str, value: Mapping[str, Any]) -> bool:
    """True for the object of a line of JSON in which a function that calls itself could fail."""
    if raw.count("[") + raw.count("{") <= DEEPEST:
        return False
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        nested = (value.values() if isinstance(value, Mapping) else value for value in level)
        level = [item for items in nested for item in items if isinstance(item, dict | list)]
    return bool(level)


# Values of Python that have no kind of their own in JSON, and one text that says all of them.
_AS_TEXT = (date, time, timedelta, Decimal, UUID, PurePath)
# pandas' missing value and date, which are no numbers.
_MISSING = ("NAType", "NaTType")


def as_json(value: Mapping[str, Any]) -> str:
    """A record as a line of JSON.

    A ``Conversation`` becomes its messages, or an object if it has tools or documents; NaN,
    infinity and missing values of pandas become null, numbers of numpy numbers, and dates, decimal
    numbers, UUIDs and paths their texts.

    Raises:
        DataError: anything else, such as bytes, whose ``str`` is Python's code and not a text; the
            message says where it is.
    """
    try:
        # At a NaN or such a key this raises, and only then is the value walked through.
        text = json.dumps(value, ensure_ascii=False, default=_plain, allow_nan=False)
    except RecursionError as error:
        raise DataError("it holds lists or dicts nested too deep for JSON") from error
    except (ValueError, TypeError):
        text = json.dumps(_json_value(value), ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which a reader refuses by its line
        return json.dumps(_json_value(value))
    return text


def without_other_kinds(row: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """A row of a table without the columns that JSON cannot hold, as images; and their names."""
    held, others = {}, []
    for name, cell in row.items():
        try:
            held[name] = _json_value(cell, name)
        except DataError:
            others.append(name)
    return held, others


def _plain(value: Any) -> Any:
    """What JSON has for one value that is none of its own kinds."""
    if isinstance(value, Conversation):
        return conversation_as_json(value)
    if type(value).__name__ in _MISSING:
        return None
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, _AS_TEXT):
        return str(value)
    raise TypeError


def _json_value(value: Any, where: str = "") -> Any:
    """A value of JSON's kinds alone; errors name the place."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str | int | float | None):
                raise DataError(f"{where or 'it'}: got the key {shown(key)}, wanted a text")
        return {
            str(key): _json_value(each, f"{where}.{key}" if where else str(key))
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_json_value(each, f"{where}[{number}]") for number, each in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str | int | float | None):
        return value
    try:
        return _json_value(_plain(value), where)
    except TypeError as error:
        raise DataError(
            f"{where}: got {type(value).__name__} {shown(value)}, which JSON cannot hold. Make it "
            "a text, a number, a list or a dict, or leave this column out."
        ) from error
