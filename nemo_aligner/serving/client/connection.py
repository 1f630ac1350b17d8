"""The requests of one event loop to one model of a server."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from pytriton.client import AsyncioModelClient
from pytriton.client.exceptions import PyTritonClientError, PyTritonClientInferenceServerError

from nemo_aligner.errors import ServingError, short
from nemo_aligner.serving.client.split import Tensors

_ASK_AGAIN_S = 5.0  # PyTriton looks for a model that is not ready ten times in this time


class Connection:
    """At most ``max_connections`` requests at once; it waits for a server that is not ready yet."""

    def __init__(
        self,
        url: str,
        model_name: str,
        timeout_s: float,
        init_timeout_s: float,
        max_connections: int = 1,
    ) -> None:
        self._name = f"{url}, {model_name}"
        self._init_timeout_s = init_timeout_s
        self._gate = asyncio.Semaphore(max_connections)
        self._opening = asyncio.Lock()
        self._is_open = False
        self._config: Any = None
        self._client = self._make(url, model_name, timeout_s)

    def _make(self, url: str, model_name: str, timeout_s: float) -> AsyncioModelClient:
        ask_again_s = min(_ASK_AGAIN_S, self._init_timeout_s)
        try:
            return AsyncioModelClient(
                url, model_name, inference_timeout_s=timeout_s, init_timeout_s=ask_again_s
            )
        except (PyTritonClientError, ValueError) as error:
            raise ServingError(f"{self._name}: {error}") from error

    async def max_batch_size(self) -> int:
        """How many rows a request may have.

        Raises:
            ServingError: no server is ready in time.
        """
        async with self._opening:
            if not self._is_open:
                self._config = await self._wait_for_model()
                self._is_open = True
        return max(1, self._config.max_batch_size)

    async def infer(self, inputs: Tensors) -> Tensors:
        """The answer to one request, with all its rows.

        Raises:
            ServingError: it was refused, in the server's words, or there is no server.
        """
        async with self._gate:
            await self.max_batch_size()
            is_batched = self._config.max_batch_size > 0
            send = self._client.infer_batch if is_batched else self._client.infer_sample
            try:
                return await send(**inputs)
            except PyTritonClientInferenceServerError as error:
                raise self._explain(error) from error
            except Exception as error:  # of PyTriton, aiohttp and the operating system
                self._is_open = False  # the next one waits for the server to come back
                raise self._explain(error) from error

    async def close(self) -> None:
        """Let the sockets go."""
        await self._client.close()

    async def _wait_for_model(self) -> Any:
        end = time.monotonic() + self._init_timeout_s
        while True:
            try:
                await self._client.wait_for_model(min(_ASK_AGAIN_S, self._init_timeout_s))
                return await self._client.model_config
            except Exception as error:  # as above
                if time.monotonic() >= end:
                    raise ServingError(
                        f"{self._name}: timed out: it was not ready within "
                        f"{self._init_timeout_s:g} s ({_root_of(error)})"
                    ) from error
                await asyncio.sleep(min(0.1, self._init_timeout_s))

    def _explain(self, error: Exception) -> ServingError:
        # PyTriton's client puts its own words around the server's.
        message = getattr(error.__cause__, "message", None)
        text = message() if callable(message) else str(error) or type(error).__name__
        return ServingError(f"{self._name}: {text}")


def _root_of(error: BaseException) -> str:
    """What was wrong in the end: PyTriton's words are that it waited."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return short(error) or type(error).__name__
