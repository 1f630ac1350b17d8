"""A data file to JSON objects that know their line: JSON lines, lists and tables."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

from nemo_aligner.config.describe import install_command
from nemo_aligner.contract.messages import without_struct_nulls
from nemo_aligner.data.records import DEEPEST, as_json, is_too_deep, without_other_kinds
from nemo_aligner.utils.errors import DataError

# Tables with named columns as data: CSV and TSV files, and with pyarrow Parquet and Arrow files.
#
# A row is an object whose keys are the columns. CSV files have text alone: a column is numeric if
# most of its cells are, and then an empty cell is missing, like null, and any other stays text. A
# column named like a text field of a format (``_TEXTS``) stays text.
#
# An unpaired quote in a CSV file makes its row malformed; reading goes on at the next line. In a
# TSV file a quote is an ordinary letter.

# The number of a line or row, and its cells by column, or what is wrong with it.
Row: TypeAlias = tuple[int, dict[str, Any] | str]

_PARQUET, _ARROW = b"PAR1", b"ARROW1"
_SEPARATORS = ",\t;"
_ENDINGS = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
_TEXTS = re.compile(
    "(prompt|chosen|rejected|response|completion|text|instruction|question|input|output|context"
    "|answer|prediction|source|subset|kind|domain|id)[ _]?([0-9]+|[A-Za-z])?"
)
# Doubled quotes inside quotes, as written by programs that quote the cells of a TSV file.
_QUOTED = re.compile(r'"(?=.*"".*")(?:[^"]|"")*"', re.DOTALL)
_NUMBER = re.compile(r"\s*[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?\s*")


def read_binary_table(content: bytes, path: str) -> list[Row] | None:
    """The rows of a Parquet or Arrow file, counted from 1; None for others, or without pyarrow.

    Raises:
        DataError: it begins as such a file does, and cannot be read.
    """
    if not content.startswith((_PARQUET, _ARROW)):
        return None
    try:
        import pyarrow
        from pyarrow import ipc, parquet
    except ImportError:
        return None
    source = pyarrow.BufferReader(content)
    try:
        if content.startswith(_PARQUET):
            table = parquet.read_table(source)
        else:
            table = ipc.open_file(source).read_all()
        return list(enumerate(map(without_struct_nulls, table.to_pylist()), start=1))
    except (pyarrow.ArrowException, OSError) as error:
        kind = "a Parquet" if content.startswith(_PARQUET) else "an Arrow"
        raise DataError(f"{path}: got {kind} file that cannot be read: {error}") from error


def read_text_table(text: str, path: str) -> list[Row] | None:
    """The rows of a CSV or TSV file by the line that they begin on; None for what is none.

    Raises:
        DataError: a column has no name, or the name of another.
    """
    separator = max(_SEPARATORS, key=text.partition("\n")[0].count)
    rows = _cells(text, separator)
    good = [cells for _, cells in rows if not isinstance(cells, str)]
    if not good or good[0] is not rows[0][1]:
        return None
    looks_so = len(good) > 1 and 1 < len(good[0]) == len(good[1])
    if not (looks_so or path.lower().endswith(_ENDINGS)):
        return None
    names = [name.strip() for name in good[0]]
    if not all(names) or len(set(names)) < len(names):
        raise DataError(f"{path}:1: got the columns {names}, wanted a name for each, once")
    whole = [cells for cells in good[1:] if len(cells) == len(names)]
    numbers = {
        name
        for name, column in zip(names, zip(*whole, strict=True), strict=False)
        if not _TEXTS.fullmatch(name) and _are_numbers(column)
    }
    return [
        (line, cells if isinstance(cells, str) else _row(names, cells, numbers))
        for line, cells in rows[1:]
    ]


def holds_rows(cells: Sequence[object]) -> bool:
    """True if a cell has lines that look like rows, which a stray quote swallows."""
    texts = [cell for cell in cells if isinstance(cell, str)]
    return any(
        line.count(separator) == len(cells) - 1 > 0
        for text in texts
        for line in text.split("\n")[:-1]
        for separator in _SEPARATORS
    )


def _cells(text: str, separator: str) -> list[tuple[int, list[str] | str]]:
    """Rows that are not empty, each by the line it begins on: cells, or what is wrong with them."""
    # csv refuses cells of more than 131,072 characters unless told, for the whole process.
    limit = csv.field_size_limit(max(len(text), 1))
    try:
        return list(_numbered(io.StringIO(text, newline="").readlines(), separator))
    finally:
        csv.field_size_limit(limit)


def _numbered(lines: list[str], separator: str) -> Iterator[tuple[int, list[str] | str]]:
    start = 0
    while start < len(lines):
        reader = csv.reader(
            map(lines.__getitem__, range(start, len(lines))),
            delimiter=separator,
            quoting=csv.QUOTE_NONE if separator == "\t" else csv.QUOTE_MINIMAL,
            # Else a stray quote swallows all rows up to the next one, and nothing is said.
            strict=True,
        )
        before = start
        try:
            for cells in reader:
                if cells:
                    yield start + 1, _unless_quoted(cells, separator)
                start = before + reader.line_num
        except csv.Error as error:
            yield start + 1, f"got an unpaired quote in a cell: {error}"
            start += 1


def _unless_quoted(cells: list[str], separator: str) -> list[str] | str:
    if separator != "\t" or not any(map(_QUOTED.fullmatch, cells)):
        return cells
    return "got a cell in quotes with doubled quotes in it, wanted no quoting in a file with tabs"


def _are_numbers(column: Sequence[str]) -> bool:
    """True if most cells that are not empty are numbers."""
    given = [cell for cell in column if cell.strip()]
    return 2 * sum(map(_is_number, given)) > len(given)


def _is_number(cell: str) -> bool:
    return _NUMBER.fullmatch(cell) is not None


def _row(names: list[str], cells: list[str], numbers: set[str]) -> dict[str, Any] | str:
    if len(cells) != len(names):
        return f"got {len(cells)} cells, wanted {len(names)}, one for each column"
    return {
        name: _number(cell) if name in numbers else cell
        for name, cell in zip(names, cells, strict=True)
    }


def _number(cell: str) -> float | str | None:
    if not cell.strip():
        return None
    return float(cell) if _is_number(cell) else cell


# A data file to JSON objects that know their line.
#
# A file is JSON lines, one JSON list or a table, gzipped or not, by its content and not its name. A
# line without a JSON object is malformed, and the others are read; a file without any object is
# refused. A cell of a table may hold a JSON object on a line of its own, so a file that does not
# begin with an object, and has few, is read as a table if possible.


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
    """A line without an object: where it begins, its text, and what is wrong."""

    number: int
    raw: str
    reason: str


AnyLine: TypeAlias = Line | BadLine
# The line that a value begins on, its text, and the value.
_Value: TypeAlias = tuple[int, str, Any]


def read_lines(path: str | Path) -> list[AnyLine]:
    """Read every object of a file of JSON lines or of one JSON list, or every row of a table.

    Gzipped files are unpacked. The lines of a Parquet or Arrow file are its rows, those of a JSON
    list without a line for each item are its items.

    Raises:
        DataError: the file is missing, not UTF-8, a broken list or table, or holds something else
            than objects; the message says what.
    """
    with unpacked(path) as stream:
        content = stream.read()
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
    """True if the first line is an object, or at least half of all lines are."""
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
    """Count the rows of a table with a cell whose lines look like rows."""
    return sum(isinstance(line, Line) and line.holds_rows for line in lines)


def _line_of(row: Row) -> AnyLine:
    number, value = row
    if isinstance(value, str):
        return BadLine(number, "", value)
    try:
        return Line(number, as_json(value), value)
    except DataError:
        # A column of bytes, as images are: nothing here reads or copies it.
        return Line(number, as_json(without_other_kinds(value)[0]), value)


@contextmanager
def unpacked(path: str | Path) -> Iterator[BinaryIO]:
    """The bytes of a file that may be gzipped.

    Raises:
        DataError: it cannot be read, also by whoever reads from it.
    """
    try:
        with Path(path).open("rb") as stream:
            # By its first bytes: what was downloaded may have lost its ending.
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
    if not isinstance(value, dict):
        return BadLine(number, raw, f"got {raw[:60]!r}, wanted a JSON object")
    if is_too_deep(raw, value):
        return BadLine(number, raw, f"got lists or objects nested more than {DEEPEST} deep")
    return Line(number, raw, value)


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
    if "\r" in raw.strip():
        # Never inside of a string, where JSON has it as an escape.
        return (
            "got lines that end with a carriage return alone; `tr '\\r' '\\n'` makes line feeds "
            "of them"
        )
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
        raise DataError(f"{path}:{number}: malformed JSON: wanted one list and nothing after it")


def _decode_item(text: str, position: int) -> tuple[Any, int]:
    """The value, or what is wrong with it, and where it ends."""
    try:
        return _decoder.raw_decode(text, position)
    except _TwiceError as error:
        return error, _lenient.raw_decode(text, position)[1]


def _told_apart(items: list[_Value]) -> list[_Value]:
    """Number items by their place in the list if several begin on one line."""
    if len({number for number, _, _ in items}) == len(items):
        return items
    return [(number, raw, value) for number, (_, raw, value) in enumerate(items, start=1)]


def _after_space(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    return found.end() if found else position


# A data file in blocks of whole records, so that memory does not grow with it.
#
# JSON lines are streamed; a JSON list or a table is read whole, and its rows handed out in blocks.

BLOCK_BYTES = 1 << 20
_BLOCK_ROWS = 512
_HEAD_BYTES = 4096


@dataclass(frozen=True)
class Block:
    """Whole records of a file: bytes of JSON lines, the first of which is number ``first``.

    Or what was read of them before.
    """

    first: int
    content: bytes | list[AnyLine]

    def lines(self, path: str) -> list[AnyLine]:
        """Raises DataError, with the line, where they are not UTF-8."""
        if isinstance(self.content, list):
            return self.content
        return list(json_lines(decode_utf8(self.content, path, self.first), self.first))


class BlockFile:
    """A file whose lines can be gone through as often as it takes.

    Raises:
        DataError: as ``read_lines``; what is wrong with JSON lines only as it is come to.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = str(path)
        # A list or a table has no lines to cut at, and is read whole.
        self._rows = None if _has_json_lines(self._path) else read_lines(path)

    def lines(self) -> Iterator[AnyLine]:
        """One after the other."""
        if self._rows is not None:
            yield from self._rows
            return
        for block in _stream(self._path, 1, BLOCK_BYTES):
            yield from block.lines(self._path)

    def objects(self) -> Iterator[Line]:
        """Lines that are a JSON object."""
        return (line for line in self.lines() if isinstance(line, Line))

    def blocks(self, lines_per_record: int) -> Iterator[Block]:
        """The whole file in blocks; a record lies in one block."""
        if self._rows is None:
            return _stream(self._path, lines_per_record, BLOCK_BYTES)
        return _in_blocks(self._rows, lines_per_record * _BLOCK_ROWS)


