"""What glibc's malloc does with memory that is freed."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path


def keep_freed_memory() -> None:
    """Have malloc keep what is freed for what comes next, where it is glibc's.

    Else every large tensor is new memory from the system, which takes longer to get, page by page,
    than most operations take to fill it.
    """
    trim_threshold, mmap_max = -1, -4  # as malloc.h numbers them
    _set_malloc(trim_threshold, -1)
    _set_malloc(mmap_max, 0)


def return_freed_memory() -> None:
    """Have malloc hand every tensor's memory back to the system when it is freed.

    By itself it would soon keep freed memory of up to 32 MiB, between pieces that are in use.
    """
    mmap_threshold = -3
    _set_malloc(mmap_threshold, 2**19)


class FreedMemory:
    """Bounds what gaps between live blocks take where malloc keeps what is freed.

    Packs have ever other sizes, so a freed block seldom fits what comes next. What is resident may
    pass what the first steps after all gaps were given back needed by ``fraction``; then the gaps
    are given back again. The step that follows waits for new pages, so this is at most once in
    ``steps + 1`` steps. Nothing happens where malloc is not glibc's.
    """

    def __init__(self, fraction: float = 0.125, steps: int = 10) -> None:
        self._fraction = fraction
        self._steps = steps
        self._seen = 0
        self._needed = 0

    def end_step(self) -> bool:
        """Look at what is resident; whether gaps were given back. It takes some 20 microseconds."""
        resident = resident_bytes()
        if self._seen < self._steps:
            self._seen += 1
            self._needed = max(self._needed, resident)
            return False
        if resident <= self._needed * (1 + self._fraction):
            return False
        self._seen = self._needed = 0
        return give_back_gaps()


def give_back_gaps() -> bool:
    """Give the whole pages of all free blocks back to the system; whether any were."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and bool(trim(ctypes.c_size_t(0)))


def resident_bytes() -> int:
    """Of this process, its libraries' pages included; 0 where the system has no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except FileNotFoundError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _set_malloc(option: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(option, value)
