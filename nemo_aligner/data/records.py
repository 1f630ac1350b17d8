"""Comparison and Rating, the preference records of all formats; and how records are written.

``formats/`` make records of the lines of a file. Training tokenizes them (``tokenize.py``),
evaluation scores them. This module also computes the keys that identify duplicate prompts and
contradicting verdicts, builds rows of held-out rewards, and converts Python values to lines of
JSON.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    principle_of,
    question_of,
    without_struct_nulls,
)
from nemo_aligner.contract.messages import as_json as conversation_as_json
from nemo_aligner.utils.errors import ConfigError, DataError, short, shown
from nemo_aligner.utils.finite import finite_or_none
from nemo_aligner.utils.writing import (
    encode_lines,
    temporary_beside,
    write_lines,
    write_problem,
)

# Comparisons and ratings, each with its file and line.


@dataclass(frozen=True)
class Origin:
    """File and line where a record begins; lines count from 1."""

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}"


@dataclass(frozen=True)
class MalformedRecord:
    """File and line of a record that cannot be read, and the reason."""

    origin: Origin
    reason: str

    def __str__(self) -> str:
        return f"{self.origin}: {short(self.reason)}"


@dataclass(frozen=True)
class Comparison:
    """Two or more samples of one prompt that are ranked.

    Attributes:
        texts: K samples, each with the prompt.
        ranks: rank of each sample; a lower one is better, equal ones are tied.
        source: name of the record's source, as the record gives it; "" if it gives none.
        labels: a label for each requested column, None where it is missing.
        teacher_rewards: reward that a teacher gives each sample (``formats/teacher.py``); empty if
            the record has none.
        positions: position of each sample in the file's record, counted from 0; empty if the
            samples have the record's order.
        teacher: JSON of the record's field ``teacher``, which names the models that gave the
            rewards; "" if it has none.
        known_prompt: ``prompt_key`` of the prompt if the samples are raw texts, but the record
            tells where their prompt ends; else "".
    """

    texts: tuple[Text, ...]
    ranks: tuple[int, ...]
    origin: Origin
    source: str = ""
    labels: tuple[float | None, ...] = ()
    teacher_rewards: tuple[float, ...] = ()
    positions: tuple[int, ...] = field(default=(), compare=False)
    teacher: str = field(default="", compare=False)
    known_prompt: str = field(default="", compare=False)

    @property
    def is_tied(self) -> bool:
        """True if all samples are tied."""
        return len(set(self.ranks)) == 1

    @property
    def has_ties(self) -> bool:
        """True if any two samples are tied."""
        return len(set(self.ranks)) < len(self.ranks)

    @classmethod
    def of_pair(
        cls, chosen: Text, rejected: Text, origin: Origin, labels: tuple[float | None, ...] = ()
    ) -> Comparison:
        """Build a pair of a chosen and a rejected sample."""
        return cls((chosen, rejected), (0, 1), origin, labels=labels)

    def swapped(self) -> Comparison:
        """Return the comparison with all verdicts reversed: the best sample becomes the worst."""
        ends = min(self.ranks) + max(self.ranks)
        ranks = tuple(ends - rank for rank in reversed(self.ranks))
        return replace(
            self,
            texts=self.texts[::-1],
            ranks=ranks,
            teacher_rewards=self.teacher_rewards[::-1],
            positions=self.positions_in_record[::-1],
        )

    @property
    def positions_in_record(self) -> tuple[int, ...]:
        """Position of each sample in the file's record, counted from 0."""
        return self.positions or tuple(range(len(self.texts)))


@dataclass(frozen=True)
class Rating:
    """A sample with a label for each attribute.

    Attributes:
        response: the sample, with its prompt.
        labels: a label for each attribute, None if it is missing; empty if ``steps`` has labels.
        source: name of the record's source, as the record gives it; "" if it gives none.
        steps: labels of each turn or step; None if the sample is rated as a whole.
        known_prompt: as in ``Comparison``.
    """

    response: Text
    labels: tuple[float | None, ...]
    origin: Origin
    source: str = ""
    steps: tuple[tuple[float | None, ...], ...] | None = None
    known_prompt: str = field(default="", compare=False)

    @property
    def texts(self) -> tuple[Text, ...]:
        return (self.response,)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank of the only sample, 0, so that code can read ranks of any kind of record."""
        return (0,)

    @property
    def teacher_rewards(self) -> tuple[float, ...]:
        """Empty, because teachers reward the samples of comparisons."""
        return ()

    @property
    def teacher(self) -> str:
        return ""


Record: TypeAlias = Comparison | Rating


def with_texts(record: Record, texts: Sequence[Text]) -> Record:
    """Return a copy of a record with other samples, as many as it has."""
    if isinstance(record, Rating):
        return replace(record, response=texts[0])
    return replace(record, texts=tuple(texts))


def record_principle(record: Record) -> str:
    """Return the principle of a record's samples, on one line; "" if they have none."""
    return " ".join((principle_of(record.texts[0]) or "").split())


