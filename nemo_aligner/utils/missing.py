"""Messages about files that a user names and that cannot be read, with the likely correction."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

# Number of files of a folder that a message lists.
_NAMES_SHOWN = 3


def describe_missing(path: str | Path) -> str | None:
    """Describe why ``path`` is not a file: nothing is there, or a folder is.

    Returns:
        The message, which begins with the path; None if there is a file.
    """
    path = Path(path)
    if path.is_dir():
        names = [name for name in _list_names(path) if (path / name).is_file()]
        listed = ", ".join(names[:_NAMES_SHOWN]) + ", ..." * (len(names) > _NAMES_SHOWN)
        return f"{path}: is a folder; name its files{f' ({listed})' if names else ''}"
    if path.exists():
        return None
    folder = path.parent
    if not folder.is_dir():
        return f"{path}: there is no such file; there is no folder {folder} either"
    return f"{path}: there is no such file{near_name_hint(path)}"


def near_name_hint(path: str | Path) -> str:
    """Return the end of an error about a missing file: the file next to it with a similar name.

    Names are compared without their suffixes, which files of different names share. Empty if there
    is no similar name.
    """
    path = Path(path)
    names = {Path(name).stem: name for name in _list_names(path.parent) if name != path.name}
    near = difflib.get_close_matches(path.stem, names, n=1)
    return f"; did you mean {path.parent / names[near[0]]}?" if near else ""


def describe_unreadable(path: str | Path, error: Exception) -> str:
    """Describe for an error message why the file ``path`` could not be read.

    Args:
        error: what reading it raised.
    """
    return describe_missing(path) or f"{path}: cannot be read: {error}"


def _list_names(folder: Path) -> list[str]:
    """List the names in a folder, sorted; none if the folder cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []
