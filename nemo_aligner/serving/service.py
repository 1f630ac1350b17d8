"""What a server offers: services, each with endpoints, that have their operations on all ranks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from nemo_aligner.serving.engine.batcher import BusyError
from nemo_aligner.serving.engine.executor import ModelRanks, Operation, RanksLostError
from nemo_aligner.serving.protocols import Failure, FailureKind, TensorSpec
from nemo_aligner.utils.errors import AlignerError, ServingError, one_line

Tensors = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Endpoint:
    """One name that requests are sent to.

    Attributes:
        inputs: what a request has, and ``outputs`` its answer.
        answer: a request's tensors -> its answer's, or why it has none. Requests are answered as
            many at once as come, those of each endpoint in an event loop of its own.
        max_rows: of a request. The shapes of ``inputs`` and ``outputs`` then leave out the first
            dimension, which counts rows; 0 is an endpoint that has whole shapes.
        comes_first: it has to answer before the others do, as clients ask it before they use them.
    """

    name: str
    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    answer: Callable[[Tensors], Coroutine[Any, Any, Tensors | Failure]]
    max_rows: int = 0
    comes_first: bool = False


class Service(Protocol):
    """What answers requests, on rank 0."""

    @property
    def endpoints(self) -> Sequence[Endpoint]: ...

    @property
    def greeting(self) -> Sequence[str]:
        """Lines that are said once the server answers."""

    def report(self) -> str | None:
        """How busy it was since the last report, in a line; None if it was not."""

    def close(self) -> None:
        """Finish what was submitted, and end all threads; nothing may be in flight."""


def in_order(services: Sequence[Service]) -> list[Endpoint]:
    """The endpoints of all services, as a transport has to make them known: one after the other."""
    endpoints = [endpoint for each in services for endpoint in each.endpoints]
    return sorted(endpoints, key=lambda endpoint: not endpoint.comes_first)


class Servable(Protocol):
    """A service before it has a server; every rank has one."""

    @property
    def operations(self) -> Mapping[str, Operation]:
        """What it has all ranks compute, by names that no other servable has."""

    def forget(self) -> None:
        """Keep nothing of earlier operations: one has failed on some rank."""

    def start(self, ranks: ModelRanks) -> Service:
        """Rank 0: begin, with a first operation that shows whether the model can run."""


# Why a request has no answer: errors, and the failures that a client is told of.

logger = logging.getLogger(__name__)

T = TypeVar("T")


class TooLargeError(ServingError):
    """More bytes than a request may have."""


class ModelError(ServingError):
    """The request was fit, and the model could not answer it."""


def check_size(num_bytes: int, most: int) -> None:
    """Raises TooLargeError where a request has more than ``most`` bytes."""
    if num_bytes > most:
        raise TooLargeError(
            f"got a request of {num_bytes} bytes, wanted at most {most} (server.max_request_bytes)"
        )


async def answer_of(ranks: Future[T]) -> T:
    """What all ranks have computed.

    Raises:
        RanksLostError: they are gone.
        ModelError: they could not.
    """
    try:
        return await asyncio.wrap_future(ranks)
    except RanksLostError:
        raise
    except Exception as error:
        raise ModelError(one_line(error)) from error


def failure_of(error: Exception) -> Failure:
    """What a client is told, and whether it may come again."""
    text = one_line(error)
    if isinstance(error, BusyError):
        return Failure(str(error), FailureKind.busy, error.retry_after_s)
    if isinstance(error, TooLargeError):
        return Failure(text, FailureKind.too_large)
    if isinstance(error, RanksLostError):
        return Failure(f"the server cannot go on: {text}", FailureKind.busy)
    if isinstance(error, ModelError):
        return Failure(f"the model failed: {text}", FailureKind.internal)
    if isinstance(error, AlignerError):
        return Failure(text, FailureKind.bad_request)
    logger.error("a request could not be answered", exc_info=error)
    return Failure(f"internal error: {type(error).__name__}: {text}", FailureKind.internal)