def principle_key(record: Record) -> int:
    """Hash the principle of a record to 64 bits; 0 if it has none."""
    return hash_principle(record_principle(record))


def hash_principle(principle: str) -> int:
    """Hash a principle, a result of ``record_principle``, to 64 bits; "" gives 0."""
    return short_hash(principle.encode()) if principle else 0


def label_rows(record: Record) -> Sequence[tuple[float | None, ...]]:
    """List a record's rows of labels, each with a value for every label column.

    A record has one row; a rating whose steps are labelled has a row for each step.
    """
    steps = record.steps if isinstance(record, Rating) else None
    return [record.labels] if steps is None else steps


def lengths_of_rewards(record: Record, reply_tokens: int, step_tokens: Sequence[int]) -> list[int]:
    """Return, for each reward of a sample, the number of tokens of the text that it scores.

    A reward scores its turn or step. If the record has no step labels, the last reward of a sample
    scores the whole reply.

    Args:
        reply_tokens: number of tokens of the whole reply.
        step_tokens: number of tokens of each step of the reply; empty if steps are not scored.
    """
    if isinstance(record, Rating) and record.steps is not None:
        return list(step_tokens)
    return [*step_tokens[:-1], reply_tokens]


def text_names(record: Record) -> list[str]:
    """Return a name for each sample of a record, for errors and listings: ``chosen``, ``rank 2``.

    The names are ``chosen`` and ``rejected`` for a pair, ``rank <n>`` for other comparisons, and
    ``response`` for a rating.
    """
    if isinstance(record, Rating):
        return [RATED_COLUMN]
    if record.ranks == (0, 1):
        return [*PAIR_COLUMNS]
    return [f"rank {rank}" for rank in record.ranks]


# Characters that Unicode classifies as letters or symbols, but fonts draw as nothing: Hangul
# fillers and the braille pattern without dots; and marks that only change the character before
# them.
_DRAWN_AS_NOTHING = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0") | frozenset(
    map(chr, (*range(0x180B, 0x1810), *range(0xFE00, 0xFE10), *range(0xE0100, 0xE01F0)))
)
# Spaces, line ends, controls (NUL) and formats (zero width space, byte order mark).
_UNSEEN = ("Zs", "Zl", "Zp", "Cc", "Cf")


def is_blank(text: str) -> bool:
    """True if a text shows nothing when printed, for example if it has only zero width spaces."""
    return all(
        letter.isspace() or letter in _DRAWN_AS_NOTHING or category(letter) in _UNSEEN
        for letter in text
    )


# Two raw texts with a shared prefix of at least this many characters are taken to share a prompt.
_MIN_SHARED_CHARACTERS = 20


def prompt_key(record: Record) -> str:
    """Return a text that identifies a record's prompt; case and white space do not matter.

    Records with the same key have the same prompt. Raw text does not show where its prompt ends. If
    the record does not tell either (``known_prompt``), the prompt of a raw pair is guessed: it is
    the complete lines with which both samples begin. If they share no complete line, it is their
    shared prefix, provided that this has at least ``_MIN_SHARED_CHARACTERS``. Otherwise the key is
    made from both whole samples.
    """
    first = record.texts[0]
    if record.known_prompt:
        return record.known_prompt
    if isinstance(first, str):
        return normalize_spelling(_common_start(record))
    return "\n".join(
        f"{turn['role']}: {normalize_spelling(flatten_message(turn))}"
        for turn in question_of(first)
    )


def _common_start(record: Record) -> str:
    texts = [str(text) for text in record.texts]
    start = os.path.commonprefix(texts)  # noqa: RUF071 - of texts, not of paths
    if len(texts) == 1:
        return start
    lines = start[: start.rfind("\n") + 1]
    if lines.strip():
        return lines
    return start if len(start.strip()) >= _MIN_SHARED_CHARACTERS else "\n".join(texts)


def normalize_spelling(text: str) -> str:
    """Return a text such that case and white space do not matter when it is compared."""
    return " ".join(text.casefold().split())


def short_hash(*parts: bytes) -> int:
    """Hash the concatenation of ``parts`` to 64 bits, with the same result in every process."""
    # Python's hash() cannot be used, because it has a different salt in each process.
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little")


def is_prompt_guessed(record: Record) -> bool:
    """True if the ``prompt_key`` of a record of raw texts is guessed from the texts."""
    return isinstance(record.texts[0], str) and not record.known_prompt


