"""Writing of files: whole or not at all, and why a write failed, above all a full disk."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nemo_aligner.utils.errors import CheckpointError, one_line

# Words of torch's zip writer, which loses the system's error, and of safetensors, which quotes it.
_CUT_OFF = ("unexpected pos", "PytorchStreamWriter failed", "iostream error")
_FULL = ("No space left on device",)


def is_disk_full(error: BaseException) -> bool:
    """Tell if a write failed as the disk, or the user's part of it, is full; or looks so."""
    is_of_system = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return is_of_system or any(words in str(error) for words in (*_FULL, *_CUT_OFF))


def write_problem(path: Path, error: BaseException) -> str:
    """Say why a write to ``path`` failed; of a full disk also how much is free, and what to do."""
    # Only here: the verbs start with the standard library alone, to say what is not installed.
    from nemo_aligner.utils.console import show_bytes

    if not is_disk_full(error):
        return one_line(error)
    folder = next((part for part in (path, *path.parents) if part.is_dir()), Path.cwd())
    problem = "the disk is full"
    if isinstance(error, OSError) and error.errno == errno.EDQUOT:
        problem = "the disk quota is used up"
    elif any(words in str(error) for words in _CUT_OFF):
        problem = "a write was cut off, as by a full disk"
    free = show_bytes(shutil.disk_usage(folder).free)
    place = "there" if folder == path else f"in {folder}"
    return f"{problem}, with {free} free {place}. Free some space, or choose another disk"


@contextmanager
def explaining_full_disk(output: Path) -> Iterator[None]:
    """Raise CheckpointError where the block fails to write parts of ``output``, as for space."""
    try:
        yield
    except OSError as error:
        if not is_disk_full(error):
            raise
        # The file may lie elsewhere, as temporary ones do.
        place = Path(error.filename).absolute() if error.filename else output
        problem = write_problem(place, error)
        raise CheckpointError(f"{place}: cannot be written: {problem}") from error


def write_whole(path: Path, content: bytes) -> None:
    """Write a file by way of another name, so that it is never cut off; makes its folder.

    What is no plain file, such as /dev/stdout, is written directly.

    Raises:
        OSError: it cannot be written; a file that was there is as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    target = path.resolve()  # a link stays one
    unnamed = target.with_name(f"{target.name}.partial")
    try:
        unnamed.write_bytes(content)
        os.replace(unnamed, target)
    except OSError:
        with suppress(OSError):
            unnamed.unlink(missing_ok=True)
        raise
