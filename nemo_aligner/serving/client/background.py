"""The servers of a client in an event loop beside the program, which may end at any time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from contextlib import suppress
from threading import Lock, Thread, current_thread
from typing import Any, Generic, Protocol, TypeVar

Result = TypeVar("Result")


class Connections(Protocol):
    """To servers; made and used in one event loop."""

    def trouble(self) -> str:
        """What is wrong with each server that is not there."""

    async def close(self) -> None:
        """Let the sockets go."""


C = TypeVar("C", bound=Connections)


class Background(Generic[C]):
    """Runs coroutines in a thread, around connections to servers, until it is told to leave.

    A process that ends does not wait for it: what it has not answered by then, nobody reads.
    """

    def __init__(self, connect: Callable[[], C]) -> None:
        """Raises what ``connect`` does, which is called in the thread."""
        self._process = os.getpid()
        self._lock = Lock()
        self._running: set[Future[Any]] = set()
        begun: Future[None] = Future()
        self._thread = Thread(
            target=lambda: asyncio.run(self._live(connect, begun)),
            name="reward client",
            daemon=True,
        )
        self._thread.start()
        begun.result()

    def belongs_here(self) -> bool:
        """Whether its thread is one of this process, and was not left behind by a fork."""
        return self._process == os.getpid()

    def is_current(self) -> bool:
        """Whether the caller stands in its thread, as what is called when a future is done."""
        return current_thread() is self._thread

    def submit(self, work: Callable[[C], Coroutine[Any, Any, Result]]) -> Future[Result]:
        """The future of what ``work`` gives; to cancel it cancels the work."""
        future = asyncio.run_coroutine_threadsafe(work(self._pool), self._loop)
        with self._lock:
            self._running.add(future)
        future.add_done_callback(self._forget)
        return future

    def close(self) -> None:
        """Wait for everything that was submitted, and until the connections are gone."""
        with self._lock:
            running = list(self._running)
        wait(running)
        self.leave()
        self._thread.join()

    def leave(self) -> None:
        """Cancel what still runs, and end the thread soon."""
        if self.belongs_here():
            with suppress(RuntimeError):  # it has ended before
                self._loop.call_soon_threadsafe(self._leaving.set)

    def _forget(self, future: Future[Any]) -> None:
        with self._lock:
            self._running.discard(future)

    async def _live(self, connect: Callable[[], C], begun: Future[None]) -> None:
        self._loop, self._leaving = asyncio.get_running_loop(), asyncio.Event()
        try:
            self._pool = connect()
        except Exception as error:
            begun.set_exception(error)
            return
        begun.set_result(None)
        await self._leaving.wait()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._pool.close()
