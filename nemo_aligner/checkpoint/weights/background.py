"""Disk work that training does not wait for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def in_background(function: Callable[[], T]) -> Future[T]:
    """Run ``function`` in a thread of its own; a process that ends waits for it.

    It must make no collectives: they could meet those of the foreground in another order on each
    rank.
    """
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
    future = executor.submit(function)
    executor.shutdown(wait=False)
    return future
