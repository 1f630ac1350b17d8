"""Files that are given as data and are something else: what they are, and how to convert them."""

from __future__ import annotations

import csv
import io
from itertools import islice
from pathlib import Path

from nemo_aligner.errors import short

_WANTED = "wanted JSON lines, or one JSON list"
# The first bytes of a file -> what it is, and how pandas reads it, if it does.
_BINARY = {
    b"PAR1": ("a Parquet file", "read_parquet({path!r})"),
    b"ARROW1": ("an Arrow file", "read_feather({path!r})"),
    b"PK\x03\x04": ("a zip archive (a spreadsheet is one, too)", None),
    b"\x28\xb5\x2f\xfd": ("a file compressed by zstd", None),
    b"\xfd7zXZ\x00": ("a file compressed by xz", None),
    b"BZh": ("a file compressed by bzip2", None),
}
_TABLES = {",": "a CSV", "\t": "a TSV", ";": "a CSV"}
_ENDINGS = (".csv", ".tsv")


def describe_binary(content: bytes, path: str) -> str | None:
    """What the content is by its first bytes, for an error; None for what may be text."""
    for start, (kind, reader) in _BINARY.items():
        if content.startswith(start):
            how = "unpack it" if reader is None else _convert(reader.format(path=path), path)
            return f"got {kind}, {_WANTED}: {how}"
    return None


def describe_table(text: str, path: str) -> str | None:
    """What columns the text has if it is a CSV or TSV file, for an error; None if it is none."""
    separator = max(_TABLES, key=text.partition("\n")[0].count)
    try:
        rows = list(islice(csv.reader(io.StringIO(text, newline=""), delimiter=separator), 2))
    except csv.Error:
        return None
    looks_so = len(rows) == 2 and 1 < len(rows[0]) == len(rows[1])
    if not rows or not (looks_so or path.lower().endswith(_ENDINGS)):
        return None
    columns = short(", ".join(map(repr, rows[0])))
    reader = f"read_csv({path!r}" + (")" if separator == "," else f", sep={separator!r})")
    return (
        f"got {_TABLES[separator]} file with the columns {columns}, {_WANTED}: "
        f"{_convert(reader, path)}"
    )


def _convert(reader: str, path: str) -> str:
    target = str(Path(path).with_suffix(".jsonl"))
    if target == path:
        target = str(Path(path).with_suffix(".converted.jsonl"))
    return (
        "convert it by this line of Python, with pandas: import pandas; "
        f'pandas.{reader}.to_json({target!r}, orient="records", lines=True)'
    )
