"""Read a data file as JSON objects with line numbers: JSON lines, a JSON list, or a table.

A file may be gzipped. The content of a file decides how it is read, not its name. A line that is
not a JSON object is malformed, and the other lines are read; a file without any object is an error.
``tables.py`` reads the tables that are text. ``read_lines`` reads a whole file; ``BlockFile`` reads
a file in blocks, so that memory does not grow with its size. ``readers.py`` turns the objects into
records.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

from nemo_aligner.config.describe import install_command
from nemo_aligner.contract.messages import without_struct_nulls
from nemo_aligner.data.records import DEEPEST, as_json, is_too_deep, without_other_kinds
from nemo_aligner.data.tables import NONE_NAMED, NamedColumns, Row, read_text_table
from nemo_aligner.utils.errors import DataError
from nemo_aligner.utils.missing import describe_unreadable

# Parquet and Arrow files, which pyarrow reads. Hugging Face ``datasets`` keeps data sets as Arrow
# streams, whose first bytes mark the first message; pandas and polars write Arrow files.

_PARQUET, _ARROW, _ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"


def read_binary_table(content: bytes, path: str) -> list[Row] | None:
    """Read the rows of a Parquet or Arrow file, or of a file with an Arrow stream.

    A NaN becomes null: pandas writes missing numbers as NaN.

    Returns:
        None if the file is neither Parquet nor Arrow, or if pyarrow is not installed.

    Raises:
        DataError: the file begins like a Parquet or Arrow file, but cannot be read.
    """
    if not content.startswith((_PARQUET, _ARROW, _ARROW_STREAM)):
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
            is_stream = content.startswith(_ARROW_STREAM)
            table = (ipc.open_stream if is_stream else ipc.open_file)(source).read_all()
        rows = (_without_nan(without_struct_nulls(row)) for row in table.to_pylist())
        return [Row(number, cells) for number, cells in enumerate(rows, start=1)]
    # Python raises the last two for a time that it cannot hold, such as the year 10000.
    except (pyarrow.ArrowException, OSError, OverflowError, ValueError) as error:
        kind = "a Parquet" if content.startswith(_PARQUET) else "an Arrow"
        raise DataError(f"{path}: got {kind} file that cannot be read: {error}") from error


def _without_nan(value: Any) -> Any:
    """Return a cell or a row of a table with null in place of each NaN, at any depth."""
    if isinstance(value, float):
        return None if math.isnan(value) else value
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    return value


# Objects with line numbers.
#
# A cell of a table may contain a line with a JSON object. Therefore a file that does not begin with
# an object, and has few of them, is read as a table if possible.


@dataclass(frozen=True)
class Line:
    """One object of a file.

    Attributes:
        number: line on which the object begins.
        raw: JSON of the object, as written in the file, or made of a table's row.
        value: the object; a table's row may have infinities, dates or bytes, so write ``raw`` to a
            file.
        holds_rows: True for a table's row that has a cell with lines that look like rows.
    """

    number: int
    raw: str
    value: dict[str, Any]
    holds_rows: bool = False


@dataclass(frozen=True)
class BadLine:
    """A line that is not a JSON object: its number, its text, and the reason it is malformed."""

    number: int
    raw: str
    reason: str


AnyLine: TypeAlias = Line | BadLine
# An item of a JSON list: the line on which it begins, its JSON text, and the decoded value.
_Value: TypeAlias = tuple[int, str, Any]


def read_lines(path: str | Path, named: NamedColumns = NONE_NAMED) -> list[AnyLine]:
    """Read all objects of a file of JSON lines or of a JSON list, or all rows of a table.

    The line numbers of a Parquet or Arrow file count its rows, and those of a JSON list its items
    if several are on one line. The columns ``named`` of a CSV file are read as texts or numbers.

    Raises:
        DataError: the file is missing, not UTF-8, a broken list or table, or has no objects.
    """
    with open_unpacked(path) as stream:
        content = stream.read()
    rows = read_binary_table(content, str(path))
    if rows is not None:
        return [_make_line(row) for row in rows]
    text = _decode(content, str(path))
    if text.lstrip().startswith("["):
        lines = [_check_object(item) for item in _number_items(list(_list_items(text, str(path))))]
    else:
        lines = list(json_lines(text))
    first = lines[0] if lines else None
    if not isinstance(first, BadLine) or are_json_lines(lines):
        return lines
    rows = None if text.lstrip().startswith("{") else read_text_table(text, str(path), named)
    if rows is not None:
        return [_make_line(row) for row in rows]
    if not any(isinstance(line, Line) for line in lines):
        raise DataError(
            f"{path}:{first.number}: {first.reason}; no line of the file is a JSON object"
        )
    return lines


def are_json_lines(lines: Iterable[AnyLine]) -> bool:
    """True if the lines are JSON lines, not a table: the first or half of them are JSON objects."""
    objects = count = 0
    for count, line in enumerate(lines, start=1):
        objects += isinstance(line, Line)
        if objects == count == 1:
            return True
    return 2 * objects >= count > 0


def count_swallowed(lines: Iterable[AnyLine]) -> int:
    """Count the rows of a table that have a cell with lines that look like rows."""
    return sum(isinstance(line, Line) and line.holds_rows for line in lines)


def _make_line(row: Row) -> AnyLine:
    number, value, holds_rows = row
    if isinstance(value, str):
        return BadLine(number, "", value)
    try:
        raw = as_json(value)
    except DataError:
        # A column has bytes, for example images. ``raw`` is without it, as no format reads bytes.
        raw = as_json(without_other_kinds(value)[0])
    return Line(number, raw, value, holds_rows)


@contextmanager
def open_unpacked(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file that may be gzipped; reading from it gives the unpacked bytes.

    Raises:
        DataError: the file cannot be opened, or a read within the context fails.
    """
    try:
        with Path(path).open("rb") as opened:
            # A pipe can be read only once, from its start.
            stream = opened if opened.seekable() else io.BytesIO(opened.read())
            # The first bytes tell whether the file is gzipped. Its name may lack the ending .gz.
            is_packed = stream.read(2) == b"\x1f\x8b"
            stream.seek(0)
            yield cast(BinaryIO, gzip.GzipFile(fileobj=stream)) if is_packed else stream
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(describe_unreadable(path, error)) from error


