"""Base class of the clients: calls with a deadline, in a thread or in the caller's event loop."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock, Thread, current_thread
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar
from urllib.parse import urlsplit

from nemo_aligner.serving.tokens import hide_password, is_token
from nemo_aligner.utils.errors import ConfigError, ServingError

T = TypeVar("T")
Client = TypeVar("Client", bound="ServerClient[Any]")

# After a fork, the child process keeps the parent's background threads in this list. It inherits
# the objects and their sockets, but not the running threads. Freeing an object would close sockets
# that the parent still uses, so the child never frees them.
_NEVER_FREED: list[Background[Any]] = []


@dataclass
class Progress:
    """How many of the ``total`` rows of a call were answered, for errors about a missing answer."""

    total: int = 0
    answered: int = 0

    @property
    def text(self) -> str:
        """The progress in words; empty for a single row."""
        return f"{self.answered} of {self.total} rows were answered" if self.total > 1 else ""


class Connections(Protocol):
    """The open connections of a ``ServerClient``; they belong to one event loop."""

    def trouble(self) -> str:
        """List the reasons why servers are unavailable, for error messages.

        Empty if all are available.
        """

    async def close(self) -> None:
        """Close the sockets."""


C = TypeVar("C", bound=Connections)


class ServerClient(Generic[C]):
    """Base of ``RewardClient`` and ``RewardCriticClient``: sends requests from a background thread.

    Several threads may use the same client.

    If a client is not closed, its connections are closed when the client is garbage-collected. A
    program that ends does not wait for requests in flight.
    """

    def __init__(
        self,
        name: str,
        timeout_s: float | None,
        connect: Callable[[], C],
        in_callers_loop: bool = False,
    ) -> None:
        """Store the settings of a client; it connects at the first request.

        Args:
            name: prefix of error messages.
            timeout_s: deadline of one call, in seconds; None for no deadline.
            connect: opens the connections, in the thread or the caller's event loop. It is called
                at the first request, so that a client can be created before a fork.
            in_callers_loop: run asyncio methods in the caller's event loop, without a thread.
        """
        self._name = name
        self._timeout_s = timeout_s
        self._connect = connect
        self._lock = Lock()  # two threads must not both start the background thread
        self._background: Background[C] | None = None
        self._in_callers_loop = in_callers_loop
        self._local_connections: C | None = None
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
            self._background.leave()  # after an exception, nobody reads the pending answers
        self.close()

    def close(self) -> None:
        """Wait for submitted calls, and close the connections."""
        self._is_closed = True
        if self._background is not None and self._background.belongs_here():
            self._background.close()

    async def aclose(self) -> None:
        """Close the connections of a client that was created with ``in_callers_loop=True``.

        Such a client sends requests in the caller's event loop instead of a background thread.
        Await all its calls first. Other clients are closed by ``close``.
        """
        if self._local_connections is not None:
            await self._local_connections.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings; a copy, or a client in another process, connects by itself."""
        state = {**self.__dict__, "_background": None, "_local_connections": None}
        del state["_lock"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = Lock()

    def _submit(
        self,
        work: Callable[..., Coroutine[Any, Any, T]],
        *args: Any,
        progress: Progress | None = None,
    ) -> Future[T]:
        """Run ``work(connections, *args)`` in the background for at most ``timeout_s``.

        The error after this time reports the ``progress``, which ``work`` keeps up to date.
        """
        limited = partial(_run_with_timeout, work, args, self._timeout_s, self._name, progress)
        return self._ensure_background().submit(limited)

    async def _run(
        self,
        work: Callable[..., Coroutine[Any, Any, T]],
        *args: Any,
        progress: Progress | None = None,
    ) -> T:
        """Await ``work(connections, *args)`` for at most ``timeout_s``; see ``_submit``.

        It runs in the background thread or, if the client was created with
        ``in_callers_loop=True``, in the calling event loop.
        """
        if not self._in_callers_loop:
            return await asyncio.wrap_future(self._submit(work, *args, progress=progress))
        if self._local_connections is None:
            self._local_connections = self._connect()
        return await _run_with_timeout(
            work, args, self._timeout_s, self._name, progress, self._local_connections
        )

    def _ensure_background(self) -> Background[C]:
        """Return this process's background thread.

        Start one at first use, and again in a forked child.

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
                # The thread must not refer to this client, which could otherwise never be freed.
                self._background = Background(self._connect)
                weakref.finalize(self, self._background.leave).atexit = False
            return self._background

    def _wait(self, future: Future[T]) -> T:
        if self._background is not None and self._background.is_current():
            future.cancel()  # in the background thread itself, waiting would be a deadlock
            raise RuntimeError(
                "a callback of a future must not wait for another call; use the *_future methods"
            )
        try:
            return future.result()
        except BaseException:
            future.cancel()  # e.g. KeyboardInterrupt: spare the server work that nobody waits for
            raise


async def _run_with_timeout(
    work: Callable[..., Coroutine[Any, Any, T]],
    args: Sequence[Any],
    timeout_s: float | None,
    name: str,
    progress: Progress | None,
    connections: C,
) -> T:
    try:
        return await asyncio.wait_for(work(connections, *args), timeout_s)
    except asyncio.TimeoutError:
        texts = [
            f"{name}: timed out: no answer within {timeout_s:g} s (timeout_s)",
            connections.trouble(),
            "" if progress is None else progress.text,
        ]
        raise ServingError("; ".join(filter(None, texts))) from None


# A client's event loop runs in a thread, so that requests from all threads of the program share
# connections and are in flight while the program computes something else.


class Background(Generic[C]):
    """A thread that owns connections to servers, and runs coroutines until ``leave`` is called.

    It is a daemon: a process that ends does not wait for it, because nobody would read the answers.
    """

    def __init__(self, connect: Callable[[], C]) -> None:
        """Start the thread and call ``connect`` in it; raise what ``connect`` raises."""
        self._process = os.getpid()  # a forked child does not inherit threads
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
        """Return whether the thread runs in this process.

        False in a child that was forked from it.
        """
        return self._process == os.getpid()

    def is_current(self) -> bool:
        """Return whether the caller runs in this thread, e.g. as the callback of a future."""
        return current_thread() is self._thread

    def submit(self, work: Callable[[C], Coroutine[Any, Any, T]]) -> Future[T]:
        """Run ``work(connections)`` in the thread, and return its future.

        Cancel the future to stop it.
        """
        future = asyncio.run_coroutine_threadsafe(work(self._pool), self._loop)
        with self._lock:
            self._running.add(future)
        future.add_done_callback(self._forget)
        return future

    def close(self) -> None:
        """Wait for all submitted work, and close the connections."""
        with self._lock:
            running = list(self._running)
        wait(running)
        self.leave()
        self._thread.join()

    def leave(self) -> None:
        """Cancel running work and tell the thread to end, without waiting for it."""
        if self.belongs_here():
            with suppress(RuntimeError):  # raised if the loop is closed already
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
        # Requests are cancelled first, because they use the connections that are closed next.
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._pool.close()


async def run_all(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines concurrently, and return their results in order.

    If one of them fails, the others are cancelled.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def check_token(token: str | None, urls: Sequence[str]) -> None:
    """Raise ConfigError if the HTTP header of requests to ``urls`` cannot carry ``token``.

    The message shows neither the token nor a password.
    """
    if token is None:
        return
    if not is_token(token):
        raise ConfigError(
            "token: it has characters that an HTTP header cannot carry; use one word of ASCII "
            "letters, digits and punctuation"
        )
    for url in urls:
        if "@" in url.partition("//")[2].partition("/")[0]:
            raise ConfigError(
                f"url: got {hide_password(url)} with a user or password, and a token, which one "
                "header cannot both carry; remove one of them"
            )


def _is_server_url(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:  # e.g. the address of IPv6 without its closing bracket
        return False
    is_http = parts.scheme in ("http", "https") and bool(parts.hostname)
    return is_http and not parts.query and not parts.fragment


def complete_urls(urls: Sequence[str]) -> list[str]:
    """Add ``http://`` where a scheme is missing, and drop duplicates.

    Raises:
        ConfigError: there is no URL, or one of them is invalid.
    """
    complete = []
    for url in urls:
        full_url = (url if "://" in url else f"http://{url}").rstrip("/")
        if not _is_server_url(full_url):
            raise ConfigError(f"url: got {hide_password(url)!r:.80}, wanted http://host:port")
        complete.append(full_url)
    if not complete:
        raise ConfigError("url: got no URL, wanted http://host:port, or a list of such URLs")
    return list(dict.fromkeys(complete))