def prompt_hash(record: Record) -> int:
    """Hash the ``prompt_key`` of a record to 64 bits; equal prompts have equal hashes."""
    # JSON can contain half of a surrogate pair, which plain UTF-8 cannot encode.
    return short_hash(prompt_key(record).encode(errors="surrogatepass"))


def verdict_keys(record: Record) -> list[int]:
    """Hash each verdict of a record to 64 bits, to find contradicting verdicts.

    A verdict is a pair of samples of which one is better. The keys of two opposite verdicts on the
    same samples differ only in the lowest bit.
    """
    if isinstance(record, Rating):
        return []
    keys = [short_hash(_text_bytes(text)) for text in record.texts]
    return [
        short_hash(b"%d %d" % (min(better, worse), max(better, worse))) & ~1 | (better < worse)
        for (better_rank, better), (worse_rank, worse) in combinations(
            sorted(zip(record.ranks, keys, strict=True)), 2
        )
        if better_rank < worse_rank and better != worse
    ]


def _text_bytes(text: Text) -> bytes:
    """Encode a sample as bytes to hash, such that different samples have different bytes."""
    if isinstance(text, str):
        return text.encode(errors="surrogatepass")
    if isinstance(text, Conversation) or not is_plain(text):
        return json.dumps(conversation_as_json(text)).encode()
    # Most conversations have only roles and texts. Joining these is much faster than JSON.
    parts = (part for turn in text for part in (turn["role"], turn["content"]))
    return "\0".join(parts).encode(errors="surrogatepass")


def better_and_worse(records: Sequence[Record], lengths: Sequence[int]) -> list[tuple[int, int]]:
    """List (length of the better reply, length of the worse reply) for the pairs of all records.

    Two samples of a record are a pair if their ranks differ. ``lengths`` has the length of each
    sample's reply, record by record.
    """
    remaining = iter(lengths)
    pairs = []
    for record in records:
        ranked = sorted(zip(record.ranks, remaining, strict=False))
        pairs += [
            (better, worse)
            for (better_rank, better), (worse_rank, worse) in combinations(ranked, 2)
            if better_rank < worse_rank
        ]
    return pairs


# Rows of JSON with the rewards of held-out records, which training and evaluation write to files.

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
    """Build the line about one scored record for a file of held-out rewards.

    The result is a dict with the record's origin, source, rewards and samples.

    Args:
        rewards: rewards of a pair by ``chosen`` and ``rejected``, or of a rating by attribute. A
            value that is not finite becomes null.
        more: further fields, for example labels.
    """
    row: dict[str, Any] = {"record": str(origin), "rewards": finite_or_none(rewards)}
    if source:
        row["source"] = source
    sides = PAIR_COLUMNS if kind is RecordKind.comparison else (RATED_COLUMN,)
    row["texts"] = {
        side: text if isinstance(text, str) else conversation_as_json(text)
        for side, text in zip(sides, texts, strict=True)
    }
    return row | {name: finite_or_none(values) for name, values in more.items() if values}


def row_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Convert each row to a line of JSON, without a line end."""
    return [json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows]


# Functions that write files of preference data, also from the records of a Python program.


def write_parts(folder: Path, parts: Mapping[str, Sequence[str]]) -> dict[str, Path]:
    """Write the lines of each part, such as ``train``, to its own file of a folder.

    Models may have been trained on the files of earlier parts. Therefore a file with other lines is
    never replaced, and then no part is written.

    Returns:
        The file of each part.

    Raises:
        ConfigError: a file with other lines exists, or one cannot be written; the error names the
            setting ``output``.
    """
    paths = {name: folder / f"{name}.jsonl" for name in parts}
    for name, path in paths.items():
        _check_replaces_nothing(path, parts[name])
    for name, path in paths.items():
        write_lines(path, parts[name])
    return paths


def _check_replaces_nothing(path: Path, lines: Iterable[str]) -> None:
    try:
        is_other = path.exists() and (path.is_dir() or path.read_bytes() != encode_lines(lines))
    except OSError as error:
        raise ConfigError(f"output: {path} cannot be read: {error}") from error
    if is_other:
        raise ConfigError(
            f"output: {path} exists with other records, and is not replaced. Name another folder, "
            "or remove the file"
        )


def write_records(
    path: Path, records: Iterable[Mapping[str, Any]], may_replace: bool = True
) -> int:
    """Write the records of a Python program as JSON lines; return their number.

    They are mappings, a ``datasets.Dataset``, or a pandas DataFrame. Record N becomes line N,
    counted from 1. A file with the same content is not written again, so that its time does not
    change and its token cache stays valid.

    Raises:
        ConfigError: the file has other records and ``may_replace`` is False, or its folder cannot
            be written.
        DataError: a record is not a mapping, or has a value that JSON cannot hold (``as_json``).
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary_beside(path) as unnamed:
            count = _write_rows(unnamed, records)
            if path.exists() and cmp(unnamed, path, shallow=False):
                return count
            if path.exists() and not may_replace:
                raise ConfigError(
                    f"{path}: the run in this folder began with other records than these. Pass the "
                    "same records, or choose another output"
                )
            os.replace(unnamed, path)
    except OSError as error:
        raise ConfigError(f"{path}: it cannot be written: {write_problem(path, error)}") from error
    return count


