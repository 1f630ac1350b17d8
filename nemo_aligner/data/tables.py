"""Tables with named columns: CSV and TSV files.

A row is an object whose keys are the column names. Cells are text. A column whose cells are mostly
numbers is numeric: its empty cells are missing, like null, and its other cells stay text. A column
whose cells are all true or false (in any case) or empty has bools, and null where it is empty. The
settings decide about the columns that they name (``NamedColumns``); of the others, a column with
the name of a text field of a format (``_TEXTS``) always has texts.

An unpaired quote in a CSV file makes its row malformed; reading continues at the next line. In a
TSV file a quote is an ordinary character.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from nemo_aligner.utils.errors import DataError

_SEPARATORS = ",\t;"
_ENDINGS = (".csv", ".tsv", ".csv.gz", ".tsv.gz")
_TEXTS = re.compile(
    "(prompt|chosen|rejected|response|completion|text|instruction|question|input|output|context"
    "|answer|prediction|source|subset|kind|domain|id|history|human[ _]ref)[ _]?([0-9]+|[A-Za-z])?"
    "|system(_prompt)?|principle|prompt_source|task"
)
# Matches a quoted cell that contains doubled quotes, as some programs write in TSV files.
_QUOTED = re.compile(r'"(?=.*"".*")(?:[^"]|"")*"', re.DOTALL)
_NUMBER = re.compile(r"\s*[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?\s*")
_BOOLS = {"true": True, "false": False}
_WHOLE_NUMBER = re.compile(r"\s*-?\d+\s*")


@dataclass(frozen=True)
class NamedColumns:
    """Columns that the settings name, which decides how the cells of a CSV file are read.

    Attributes:
        texts: columns of texts, such as the fields of a pair; their cells stay text.
        labels: columns of labels; their cells are numbers or bools, whatever their names.
    """

    texts: Collection[str] = ()
    labels: Collection[str] = ()

    def reader_of(self, name: str, cells: Sequence[str]) -> Callable[[str], Any]:
        """Return the function that reads each of the ``cells`` of the column ``name``."""
        is_label = name in self.labels
        if name in self.texts or (_TEXTS.fullmatch(name) and not is_label):
            return str
        if _are_bools(cells):
            return _read_bool
        return _read_number if is_label or _are_numbers(cells) else str


NONE_NAMED = NamedColumns()


class Row(NamedTuple):
    """A row of a table.

    Attributes:
        number: line on which the row begins, or its number from 1 in a binary table.
        cells: cells by the name of their column; or, if the row is malformed, the reason.
        holds_rows: True if a cell contains lines that look like rows, as happens after an unpaired
            quote.
    """

    number: int
    cells: dict[str, Any] | str
    holds_rows: bool = False


def read_text_table(text: str, path: str, named: NamedColumns) -> list[Row] | None:
    """Read the rows of a CSV or TSV file, numbered by the line on which they begin.

    A first column of whole numbers without a name is the index that pandas writes; it is ignored.

    Returns:
        None if the text is not a CSV or TSV table.

    Raises:
        DataError: a column has no name, or two columns have the same name.
    """
    separator = max(_SEPARATORS, key=text.partition("\n")[0].count)
    rows = _split_cells(text, separator)
    readable = [cells for _, cells in rows if not isinstance(cells, str)]
    if not readable or readable[0] is not rows[0][1]:
        return None
    is_table = len(readable) > 1 and 1 < len(readable[0]) == len(readable[1])
    if not (is_table or path.lower().endswith(_ENDINGS)):
        return None
    header, *body = readable
    names = [name.strip() for name in header]
    columns = list(zip(*(cells for cells in body if len(cells) == len(names)), strict=True))
    is_indexed = not names[0] and all(map(_WHOLE_NUMBER.fullmatch, columns[0] if columns else ()))
    needed = names[is_indexed:]
    if not all(needed) or len(set(needed)) < len(needed):
        raise DataError(
            f"{path}:1: the columns {names} need different names that are not empty. Rename them"
        )
    readers = [named.reader_of(*column) for column in zip(names, columns, strict=False)]
    return [
        Row(line, cells) if isinstance(cells, str) else _read_row(line, names, cells, readers)
        for line, cells in rows[1:]
    ]


def _split_cells(text: str, separator: str) -> list[tuple[int, list[str] | str]]:
    """Split a CSV or TSV text into rows; return the rows that are not empty.

    Returns:
        For each row: the line on which it begins; and its cells, or the reason it is malformed.
    """
    # The csv module rejects cells of more than 131,072 characters. Its limit holds for the whole
    # process, so it is reset afterwards.
    limit = csv.field_size_limit(max(len(text), 1))
    try:
        return list(_number_rows(io.StringIO(text, newline="").readlines(), separator))
    finally:
        csv.field_size_limit(limit)


def _number_rows(lines: list[str], separator: str) -> Iterator[tuple[int, list[str] | str]]:
    start = 0
    while start < len(lines):
        reader = csv.reader(
            map(lines.__getitem__, range(start, len(lines))),
            delimiter=separator,
            quoting=csv.QUOTE_NONE if separator == "\t" else csv.QUOTE_MINIMAL,
            # If not strict, an unpaired quote would silently swallow all rows up to the next one.
            strict=True,
        )
        first = start
        try:
            for cells in reader:
                if cells:
                    yield start + 1, _check_quotes(cells, separator)
                start = first + reader.line_num
        except csv.Error as error:
            yield start + 1, f"got an unpaired quote in a cell: {error}"
            start += 1


def _check_quotes(cells: list[str], separator: str) -> list[str] | str:
    if separator != "\t" or not any(map(_QUOTED.fullmatch, cells)):
        return cells
    return "got a cell in quotes with doubled quotes in it, wanted no quoting in a file with tabs"


def _are_numbers(column: Sequence[str]) -> bool:
    """True if most of the column's cells that are not empty are numbers, so it is numeric."""
    filled = [cell for cell in column if cell.strip()]
    return 2 * sum(map(_is_number, filled)) > len(filled)


def _is_number(cell: str) -> bool:
    return _NUMBER.fullmatch(cell) is not None


def _are_bools(column: Sequence[str]) -> bool:
    """True if all of the column's cells that are not empty are true or false."""
    filled = [cell for cell in column if cell.strip()]
    return bool(filled) and all(cell.strip().lower() in _BOOLS for cell in filled)


def _read_row(
    line: int, names: list[str], cells: list[str], readers: list[Callable[[str], Any]]
) -> Row:
    if len(cells) != len(names):
        return Row(line, f"got {len(cells)} cells, wanted {len(names)}, one for each column")
    values = {
        name: read(cell)
        for name, cell, read in zip(names, cells, readers, strict=True)
        # Only the index that pandas writes has no name.
        if name
    }
    return Row(line, values, _hold_rows(cells))


def _read_number(cell: str) -> float | str | None:
    if not cell.strip():
        return None
    if not _is_number(cell):
        return cell
    try:
        return int(cell)
    # The cell has a point or an exponent, or more digits than Python converts to an integer.
    except ValueError:
        return float(cell)


def _read_bool(cell: str) -> bool | None:
    return _BOOLS[cell.strip().lower()] if cell.strip() else None


def _hold_rows(cells: Sequence[str]) -> bool:
    """True if a cell contains lines that look like rows, as happens after an unpaired quote."""
    return any(
        line.count(separator) == len(cells) - 1 > 0
        for cell in cells
        for line in cell.split("\n")[:-1]
        for separator in _SEPARATORS
    )
