"""Answers of services as a client sees them: the result, or the failure."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import NamedTuple, TypeVar

from nemo_aligner.serving.failures import FailureKind, failure_of

T = TypeVar("T")


class Failure(NamedTuple):
    """What a client is told about a failure."""

    message: str
    kind: FailureKind
    retry_after_s: float | None = None


async def answered(answer: Awaitable[T]) -> T | Failure:
    try:
        return await answer
    except Exception as error:
        found = failure_of(error)
        return Failure(found.message, found.kind, found.retry_after_s)
