"""Failed requests: their kinds in one table that every endpoint and client reads, and exceptions.

On a server any function raises what it likes. ``failure_of`` makes a ``RequestError`` of it where
the request is answered, in ``serving/front/`` and ``serving/triton.py``, and its kind says what is
written there. A client raises a ``RefusedError`` for an answer that is no success, or an
``UnavailableError`` where its kind says that sending the request again may help.
"""

from __future__ import annotations

import logging
import re
from enum import Enum
from secrets import token_hex
from typing import Literal

from nemo_aligner.utils.errors import AlignerError, ServingError, one_line

logger = logging.getLogger(__name__)


class FailureKind(Enum):
    """Cause of a failure, and how each protocol says it.

    Attributes:
        status: HTTP status.
        aliases: statuses by which other servers and proxies tell a client the same.
        triton_code: error code of Triton, which makes HTTP 400, 503 and 500 of INVALID_ARG,
            UNAVAILABLE and INTERNAL, and has none for 401 and 413.
        openai_type: ``error.type`` in the shape of OpenAI's errors, by vLLM's names.
        tei_type: ``error_type`` of Text Embeddings Inference, from ``router/src/lib.rs``; a wrong
            token has none there.
        gym_kind: ``failure_kind`` of a rollout, from NeMo Gym's ``failure_kinds.py``; None where
            the answer is no rollout, but the error itself.
        reaction: of a client: leave a row that is at fault without a reward, if it may; fail the
            call; or send the request again.
    """

    # The sender has to mend it; to send the token; or to send less at once.
    bad_request = (
        400,
        (422,),
        "INVALID_ARG",
        "BadRequestError",
        "Validation",
        "verifier_error",
        "skip",
    )
    unauthorized = (401, (), "INVALID_ARG", "AuthenticationError", "Validation", None, "fail")
    too_large = (413, (), "INVALID_ARG", "BadRequestError", "Validation", "verifier_error", "skip")
    # The server has no room, or does not answer. Both pass, so the status is the same; a client
    # keeps a busy server, and looks at one that was gone anew before it sends more.
    busy = (
        503,
        (429,),
        "UNAVAILABLE",
        "ServiceUnavailableError",
        "Overloaded",
        "transport_unreachable",
        "retry",
    )
    unreachable = (
        503,
        (502, 504),
        "UNAVAILABLE",
        "ServiceUnavailableError",
        "Unhealthy",
        "transport_unreachable",
        "retry",
    )
    # The server's log says more. Sent again, it would fail again, and so will other rollouts: a run
    # of Gym must not go on with a 0 for each.
    internal = (500, (), "INTERNAL", "InternalServerError", "Backend", None, "fail")

    def __init__(
        self,
        status: int,
        aliases: tuple[int, ...],
        triton_code: str,
        openai_type: str,
        tei_type: str,
        gym_kind: str | None,
        reaction: Literal["skip", "fail", "retry"],
    ) -> None:
        self.status, self.aliases = status, aliases
        self.triton_code, self.openai_type = triton_code, openai_type
        self.tei_type, self.gym_kind = tei_type, gym_kind
        self.reaction = reaction

    @property
    def label(self) -> str:
        """Name in an answer of ``/v1/rewards``."""
        return self.name.replace("_", " ")

    @classmethod
    def of_status(cls, status: int) -> FailureKind:
        """Kind of another server's HTTP status; one that is not in the table is ``internal``."""
        kinds = (kind for kind in cls if status in (kind.status, *kind.aliases))
        return next(kinds, cls.internal)


