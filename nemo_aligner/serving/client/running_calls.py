"""``RunningCalls``: the running requests of a server, which end with an error if it hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from nemo_aligner.serving.failures import UnavailableError

T = TypeVar("T")


class RunningCalls:
    """The running calls of one server that other servers could also answer; falsy if empty."""

    def __init__(self) -> None:
        # For each running call a future, which gets the reason why the call ends.
        self._ends: set[asyncio.Future[str]] = set()

    def __bool__(self) -> bool:
        return bool(self._ends)

    async def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Await ``call``.

        Raises:
            UnavailableError: ``end`` was called before there was a result.
        """
        task = asyncio.ensure_future(call)
        # Its error may come when nobody waits for it any more, and asyncio would log that.
        task.add_done_callback(_retrieve_error)
        end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._ends.add(end)
        try:
            waiting: set[asyncio.Future[Any]] = {task, end}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise UnavailableError(end.result())
        finally:
            self._ends.discard(end)
            task.cancel()

    def end(self, reason: str) -> None:
        """End all running calls with an UnavailableError that has the ``reason``."""
        for end in self._ends:
            if not end.done():
                end.set_result(reason)


def _retrieve_error(task: asyncio.Task[Any]) -> None:
    if not task.cancelled():
        task.exception()
