"""A data file in blocks of whole records, so that its size does not matter.

A file of JSON lines is streamed; of one JSON list or a table, which are read whole, the rows are
handed out in blocks.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from nemo_aligner.data.other_files import describe_binary
from nemo_aligner.data.sources import (
    AnyLine,
    Line,
    are_json_lines,
    decode_utf8,
    json_lines,
    read_lines,
    unpacked,
)

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
        self._rows = None if _has_json_lines(self._path) else read_lines(path)

    def lines(self) -> Iterator[AnyLine]:
        """One after the other."""
        if self._rows is not None:
            yield from self._rows
            return
        for block in _stream(self._path, 1, BLOCK_BYTES):
            yield from block.lines(self._path)

    def objects(self) -> Iterator[Line]:
        """Those that are a JSON object."""
        return (line for line in self.lines() if isinstance(line, Line))

    def blocks(self, lines_per_record: int) -> Iterator[Block]:
        """All of it; a record is in one block."""
        if self._rows is None:
            return _stream(self._path, lines_per_record, BLOCK_BYTES)
        return _in_blocks(self._rows, lines_per_record * _BLOCK_ROWS)


def _in_blocks(rows: Iterable[AnyLine], size: int) -> Iterator[Block]:
    rest = iter(rows)
    while block := list(islice(rest, size)):
        yield Block(block[0].number, block)


def _has_json_lines(path: str) -> bool:
    """Whether its lines are JSON objects, and nothing says that they belong together."""
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
