"""What glibc's malloc does with memory that is freed."""

from __future__ import annotations

import ctypes


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


def _set_malloc(option: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(option, value)