def _in_blocks(rows: Iterable[AnyLine], size: int) -> Iterator[Block]:
    rest = iter(rows)
    while block := list(islice(rest, size)):
        yield Block(block[0].number, block)


def _has_json_lines(path: str) -> bool:
    """True if each line is a JSON object by itself: no JSON list, no table."""
    with unpacked(path) as stream:
        head = stream.read(_HEAD_BYTES).removeprefix(codecs.BOM_UTF8)
    if head.lstrip().startswith(b"[") or describe_binary(head, path) is not None:
        return False
    return are_json_lines(
        line for block in _stream(path, 1, BLOCK_BYTES) for line in block.lines(path)
    )


def _stream(path: str, lines_per_record: int, size: int) -> Iterator[Block]:
    first, number, in_block, whole = 1, 1, 0, 0
    block: list[bytes] = []
    for number, raw in enumerate(_raw_lines(path), start=1):
        block.append(raw)
        in_block += len(raw)
        # Empty lines are no part of a record.
        whole += lines_per_record > 1 and bool(raw.decode(errors="replace").strip())
        if in_block >= size and whole % lines_per_record == 0:
            yield Block(first, b"".join(block))
            first, in_block, block = number + 1, 0, []
    if block:
        yield Block(first, b"".join(block))


def _raw_lines(path: str) -> Iterator[bytes]:
    with unpacked(path) as stream:
        for number, raw in enumerate(stream):
            yield raw if number else raw.removeprefix(codecs.BOM_UTF8)


