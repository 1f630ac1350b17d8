"""Common base of clients: calls with one deadline, in a thread or in the caller's loop."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from threading import Lock, Thread, current_thread
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import urlsplit

from nemo_aligner.serving.tokens import hide_password, is_token
from nemo_aligner.utils.errors import ConfigError, ServingError

T = TypeVar("T")
Client = TypeVar("Client", bound="ServerClient[Any]")

# A fork has its parent's sockets, but neither the thread nor the right to close them.
_NEVER_FREED: list[Background[Any]] = []


class Connections(Protocol):
    """Connections to servers, made and used in one event loop."""

    def trouble(self) -> str:
        """Reasons why servers are unavailable."""

    async def close(self) -> None:
        """Close the sockets."""


C = TypeVar("C", bound=Connections)


class ServerClient(Generic[C]):
    """Asks servers from a thread beside the program; safe to use from several threads.

    A client that is not closed lets its connections go when nothing refers to it any more; a
    program that ends does not wait for what it has in flight.
    """

    def __init__(
        self,
        name: str,
        timeout_s: float,
        connect: Callable[[], C],
        in_callers_loop: bool = False,
    ) -> None:
        """``name`` begins errors; ``connect`` is called in the thread, or in the caller's loop.

        It is called at the first request, so that a client can be made before a fork.
        """
        self._name = name
        self._timeout_s = timeout_s
        self._connect = connect
        self._lock = Lock()  # callers of several threads start one background
        self._background: Background[C] | None = None
        self._in_callers_loop = in_callers_loop
        self._here: C | None = None
        self._is_closed = False

    def __enter__(self: Client) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and self._background is not None:
            self._background.leave()  # nobody will read the answers
        self.close()

    def close(self) -> None:
        """Finish what was submitted, and let the connections go."""
        self._is_closed = True
        if self._background is not None and self._background.belongs_here():
            self._background.close()

    async def aclose(self) -> None:
        """Let the connections of the caller's loop go; nothing may be in flight."""
        if self._here is not None:
            await self._here.close()

    def _submit(self, work: Callable[..., Coroutine[Any, Any, T]], *given: Any) -> Future[T]:
        """Run ``work(connections, *given)`` in the background, for ``timeout_s`` at most."""
        limited = partial(_in_time, work, given, self._timeout_s, self._name)
        return self._started().submit(limited)

    async def _run(self, work: Callable[..., Coroutine[Any, Any, T]], *given: Any) -> T:
        """Like ``_submit``, for asyncio."""
        if not self._in_callers_loop:
            return await asyncio.wrap_future(self._submit(work, *given))
        if self._here is None:
            self._here = self._connect()
        return await _in_time(work, given, self._timeout_s, self._name, self._here)

    def _started(self) -> Background[C]:
        """Background thread of this process, started if it has none; a fork never has one.

        Raises:
            ServingError: the client is closed.
        """
        with self._lock:
            if self._is_closed:
                raise ServingError(f"{self._name}: the client is closed")
            inherited = self._background
            if inherited is not None and not inherited.belongs_here():
                _NEVER_FREED.append(inherited)
                self._background = None
            if self._background is None:
                # It does not refer to this client, or that would never be freed.
                self._background = Background(self._connect)
                weakref.finalize(self, self._background.leave).atexit = False
            return self._background

    def _wait(self, future: Future[T]) -> T:
        if self._background is not None and self._background.is_current():
            future.cancel()  # the thread would wait for itself
            raise RuntimeError("a callback of a future may not wait for another: submit a future")
        try:
            return future.result()
        except BaseException:
            future.cancel()  # an interruption: the server is spared what nobody waits for
            raise


async def _in_time(
    work: Callable[..., Coroutine[Any, Any, T]],
    given: Sequence[Any],
    timeout_s: float,
    name: str,
    connections: C,
) -> T:
    try:
        return await asyncio.wait_for(work(connections, *given), timeout_s)
    except asyncio.TimeoutError:
        trouble = connections.trouble()
        raise ServingError(
            f"{name}: timed out: no answer within {timeout_s:g} s (timeout_s)"
            + (f"; {trouble}" if trouble else "")
        ) from None


# The event loop of a client, in a thread of its own: requests from any thread share connections,
# and are in flight while the program computes.


class Background(Generic[C]):
    """Runs coroutines in a thread that holds connections to servers, until it is told to leave.

    A process that ends does not wait for it, as nobody would read its answers.
    """

    def __init__(self, connect: Callable[[], C]) -> None:
        """Start the thread; raise what ``connect``, called in it, raises."""
        self._process = os.getpid()  # threads do not survive a fork; see belongs_here
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
        """True if its thread is one of this process, and was not left behind by a fork."""
        return self._process == os.getpid()

    def is_current(self) -> bool:
        """True in its own thread, as in a future's callback."""
        return current_thread() is self._thread

    def submit(self, work: Callable[[C], Coroutine[Any, Any, T]]) -> Future[T]:
        """Run ``work``: the future of its result; cancelling it cancels the work."""
        future = asyncio.run_coroutine_threadsafe(work(self._pool), self._loop)
        with self._lock:
            self._running.add(future)
        future.add_done_callback(self._forget)
        return future

    def close(self) -> None:
        """Wait for everything that was submitted, and close the connections."""
        with self._lock:
            running = list(self._running)
        wait(running)
        self.leave()
        self._thread.join()

    def leave(self) -> None:
        """Cancel everything that runs, and end the thread soon."""
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
        # Requests first, as they use the connections that are closed then.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._pool.close()


def check_token(token: str | None) -> None:
    """Raise ConfigError for a token that no header can carry; it is not shown."""
    if token is not None and not is_token(token):
        raise ConfigError("token: it is no token, wanted one word of ASCII letters, digits, signs")


def checked_urls(urls: Sequence[str]) -> list[str]:
    """Complete the URLs, each once.

    Raises:
        ConfigError: there is none, or one is no URL.
    """
    checked = []
    for url in urls:
        whole = (url if "://" in url else f"http://{url}").rstrip("/")
        parts = urlsplit(whole)
        is_whole = parts.scheme in ("http", "https") and parts.hostname
        if not is_whole or parts.query or parts.fragment:
            raise ConfigError(f"url: got {hide_password(url)!r:.80}, wanted http://host:port")
        checked.append(whole)
    if not checked:
        raise ConfigError("url: got no URL, wanted http://host:port, or several")
    return list(dict.fromkeys(checked))