def table_library(records: Any) -> str | None:
    """Return the library of a table, ``pandas`` or ``datasets``; None for other records."""
    if hasattr(records, "columns") and hasattr(records, "to_dict"):
        return "pandas"
    return "datasets" if type(records).__module__.partition(".")[0] == "datasets" else None


def _write_rows(path: Path, records: Any) -> int:
    """Write the lines of ``write_records`` to a new file; return their number."""
    library, count = table_library(records), 0
    rows = records.to_dict(orient="records") if library == "pandas" else records
    with path.open("w", encoding="utf-8") as lines:
        for count, record in enumerate(rows, start=1):
            if not isinstance(record, Mapping):
                raise DataError(f"record {count}: got {shown(record)}, wanted a dict")
            row = without_struct_nulls(dict(record)) if library == "datasets" else dict(record)
            try:
                lines.write(f"{as_json(row)}\n")
            except DataError as error:
                raise DataError(f"record {count}: {error}") from error
            except (ValueError, RecursionError) as error:
                raise DataError(f"record {count}: it is not a JSON object: {error}") from error
    return count


# Largest number of nested lists and objects in a record. Python itself could read some hundreds.
DEEPEST = 100


def is_too_deep(raw: str, value: Mapping[str, Any]) -> bool:
    """True if ``value``, read from the JSON ``raw``, is nested more than ``DEEPEST`` levels.

    Recursive functions could exceed Python's recursion limit on such a value.
    """
    if raw.count("[") + raw.count("{") <= DEEPEST:
        return False
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        nested = (value.values() if isinstance(value, Mapping) else value for value in level)
        level = [item for items in nested for item in items if isinstance(item, dict | list)]
    return bool(level)


# Types of Python values without a type in JSON, which are written as text because ``str`` keeps all
# of their content.
_AS_TEXT = (date, time, timedelta, Decimal, UUID, PurePath)
# Names of the types of pandas' missing value and missing date.
_MISSING = ("NAType", "NaTType")


def as_json(value: Mapping[str, Any]) -> str:
    """Convert a record to a line of JSON.

    A ``Conversation`` becomes its messages, or an object if it has tools or documents. NaN,
    infinity and missing values of pandas become null, numpy numbers become numbers, and dates,
    decimal numbers, UUIDs and paths become strings.

    Raises:
        DataError: the record has a value of another type, for example bytes; the message says
            where.
    """
    try:
        # Try the fast conversion first, which raises at a NaN or a key that is not a string. Then
        # convert the value item by item, which is slower.
        text = json.dumps(value, ensure_ascii=False, default=_convert, allow_nan=False)
    except RecursionError as error:
        raise DataError("it holds lists or dicts nested too deep for JSON") from error
    except (ValueError, TypeError):
        text = json.dumps(_json_value(value), ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    # The text has half of a surrogate pair. Escape it, so that the file can be written.
    except UnicodeEncodeError:
        return json.dumps(_json_value(value))
    return text


def without_other_kinds(row: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Drop the columns of a table's row that JSON cannot hold, for example images.

    Returns:
        The other columns, and the names of the dropped ones.
    """
    columns, dropped = {}, []
    for name, cell in row.items():
        try:
            columns[name] = _json_value(cell, name)
        except DataError:
            dropped.append(name)
    return columns, dropped


def _convert(value: Any) -> Any:
    """Convert a value that ``json`` cannot write, such as a date; TypeError for any other type."""
    if isinstance(value, Conversation):
        return conversation_as_json(value)
    if type(value).__name__ in _MISSING:
        return None
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, _AS_TEXT):
        return str(value)
    raise TypeError


def _json_value(value: Any, location: str = "") -> Any:
    """Convert a value and all values in it to JSON's types; errors name the ``location``."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str | int | float | None):
                raise DataError(
                    f"{location or 'top level'}: got the key {shown(key)}, wanted a string"
                )
        return {
            str(key): _json_value(item, f"{location}.{key}" if location else str(key))
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_json_value(item, f"{location}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str | int | float | None):
        return value
    try:
        return _json_value(_convert(value), location)
    except TypeError as error:
        raise DataError(
            f"{location}: got {type(value).__name__} {shown(value)}, which JSON cannot hold. Make "
            "it a string, a number, a list or a dict, or leave this column out."
        ) from error
