"""Lines of preference data, and records of a program, to a file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from filecmp import cmp
from pathlib import Path
from typing import Any

from nemo_aligner.errors import ConfigError, DataError, shown


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


def write_records(
    path: Path, records: Iterable[Mapping[str, Any]], may_replace: bool = True
) -> int:
    """Write records of a program as JSON lines; how many there are.

    Record N is line N, counted from 1. A file that holds the same already stays as it is, so that
    what is known of it by its time does, too; no other one is replaced unless ``may_replace``.

    Raises:
        ConfigError: the file holds other records and may not be replaced, or its folder cannot be
            written.
        DataError: one of them is no mapping.
    """
    unnamed, count = path.with_name(f"{path.name}.partial"), 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unnamed.open("w", encoding="utf-8") as lines:
            for count, record in enumerate(records, start=1):
                if not isinstance(record, Mapping):
                    raise DataError(f"record {count}: got {shown(record)}, wanted a dict")
                lines.write(f"{as_json(dict(record))}\n")
        if path.exists() and cmp(unnamed, path, shallow=False):
            return count
        if path.exists() and not may_replace:
            raise ConfigError(
                f"{path}: it has the records that the run in this folder began with, and got "
                "others; wanted the same, or another output"
            )
        os.replace(unnamed, path)
    except OSError as error:
        raise ConfigError(f"{path}: it cannot be written: {error}") from error
    finally:
        unnamed.unlink(missing_ok=True)
    return count


def as_json(value: Mapping[str, Any]) -> str:
    """A record as a line of JSON: NaN and infinity are null, numbers of numpy are numbers.

    What JSON has no kind for, such as dates, becomes its text.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, default=_plain, allow_nan=False)
    except (ValueError, TypeError):
        text = json.dumps(_without_nan(value), ensure_ascii=False, default=_plain)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which a reader refuses by its line
        return json.dumps(_without_nan(value), default=_plain)
    return text


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _without_nan(value: Any) -> Any:
    """With null where JSON has no number, and text for keys that are none."""
    if isinstance(value, Mapping):
        return {str(key): _without_nan(each) for key, each in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