def _decode(content: bytes, path: str) -> str:
    problem = describe_binary(content, path)
    if problem is not None:
        raise DataError(f"{path}: {problem}")
    return decode_utf8(content.removeprefix(codecs.BOM_UTF8), path)


def decode_utf8(content: bytes, path: str, first: int = 1) -> str:
    """Decode complete lines of a file; ``first`` is the number of the first of these lines.

    Raises:
        DataError: a line is not UTF-8; the message has its number.
    """
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + first
        raise DataError(
            f"{path}:{line}: not valid UTF-8 ({error.reason}). Convert the file to UTF-8"
        ) from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class _RepeatedKeyError(ValueError):
    """A JSON object has the same key twice, and JSON does not define which value counts."""


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise _RepeatedKeyError(f"got the key {repeated!r:.60} twice in one object, wanted it once")
    return value


_decoder = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_make_object)
_lenient = json.JSONDecoder(parse_constant=_refuse_constant)


def _check_object(item: _Value) -> AnyLine:
    number, raw, value = item
    if isinstance(value, _RepeatedKeyError):
        return BadLine(number, raw, f"malformed JSON: {value}")
    if not isinstance(value, dict):
        return BadLine(number, raw, f"got {raw[:60]!r}, wanted a JSON object")
    if is_too_deep(raw, value):
        return BadLine(number, raw, f"got lists or objects nested more than {DEEPEST} deep")
    return Line(number, raw, value)


def json_lines(text: str, first: int = 1) -> Iterator[AnyLine]:
    """Parse the lines of ``text`` that are not empty; ``first`` is the number of its first line."""
    # splitlines() would also split at U+2028 and similar line ends, which JSON strings may contain.
    for number, raw in enumerate(text.split("\n"), start=first):
        if raw.strip():
            try:
                yield _check_object((number, raw.rstrip("\r"), _decoder.decode(raw)))
            except (ValueError, RecursionError) as error:
                yield BadLine(number, raw, f"malformed JSON: {_describe_error(raw, error)}")


