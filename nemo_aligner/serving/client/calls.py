"""What clients of servers have in common: a call in the background, with one deadline for all."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from threading import Lock
from types import TracebackType
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from nemo_aligner.errors import ConfigError, ServingError
from nemo_aligner.serving.client.background import Background, Connections
from nemo_aligner.serving.tokens import is_token

C = TypeVar("C", bound=Connections)
T = TypeVar("T")
Client = TypeVar("Client", bound="ServerClient[Any]")

# A fork has its parent's sockets, but neither the thread nor the right to close them.
_NEVER_FREED: list[Background] = []


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
        """``name`` begins errors; ``connect`` is called in the thread, or in the caller's loop."""
        self._name = name
        self._timeout_s = timeout_s
        self._connect = connect
        self._lock = Lock()
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
            self._background.leave()  # nobody will read what was submitted
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
        """``work(pool, *given)`` in the background, for ``timeout_s`` at most."""
        limited = partial(_in_time, work, given, self._timeout_s, self._name)
        return self._started().submit(limited)

    async def _run(self, work: Callable[..., Coroutine[Any, Any, T]], *given: Any) -> T:
        """``_submit``, for asyncio."""
        if not self._in_callers_loop:
            return await asyncio.wrap_future(self._submit(work, *given))
        if self._here is None:
            self._here = self._connect()
        return await _in_time(work, given, self._timeout_s, self._name, self._here)

    def _started(self) -> Background[C]:
        """The background of this process: a forked one has none yet.

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
                self._background = Background(self._connect)  # which does not hold this client
                weakref.finalize(self, self._background.leave).atexit = False
            return self._background

    def _wait(self, future: Future[T]) -> T:
        if self._background is not None and self._background.is_current():
            future.cancel()
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


def check_token(token: str | None) -> None:
    """Raises ConfigError: it is none that a header can have; it is not shown."""
    if token is not None and not is_token(token):
        raise ConfigError("token: it is no token, wanted one word of ASCII letters, digits, signs")


def checked_urls(urls: Sequence[str]) -> list[str]:
    """Whole URLs, each once.

    Raises:
        ConfigError: there is none, or one is no URL.
    """
    checked = []
    for url in urls:
        whole = (url if "://" in url else f"http://{url}").rstrip("/")
        parts = urlsplit(whole)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url: got {url!r:.80}, wanted http://host:port")
        checked.append(whole)
    if not checked:
        raise ConfigError("url: got no URL, wanted http://host:port, or several")
    return list(dict.fromkeys(checked))
