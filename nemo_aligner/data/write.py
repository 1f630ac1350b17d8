"""Lines of preference data to a file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write the lines, in UTF-8, into a file whose folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
