"""One request and its answer: uvicorn's ``RequestResponseCycle``, whose errors are JSON bodies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from nemo_aligner.serving.front.limits import error_body


class AnswerTransport:
    """The transport that an answer is written to.

    ``close`` may wait for the client to read. ``has_aged`` returns whether the connection ends with
    the answer that begins now, because of its age.
    """

    __slots__ = ("close", "has_aged", "is_closing", "write")

    def __init__(
        self,
        transport: asyncio.Transport,
        close: Callable[[], None],
        has_aged: Callable[[], bool],
    ) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close
        self.has_aged = has_aged


class Exchange(RequestResponseCycle):
    """One request and its answer; unlike in uvicorn, a cancelled task is not logged as an error."""

    transport: AnswerTransport  # type: ignore[assignment]

    def send(self, message: Any) -> Coroutine[Any, Any, None]:
        """Send the head of the answer, or a part of its body."""
        # Decided as late as possible, because the request may have waited for long.
        if self.keep_alive and not self.response_started and self.transport.has_aged():
            self.keep_alive = False  # uvicorn then sends "Connection: close"
        return super().send(message)

    async def run_asgi(self, app: Any) -> None:
        """Run the application; if it raises or sends no complete answer, answer with an error."""
        try:
            await app(self.scope, self.receive, self.send)
        except asyncio.CancelledError:
            # The task was cancelled: the client has left, or the server exits and exit_timeout_secs
            # are over.
            await self._fail(503, "The server is exiting. Retry on another server.")
            raise
        except Exception as error:
            self.logger.error("Exception in ASGI application\n", exc_info=error)
            await self._fail(500, "The server failed on this request. See its log.")
        else:
            if not self.response_complete and not self.disconnected:
                self.logger.error("The ASGI application returned without completing its answer.")
                await self._fail(500, "The server failed on this request. See its log.")
        finally:
            self.on_response = _ignore

    async def _fail(self, status: int, text: str) -> None:
        if self.disconnected or self.response_complete:
            return
        if self.response_started:
            # A part of the answer was already sent. Close the connection instead of ending the
            # answer, so that the client notices that it is incomplete.
            self.transport.close()
            return
        body = error_body(text)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body, "more_body": False})


def _ignore() -> None:
    """Do nothing: it replaces the callback of an ended exchange.

    The old callback would keep the connection's objects alive.
    """
