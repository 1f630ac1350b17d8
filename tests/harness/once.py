"""Coordination of the workers of one test run: build shared things once, and take turns."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

if TYPE_CHECKING:
    import pytest

Once = Callable[[str, Callable[[Path], object]], Path]
_POLL_SECS = 0.2


def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this run share, and no other run."""
    folder = tmp_path_factory.getbasetemp()
    return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


def once_per_run(folder_of_run: Path, name: str, build: Callable[[Path], object]) -> Path:
    """The folder that ``build`` fills under ``name``; the first worker builds, others wait.

    If ``build`` fails, the next worker tries again in an empty folder.
    """
    parent = folder_of_run / "once"
    parent.mkdir(exist_ok=True)
    built = parent / f"{name}.built"
    with FileLock(parent / f"{name}.lock"):
        if built.exists():
            return Path(built.read_text())
        attempt = len(list(parent.glob(f"{name}.[0-9]*")))
        folder = parent / f"{name}.{attempt}"
        folder.mkdir()
        build(folder)
        built.write_text(str(folder))
        return folder


class Turns:
    """Turns for tests that start several busy processes: only as many at once as cores allow."""

    def __init__(self) -> None:
        self.count = max(1, len(os.sched_getaffinity(0)) // 2)
        self.was_taken = False  # by the current test
        self._folder: Path | None = None
        self._depth = 0
        self._waited = 0.0

    def begin(self, folder: Path) -> None:
        """Take turns with the workers that use the same ``folder``."""
        self._folder = folder / "turns"
        self._folder.mkdir(exist_ok=True)

    def now(self) -> float:
        """Seconds of a clock that stops while this worker waits for its turn."""
        return time.monotonic() - self._waited

    @contextmanager
    def one(self) -> Iterator[None]:
        """Wait for a turn and hold it in the block. Nested turns need no wait."""
        self.was_taken = True
        if self._folder is None or self._depth > 0:
            yield
            return
        started = time.monotonic()
        lock = self._wait()
        self._waited += time.monotonic() - started
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            lock.release()

    def _wait(self) -> FileLock:
        locks = [FileLock(f"{self._folder}/{number}.lock") for number in range(self.count)]
        while True:
            for lock in locks:
                try:
                    lock.acquire(blocking=False)
                except Timeout:
                    continue
                return lock
            time.sleep(_POLL_SECS)


TURNS = Turns()