# Files that cannot be read as data: what they are, and what to do.

_WANTED = "wanted JSON lines, one JSON list, or a table"
# The first bytes of a file -> what it is, and how pandas reads it, if it does.
_BINARY = {
    b"PAR1": ("a Parquet file", "read_parquet({path!r})"),
    b"ARROW1": ("an Arrow file", "read_feather({path!r})"),
    b"PK\x03\x04": ("a zip archive (spreadsheets are zip archives)", None),
    b"\x28\xb5\x2f\xfd": ("a file compressed by zstd", None),
    b"\xfd7zXZ\x00": ("a file compressed by xz", None),
    b"BZh": ("a file compressed by bzip2", None),
}


# Encodings of two and four bytes for a letter, as some programs of Windows write them: by their
# byte order mark, or by the zeros around a first ASCII letter. One mark begins with another.
_WIDE = {
    "UTF-32": rb"\xff\xfe\0\0|\0\0\xfe\xff",
    "UTF-16": rb"\xff\xfe|\xfe\xff",
    "UTF-32LE": rb"[\s!-~]\0\0\0",
    "UTF-32BE": rb"\0\0\0[\s!-~]",
    "UTF-16LE": rb"[\s!-~]\0[\s!-~]\0",
    "UTF-16BE": rb"\0[\s!-~]\0[\s!-~]",
}


def describe_binary(content: bytes, path: str) -> str | None:
    """Name a binary content by its first bytes, for an error; None for what may be text.

    A Parquet or an Arrow file is only told of where pyarrow is not installed.
    """
    for name, begin in _WIDE.items():
        if re.match(begin, content):
            return f"got text in {name}, {_WANTED} in UTF-8: `iconv -f {name} -t UTF-8` converts it"
    for start, (kind, reader) in _BINARY.items():
        if not content.startswith(start):
            continue
        if reader is None:
            return f"got {kind}, {_WANTED}: unpack it"
        return f"got {kind}, which pyarrow reads: {_install_or_convert(reader, path)}"
    return None


def _install_or_convert(reader: str, path: str) -> str:
    target = str(Path(path).with_suffix(".jsonl"))
    if target == path:
        target = str(Path(path).with_suffix(".converted.jsonl"))
    return (
        f"{install_command('tables')} brings it, or convert it by this line of Python, with "
        f"pandas: import pandas; pandas.{reader.format(path=path)}"
        f'.to_json({target!r}, orient="records", lines=True)'
    )
