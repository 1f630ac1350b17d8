"""A data file to JSON objects that know their line.

A file is JSON lines or one JSON list, gzipped or not: its content decides, not its name.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_aligner.errors import DataError


@dataclass(frozen=True)
class Line:
    """One object of a file: the line it begins on, its text as written, and its value."""

    number: int
    raw: str
    value: dict[str, Any]


def read_lines(path: str | Path) -> list[Line]:
    """Every object of a file of JSON lines, or of one JSON list; gzipped files are unpacked.

    Raises:
        DataError: the file is missing, not UTF-8, or not JSON objects; the message says file:line.
    """
    text = _read_text(Path(path))
    objects = _list_items if text.lstrip().startswith("[") else _json_lines
    lines = []
    for number, raw, value in objects(text, str(path)):
        if not isinstance(value, dict):
            raise DataError(f"{path}:{number}: got {raw[:60]!r}, wanted a JSON object")
        lines.append(Line(number, raw, value))
    return lines


def _read_text(path: Path) -> str:
    try:
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}:{line}: not valid UTF-8 ({error.reason})") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_decoder = json.JSONDecoder(parse_constant=_refuse_constant)


def _json_lines(text: str, path: str) -> Iterator[tuple[int, str, Any]]:
    # Not splitlines(): JSON strings may hold U+2028 and its like.
    for number, raw in enumerate(text.split("\n"), start=1):
        if raw.strip():
            try:
                yield number, raw.rstrip("\r"), _decoder.decode(raw)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}:{number}: malformed JSON: {error}") from error


_SPACE = re.compile(r"[ \t\r\n]*")


def _list_items(text: str, path: str) -> Iterator[tuple[int, str, Any]]:
    """The items of a JSON list, one after the other, so that each knows its line."""
    position = _after_space(text, text.index("[") + 1)
    number, counted = 1, 0
    more = not text.startswith("]", position)
    while more:
        number, counted = number + text.count("\n", counted, position), position
        try:
            value, end = _decoder.raw_decode(text, position)
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


def _after_space(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    return found.end() if found else position
