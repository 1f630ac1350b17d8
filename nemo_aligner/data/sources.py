"""A data file to JSON objects that know their line.

A file is JSON lines, one JSON list or a table (``tables.py``), gzipped or not: its content decides,
not its name. A line that holds no JSON object is malformed, and the others are read; a file without
any is refused. A table may have a JSON object on a line of a cell, so what does not begin with one,
and has few, is one if it can be.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

from nemo_aligner.data.other_files import describe_binary
from nemo_aligner.data.tables import Row, holds_rows, read_binary_table, read_text_table
from nemo_aligner.data.write import as_json
from nemo_aligner.errors import DataError


@dataclass(frozen=True)
class Line:
    """One object of a file: the line it begins on, its text as written, and its value.

    ``holds_rows``: of a table, a cell of it has lines that look like rows.
    """

    number: int
    raw: str
    value: dict[str, Any]
    holds_rows: bool = False


@dataclass(frozen=True)
class BadLine:
    """What stands where an object should: the line it begins on, its text, and what is wrong."""

    number: int
    raw: str
    reason: str


AnyLine: TypeAlias = Line | BadLine
# The line that a value begins on, its text, and the value.
_Value: TypeAlias = tuple[int, str, Any]


def read_lines(path: str | Path) -> list[AnyLine]:
    """Every object of a file of JSON lines, of one JSON list, or of a table that has rows of it.

    Gzipped files are unpacked. The lines of a Parquet or Arrow file are its rows, those of a JSON
    list without a line for each item are its items.

    Raises:
        DataError: the file is missing, not UTF-8, a broken list or table, or holds something else
            than objects; the message says what.
    """
    content = _read_content(Path(path))
    rows = read_binary_table(content, str(path))
    if rows is not None:
        return [_line_of(row) for row in rows]
    text = _decode(content, str(path))
    if text.lstrip().startswith("["):
        lines = [_checked(item) for item in _told_apart(list(_list_items(text, str(path))))]
    else:
        lines = list(json_lines(text))
    first = lines[0] if lines else None
    if not isinstance(first, BadLine) or are_json_lines(lines):
        return lines
    rows = None if text.lstrip().startswith("{") else read_text_table(text, str(path))
    if rows is not None:
        return [_line_of_text(row) for row in rows]
    if not any(isinstance(line, Line) for line in lines):
        raise DataError(
            f"{path}:{first.number}: {first.reason}; no line of the file is a JSON object"
        )
    return lines


def are_json_lines(lines: Iterable[AnyLine]) -> bool:
    """Whether the first line is an object, or at least half of all are."""
    objects = count = 0
    for count, line in enumerate(lines, start=1):
        objects += isinstance(line, Line)
        if objects == count == 1:
            return True
    return 2 * objects >= count > 0


def _line_of_text(row: Row) -> AnyLine:
    line = _line_of(row)
    if isinstance(line, BadLine):
        return line
    return replace(line, holds_rows=holds_rows([*line.value.values()]))


def count_swallowed(lines: Iterable[AnyLine]) -> int:
    """How many rows of a table have a cell with lines that look like rows."""
    return sum(isinstance(line, Line) and line.holds_rows for line in lines)


def _line_of(row: Row) -> AnyLine:
    number, value = row
    if isinstance(value, str):
        return BadLine(number, "", value)
    return Line(number, as_json(value), value)


def _read_content(path: Path) -> bytes:
    with unpacked(path) as stream:
        return stream.read()


@contextmanager
def unpacked(path: str | Path) -> Iterator[BinaryIO]:
    """The bytes of a file that may be gzipped.

    Raises:
        DataError: it cannot be read, also by whoever reads from it.
    """
    try:
        with Path(path).open("rb") as stream:
            is_packed = stream.read(2) == b"\x1f\x8b"
            stream.seek(0)
            yield cast(BinaryIO, gzip.GzipFile(fileobj=stream)) if is_packed else stream
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _decode(content: bytes, path: str) -> str:
    other = describe_binary(content, path)
    if other is not None:
        raise DataError(f"{path}: {other}")
    return decode_utf8(content.removeprefix(codecs.BOM_UTF8), path)


def decode_utf8(content: bytes, path: str, first: int = 1) -> str:
    """The text of whole lines of a file, of which ``first`` is the first one's number.

    Raises:
        DataError: it is not UTF-8; the message says in which line.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + first
        raise DataError(f"{path}:{line}: not valid UTF-8 ({error.reason})") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class _TwiceError(ValueError):
    """An object with one key twice, of which JSON does not say which holds."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _TwiceError(f"got the key {twice!r:.60} twice in one object, wanted it once")
    return value


_decoder = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_object)
_lenient = json.JSONDecoder(parse_constant=_refuse_constant)


def _checked(item: _Value) -> AnyLine:
    number, raw, value = item
    if isinstance(value, _TwiceError):
        return BadLine(number, raw, f"malformed JSON: {value}")
    if isinstance(value, dict):
        return Line(number, raw, value)
    return BadLine(number, raw, f"got {raw[:60]!r}, wanted a JSON object")


def json_lines(text: str, first: int = 1) -> Iterator[AnyLine]:
    """The lines that are not empty, numbered from ``first``."""
    # Not splitlines(): JSON strings may hold U+2028 and its like.
    for number, raw in enumerate(text.split("\n"), start=first):
        if raw.strip():
            try:
                yield _checked((number, raw.rstrip("\r"), _decoder.decode(raw)))
            except (ValueError, RecursionError) as error:
                yield BadLine(number, raw, f"malformed JSON: {_what_is_wrong(raw, error)}")


def _what_is_wrong(raw: str, error: Exception) -> str:
    """The decoder's own words, without the number of a line that it has seen nothing but."""
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    near = raw[max(0, error.pos - 20) : error.pos + 20]
    return f"{error.msg} at character {error.pos + 1}, near {near!r}"


_SPACE = re.compile(r"[ \t\r\n]*")


def _list_items(text: str, path: str) -> Iterator[_Value]:
    """The items of a JSON list, one after the other, so that each knows its line."""
    position = _after_space(text, text.index("[") + 1)
    number, counted = 1, 0
    more = not text.startswith("]", position)
    while more:
        number, counted = number + text.count("\n", counted, position), position
        try:
            value, end = _decode_item(text, position)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number}: malformed JSON: {error}") from error
        yield number, text[position:end], value
        position = _after_space(text, end)
        more = text.startswith(",", position)
        if more:
            position = _after_space(text, position + 1)
    if not text.startswith("]", position) or text[position + 1 :].strip():
        number = text.count("\n", 0, position) + 1
        raise DataError(f"{path}:{number}: malformed JSON: wanted one list, and nothing after it")


def _decode_item(text: str, position: int) -> tuple[Any, int]:
    """The value, or what is wrong with it, and where it ends."""
    try:
        return _decoder.raw_decode(text, position)
    except _TwiceError as error:
        return error, _lenient.raw_decode(text, position)[1]


def _told_apart(items: list[_Value]) -> list[_Value]:
    """By their number in the list where some begin on one line, as a file without breaks has."""
    if len({number for number, _, _ in items}) == len(items):
        return items
    return [(number, raw, value) for number, (_, raw, value) in enumerate(items, start=1)]


def _after_space(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    return found.end() if found else position
