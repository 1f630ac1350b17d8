"""Why a request has no answer: errors, and the failures that a client is told of."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from typing import TypeVar

from nemo_aligner.errors import AlignerError, ServingError, one_line
from nemo_aligner.serving.admission import BusyError
from nemo_aligner.serving.ranks import RanksLostError
from nemo_aligner.serving.wire.types import Failure, FailureKind

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