class RequestError(ServingError):
    """A request that has no answer.

    Attributes:
        message: why, in one line.
        kind: what that is to its sender.
        retry_after_s: seconds after which it may be sent again, if that is known.
        row: the row that is at fault; None if it is the request as a whole.
    """

    def __init__(
        self,
        message: str,
        kind: FailureKind,
        retry_after_s: float | None = None,
        row: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.kind = message, kind
        self.retry_after_s, self.row = retry_after_s, row


def failure_of(error: Exception) -> RequestError:
    """Turn the error of a request into the failure that its sender is told of."""
    text = one_line(error)
    # Errors of this package say what was wanted; any other one is a fault of the code.
    if not isinstance(error, AlignerError):
        logger.error("a request could not be answered", exc_info=error)
        text = f"internal error: {type(error).__name__}: {text}"
        return RequestError(text, FailureKind.internal)
    logger.debug("a request was refused", exc_info=error)  # where in the code: ``--debug``
    if isinstance(error, RequestError):
        return error
    return RequestError(text, FailureKind.bad_request)


def public_failure(error: Exception) -> RequestError:
    """``failure_of`` at the HTTP front, whose senders need not learn of the code behind it.

    They get the number of a fault of the code in the log, and none of its words.
    """
    if isinstance(error, AlignerError):
        return failure_of(error)
    number = token_hex(4)
    logger.error("internal error %s: a request could not be answered", number, exc_info=error)
    text = f"internal error {number}: {type(error).__name__}; the server's log has more under it"
    return RequestError(text, FailureKind.internal)


# In a client. Triton sends neither the row, nor a 401, a 413 or Retry-After: they are in the words.

NO_TOKEN = "the bearer token is missing or wrong (server.token_file, server.token_variable)"
_ROW = re.compile(r"^(?:\w+, )?row (\d+): ")
_RETRY_AFTER = re.compile(r"retry after (\d+(?:\.\d+)?) ?s")
_TOO_LARGE = re.compile(r"\d+ bytes, wanted at most \d+ \(server\.max_request_bytes\)")


class RefusedError(RequestError):
    """A server's answer to a request that it does not score; sent again, it would be the same.

    ``status`` is the answer's: 400 where the request is at fault, 401 where it has not the server's
    bearer token, 500 where the model failed. ``is_foreign`` where it is not KServe's, but by
    another kind of server, or by a proxy.
    """

    def __init__(self, server: str, status: int, message: str, is_foreign: bool = False) -> None:
        found = _ROW.match(message)
        row = int(found[1]) if found else None
        super().__init__(message, FailureKind.of_status(status), row=row)
        self.server, self.status, self.is_foreign = server, status, is_foreign

    def __str__(self) -> str:
        return f"{self.server}: {self.message}"

    @property
    def is_too_large(self) -> bool:
        """True if the request has too many bytes, so that parts of it may be accepted."""
        is_said = self.status == 400 and bool(_TOO_LARGE.search(self.message))
        return is_said or self.kind is FailureKind.too_large

    @property
    def is_unknown_model(self) -> bool:
        """True if the server has no such model, which Triton answers with a 404, or once a 400."""
        return self.status == 404 or self.kind is FailureKind.bad_request

    @property
    def reason(self) -> str:
        """The reason without the row's number."""
        return _ROW.sub("", self.message)

    def of_row(self, row: int) -> RefusedError:
        """The same refusal, with the caller's number of the row."""
        message = self.message.replace(f"row {self.row}: ", f"row {row}: ", 1)
        return RefusedError(self.server, self.status, message)


class UnavailableError(RequestError):
    """No answer for now. No caller of a client sees it: its pool asks again, or gives up.

    ``waiting_helps`` is False for a wrong address or certificate.
    """

    def __init__(
        self,
        message: str,
        kind: FailureKind = FailureKind.unreachable,
        retry_after_s: float | None = None,
        waiting_helps: bool = True,
    ) -> None:
        super().__init__(message, kind, retry_after_s)
        self.waiting_helps = waiting_helps


def retry_after(message: str, header: str) -> float | None:
    """Seconds after which a busy server wants to be asked again; None if it does not say."""
    asked = _RETRY_AFTER.search(message)
    wish = asked[1] if asked else header
    return float(wish) if wish.replace(".", "", 1).isdigit() else None
