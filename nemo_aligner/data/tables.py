"""Tables with named columns as data: CSV and TSV files, and with pyarrow Parquet and Arrow files.

A row is an object whose keys are the columns. In a CSV file all is text: a column is of numbers if
most cells are, and then an empty cell is a missing one, like null, and any other stays the text
that it is; a column that is called as a text of a format is (``_TEXTS``) stays text.

Quotes of a CSV file have to be whole: a row with one too many is malformed, and reading goes on in
the next line. In a TSV file a quote is a letter as any other.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from nemo_aligner.errors import DataError

# The line or row that it is, and its cells by column, or what is wrong with it.
Row: TypeAlias = tuple[int, dict[str, Any] | str]

_PARQUET, _ARROW = b"PAR1", b"ARROW1"
_SEPARATORS = ",\t;"
_ENDINGS = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
_TEXTS = re.compile(
    "(prompt|chosen|rejected|response|completion|text|instruction|question|input|output|context"
    "|answer|prediction|source|subset|kind|domain|id)[ _]?([0-9]+|[A-Za-z])?"
)
# Doubled quotes inside of quotes, as programs write them that quote cells of a TSV file, too.
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
        return list(enumerate(table.to_pylist(), start=1))
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
    """Whether a cell has lines that look like rows, as those have that a stray quote swallows."""
    texts = [cell for cell in cells if isinstance(cell, str)]
    return any(
        line.count(separator) == len(cells) - 1 > 0
        for text in texts
        for line in text.split("\n")[:-1]
        for separator in _SEPARATORS
    )


def _cells(text: str, separator: str) -> list[tuple[int, list[str] | str]]:
    """Rows that are not empty, each by the line it begins on: cells, or what is wrong with them."""
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
            strict=True,
        )
        before = start
        try:
            for cells in reader:
                if cells:
                    yield start + 1, _unless_quoted(cells, separator)
                start = before + reader.line_num
        except csv.Error as error:
            yield start + 1, f"got a quote that is not one of a pair around a cell: {error}"
            start += 1


def _unless_quoted(cells: list[str], separator: str) -> list[str] | str:
    if separator != "\t" or not any(map(_QUOTED.fullmatch, cells)):
        return cells
    return "got a cell in quotes with doubled quotes in it, wanted no quoting in a file with tabs"


def _are_numbers(column: Sequence[str]) -> bool:
    """Most of those that are given."""
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
