"""The cache of files that are made once: converted models, data sets of the hub, compiled kernels.

It is the folder ``$NEMO_ALIGNER_CACHE``, by default ``~/.cache/nemo_aligner``. A file in it is
complete, because it is written under another name and then renamed. Only ``remove_cached`` (for
``nemo-aligner cache --clear``) removes files; a removed file is made again when it is needed. The
token caches of the data sets (``data/token_cache.py``) are folders next to them.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from nemo_aligner.utils.console import say, show_bytes, show_duration
from nemo_aligner.utils.errors import ConfigError
from nemo_aligner.utils.processes import make_temporary, remove_temporary
from nemo_aligner.utils.writing import write_problem

VARIABLE = "NEMO_ALIGNER_CACHE"
# In the name of a token cache, a folder next to its data file: between that file's name and a hash.
INDEX_MARK = ".index-"
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


@dataclass(frozen=True)
class CachedEntry:
    """A complete file of the cache, or the token cache of one, which is a folder.

    Attributes:
        path: its path.
        size: its size in bytes; of a folder, that of all its files.
        time: when it was last changed, in seconds since the epoch.
    """

    path: Path
    size: int
    time: float

    @classmethod
    def of(cls, path: Path) -> CachedEntry:
        """Read the size and the time of the entry at ``path``."""
        files = [path, *path.rglob("*")] if path.is_dir() else [path]
        size = sum(file.stat().st_size for file in files if file.is_file())
        return cls(path, size, path.stat().st_mtime)

    @property
    def name(self) -> str:
        """Its path in the cache, such as ``models/a.nemo``."""
        return str(self.path.relative_to(cache_folder()))

    def matches(self, pattern: str) -> bool:
        """True if ``pattern`` is its name with or without the folder, or that of its data file."""
        names = (self.name, self.name.rpartition(INDEX_MARK)[0] or self.name)
        return any(fnmatch(part, pattern) for name in names for part in (name, Path(name).name))


def list_cached(patterns: Sequence[str] = ()) -> list[CachedEntry]:
    """List the entries of the cache, the largest first.

    Args:
        patterns: names of entries as ``CachedEntry.matches`` takes them, in which ``*`` stands for
            any characters; empty means all entries.

    Raises:
        ConfigError: no entry matches one of the patterns.
    """
    folder = cache_folder()
    # The names of locks and of unfinished entries begin with a dot.
    paths = [path for path in folder.glob("*/[!.]*") if path.is_file() or INDEX_MARK in path.name]
    entries = [CachedEntry.of(path) for path in paths]
    for pattern in patterns:
        if not any(entry.matches(pattern) for entry in entries):
            raise ConfigError(
                f"{pattern}: no file in {folder} has this name. `nemo-aligner cache` lists them"
            )
    chosen = [
        entry
        for entry in entries
        if not patterns or any(entry.matches(pattern) for pattern in patterns)
    ]
    return sorted(chosen, key=lambda entry: (-entry.size, entry.name))


def describe_cached(entries: Sequence[CachedEntry]) -> str:
    """Format a table of entries of the cache: size, age and name, and the sum of the sizes."""
    rows = [
        f"{show_bytes(entry.size):>9}  {show_duration(time.time() - entry.time):>8}  {entry.name}"
        for entry in entries
    ]
    total = show_bytes(sum(entry.size for entry in entries))
    return "\n".join([*rows, f"{total} in {len(entries)} files of {cache_folder()}"])


def remove_cached(entries: Sequence[CachedEntry]) -> None:
    """Remove entries of the cache; ConfigError if one cannot be removed."""
    for entry in entries:
        with _naming_cache(entry.path):
            if entry.path.is_dir():
                shutil.rmtree(entry.path)
            else:
                entry.path.unlink(missing_ok=True)