def _describe_error(raw: str, error: Exception) -> str:
    """Describe the ``error`` of decoding the line ``raw``, without "line 1", its own numbering."""
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    if "\r" in raw.strip():
        # JSON escapes a carriage return inside a string, so this one is a line end.
        return (
            "its lines end with a carriage return without a line feed. Convert them with "
            "`tr '\\r' '\\n'`"
        )
    near = raw[max(0, error.pos - 20) : error.pos + 20]
    return f"{error.msg} at character {error.pos + 1}, near {near!r}"


_SPACE = re.compile(r"[ \t\r\n]*")


def _list_items(text: str, path: str) -> Iterator[_Value]:
    """Yield the items of a JSON list with the lines on which they begin."""
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
    """Decode the JSON value that begins at ``position`` of ``text``.

    Returns:
        The value, or the error about a key that it repeats; and the position after the value.
    """
    try:
        return _decoder.raw_decode(text, position)
    except _RepeatedKeyError as error:
        return error, _lenient.raw_decode(text, position)[1]


def _number_items(items: list[_Value]) -> list[_Value]:
    """Replace line numbers by positions in the list, from 1, if several items share a line."""
    if len({number for number, _, _ in items}) == len(items):
        return items
    return [(number, raw, value) for number, (_, raw, value) in enumerate(items, start=1)]


def _after_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


# Blocks of complete records, so that memory does not grow with the file.
#
# JSON lines are streamed. A JSON list or a table is read at once, and its rows are split into
# blocks.

BLOCK_BYTES = 1 << 20
_BLOCK_ROWS = 512
_HEAD_BYTES = 4096


@dataclass(frozen=True)
class Block:
    """A part of a file that holds complete records, so that no record is in two blocks.

    Attributes:
        first: number of the block's first line in the file.
        content: bytes of JSON lines, or the parsed items of a JSON list or rows of a table.
    """

    first: int
    content: bytes | list[AnyLine]

    def lines(self, path: str) -> list[AnyLine]:
        """Parse the lines of this block.

        Errors name the file by ``path``. Raises DataError if a line is not UTF-8.
        """
        if isinstance(self.content, list):
            return self.content
        return list(json_lines(decode_utf8(self.content, path, self.first), self.first))


class BlockFile:
    """A data file that can be read several times, line by line or block by block.

    The columns ``named`` of a CSV file are read as texts or numbers.

    Raises:
        DataError: the file is missing, not UTF-8, or a broken list or table, or it has no object.
            In a file of JSON lines, errors are raised when the lines are read.
    """

    def __init__(self, path: str | Path, named: NamedColumns = NONE_NAMED) -> None:
        self._path = str(path)
        # A JSON list or a table cannot be split at line ends, so all of it is read now. JSON lines
        # are read block by block later.
        self._rows = None if _has_json_lines(self._path) else read_lines(path, named)

    def lines(self) -> Iterator[AnyLine]:
        """Yield all lines of the file in order, including malformed ones (``BadLine``)."""
        if self._rows is not None:
            yield from self._rows
            return
        for block in _stream(self._path, 1, BLOCK_BYTES):
            yield from block.lines(self._path)

    def objects(self) -> Iterator[Line]:
        """Yield the lines that are a JSON object, and skip malformed ones."""
        return (line for line in self.lines() if isinstance(line, Line))

    def blocks(self, lines_per_record: int) -> Iterator[Block]:
        """Split the file into blocks; all lines of a record are in the same block."""
        if self._rows is None:
            return _stream(self._path, lines_per_record, BLOCK_BYTES)
        return _split_rows(self._rows, lines_per_record * _BLOCK_ROWS)


def _split_rows(rows: Iterable[AnyLine], size: int) -> Iterator[Block]:
    remaining = iter(rows)
    while block := list(islice(remaining, size)):
        yield Block(block[0].number, block)


