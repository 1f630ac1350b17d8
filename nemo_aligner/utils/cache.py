"""The cache of files that are made once: converted models, data sets of the hub, compiled kernels.

It is the folder ``$NEMO_ALIGNER_CACHE``, by default ``~/.cache/nemo_aligner``. A file in it is
complete, because it is written under another name and then renamed. Only ``remove_cached`` (for
``nemo-aligner cache --clear``) removes files; a removed file is made again when it is needed.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from nemo_aligner.utils.console import say, show_bytes, show_duration
from nemo_aligner.utils.errors import ConfigError
from nemo_aligner.utils.processes import make_temporary, remove_temporary
from nemo_aligner.utils.writing import write_problem

VARIABLE = "NEMO_ALIGNER_CACHE"
_reported: set[Path] = set()


def cache_folder() -> Path:
    """Return the folder of the cache, which may not exist yet.

    Raises:
        ConfigError: it is in the user's home folder, which is unknown.
    """
    try:
        return Path(os.environ.get(VARIABLE) or "~/.cache/nemo_aligner").expanduser().absolute()
    except RuntimeError as error:  # as in a container with a user id that has no name, without HOME
        raise ConfigError(
            f"environment variable {VARIABLE}: got {os.environ.get(VARIABLE) or 'nothing'}, and "
            "this user has no home folder. Set it to a folder that you may write to"
        ) from error


def cached_file(path: Path, origin: str, write: Callable[[Path], None]) -> Path:
    """Return the file ``path`` of the cache, after writing it if it does not exist.

    If several processes start at once, one writes and the others wait for it. On a file system
    without locks several may write; each writes a complete file, and the last one remains.

    Args:
        path: the file, in ``cache_folder()``.
        origin: what the file is made from, for the line that is logged once for each file.
        write: writes the file to the path that it gets, on the same disk.

    Raises:
        ConfigError: the cache cannot be written.
    """
    if not path.exists():
        with _hold_lock(path.with_name(f".{path.name}.lock"), origin):
            # Another process may have written the file while this one waited.
            if not path.exists():
                _write(path, write)
    if path not in _reported:
        _reported.add(path)
        say(f"{origin}: in the cache as {path} ({show_bytes(path.stat().st_size)})")
    return path


def _write(path: Path, write: Callable[[Path], None]) -> None:
    with _naming_cache(path):
        part = make_temporary(f".{path.name}.part-", path.parent)
    try:
        write(part / path.name)
        with _naming_cache(path):
            os.replace(part / path.name, path)
    finally:
        remove_temporary(part)


@contextmanager
def _naming_cache(path: Path) -> Iterator[None]:
    """Turn an OSError in the block into a ConfigError that says how to choose another folder."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path}: the cache cannot be written: {write_problem(path, error)}. Set the "
            f"environment variable {VARIABLE} to another folder"
        ) from error


@contextmanager
def _hold_lock(lock: Path, origin: str) -> Iterator[None]:
    """Hold a lock of the system on the file ``lock`` in the block, and remove it after success.

    The system releases the lock when the process ends, even if it is killed.
    """
    with _naming_cache(lock):
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = lock.open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process, which adds {origin} to the cache ...")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass  # the file system has no locks, for example Lustre without the option flock
        yield
        # Processes that wait for the lock still hold the removed file, and then see the result.
        lock.unlink(missing_ok=True)


def list_cached(patterns: Sequence[str] = ()) -> list[Path]:
    """List the complete files of the cache, the largest first.

    Args:
        patterns: names of files, in which ``*`` stands for any characters; empty means all files.

    Raises:
        ConfigError: no file matches one of the patterns.
    """
    folder = cache_folder()
    # The names of locks and of unfinished files begin with a dot.
    files = [file for file in folder.glob("*/[!.]*") if file.is_file()]
    for pattern in patterns:
        if not any(fnmatch(file.name, pattern) for file in files):
            raise ConfigError(
                f"{pattern}: no file in {folder} has this name. `nemo-aligner cache` lists them"
            )
    chosen = [
        file
        for file in files
        if not patterns or any(fnmatch(file.name, pattern) for pattern in patterns)
    ]
    return sorted(chosen, key=lambda file: (-file.stat().st_size, file.name))


def describe_cached(files: Sequence[Path]) -> str:
    """Format a table of files of the cache: size, age and name, and the sum of the sizes."""
    stats = [file.stat() for file in files]
    rows = [
        f"{show_bytes(stat.st_size):>9}  {show_duration(time.time() - stat.st_mtime):>8}  "
        f"{file.relative_to(cache_folder())}"
        for file, stat in zip(files, stats, strict=True)
    ]
    total = show_bytes(sum(stat.st_size for stat in stats))
    return "\n".join([*rows, f"{total} in {len(files)} files of {cache_folder()}"])


def remove_cached(files: Sequence[Path]) -> None:
    """Remove files of the cache; ConfigError if one cannot be removed."""
    for file in files:
        with _naming_cache(file):
            file.unlink(missing_ok=True)
