"""Answers of services as a request's sender has them: what was asked for, or why there is none."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import NamedTuple, TypeVar

from nemo_aligner.serving.failures import FailureKind, failure_of

T = TypeVar("T")


class Failure(NamedTuple):
    """What a sender is told of a failure."""

    message: str
    kind: FailureKind
    retry_after_s: float | None = None


async def answered(answer: Awaitable[T]) -> T | Failure:
    try:
        return await answer
    except Exception as error:
        found = failure_of(error)
        return Failure(found.message, found.kind, found.retry_after_s)