def _has_json_lines(path: str) -> bool:
    """True if a file consists of JSON lines; False for a JSON list or a table."""
    with open_unpacked(path) as stream:
        head = stream.read(_HEAD_BYTES).removeprefix(codecs.BOM_UTF8)
    if head.lstrip().startswith(b"[") or describe_binary(head, path) is not None:
        return False
    return are_json_lines(
        line for block in _stream(path, 1, BLOCK_BYTES) for line in block.lines(path)
    )


def _stream(path: str, lines_per_record: int, size: int) -> Iterator[Block]:
    first, number, block_bytes, num_filled = 1, 1, 0, 0
    block: list[bytes] = []
    for number, raw in enumerate(_raw_lines(path), start=1):
        block.append(raw)
        block_bytes += len(raw)
        # Count only lines that are not empty, because empty lines are not part of a record.
        num_filled += lines_per_record > 1 and bool(raw.decode(errors="replace").strip())
        if block_bytes >= size and num_filled % lines_per_record == 0:
            yield Block(first, b"".join(block))
            first, block_bytes, block = number + 1, 0, []
    if block:
        yield Block(first, b"".join(block))


def _raw_lines(path: str) -> Iterator[bytes]:
    with open_unpacked(path) as stream:
        for number, raw in enumerate(stream):
            yield raw if number else raw.removeprefix(codecs.BOM_UTF8)


# Errors about files that cannot be read as data: what the files are, and how to convert them.

_READABLE = "wanted JSON lines, one JSON list, or a table"
_BY_PANDAS = (
    'import pandas; pandas.{reader}({{path!r}}).to_json({{target!r}}, orient="records", lines=True)'
)
# First bytes of a file, what it is, and the line of Python that converts it; None if it has to be
# unpacked.
_BINARY = {
    _PARQUET: ("a Parquet file", _BY_PANDAS.format(reader="read_parquet")),
    _ARROW: ("an Arrow file", _BY_PANDAS.format(reader="read_feather")),
    _ARROW_STREAM: (
        "an Arrow file",
        "import datasets; datasets.Dataset.from_file({path!r}).to_json({target!r})",
    ),
    b"PK\x03\x04": ("a zip archive (spreadsheets are zip archives)", None),
    b"\x28\xb5\x2f\xfd": ("a file compressed by zstd", None),
    b"\xfd7zXZ\x00": ("a file compressed by xz", None),
    b"BZh": ("a file compressed by bzip2", None),
}


# Encodings with two or four bytes per character, as some Windows programs write them. They are
# recognized by their byte order mark, or by the zero bytes around the first ASCII character. UTF-32
# comes first, because its little-endian mark begins with that of UTF-16.
_WIDE = {
    "UTF-32": rb"\xff\xfe\0\0|\0\0\xfe\xff",
    "UTF-16": rb"\xff\xfe|\xfe\xff",
    "UTF-32LE": rb"[\s!-~]\0\0\0",
    "UTF-32BE": rb"\0\0\0[\s!-~]",
    "UTF-16LE": rb"[\s!-~]\0[\s!-~]\0",
    "UTF-16BE": rb"\0[\s!-~]\0[\s!-~]",
}


def describe_binary(content: bytes, path: str) -> str | None:
    """Describe binary content by its first bytes, for an error; None if it may be UTF-8 text.

    This is called for a Parquet or Arrow file only if pyarrow is not installed.
    """
    for name, begin in _WIDE.items():
        if re.match(begin, content):
            return (
                f"got text in {name}, {_READABLE} in UTF-8. Convert it by "
                f"`iconv -f {name} -t UTF-8`"
            )
    for start, (kind, conversion) in _BINARY.items():
        if not content.startswith(start):
            continue
        if conversion is None:
            return f"got {kind}, {_READABLE}. Unpack it"
        return f"got {kind}, which needs pyarrow. {_advise_pyarrow(conversion, path)}"
    return None


def _advise_pyarrow(conversion: str, path: str) -> str:
    target = str(Path(path).with_suffix(".jsonl"))
    if target == path:
        target = str(Path(path).with_suffix(".converted.jsonl"))
    return (
        f"Install it with {install_command('tables')}, or convert the file with this Python line: "
        f"{conversion.format(path=path, target=target)}"
    )
