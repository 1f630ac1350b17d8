"""Lines of preference data to a file."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from nemo_aligner.errors import ConfigError


def write_lines(path: Path, lines: Iterable[str]) -> str:
    """Write the lines, in UTF-8, into a file whose folder is made if need be.

    What to say of it: its path, and whether another file was there.

    Raises:
        ConfigError: there is something in the way of the folder, named ``output``.
    """
    text = "".join(f"{line}\n" for line in lines).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replaces = path.exists() and path.read_bytes() != text
        path.write_bytes(text)
    except OSError as error:
        raise ConfigError(
            f"output: got {path.parent}, wanted a folder to write to: {error}"
        ) from error
    return f"{path} (in place of another)" if replaces else str(path)


def replace_lines(path: Path, lines: Iterable[str]) -> None:
    """``write_lines`` for a file that may be read, or left, at any time: it is whole, old or new.

    Raises:
        ConfigError: see ``write_lines``.
    """
    unnamed = path.with_name(f"{path.name}.partial")
    write_lines(unnamed, lines)
    os.replace(unnamed, path)
