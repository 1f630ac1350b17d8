"""Failed requests: the table of failure kinds for all servers and clients, and the exceptions.

On a server, any function may raise any exception. Where the request is answered, in
``serving/front/`` and ``serving/triton.py``, ``failure_of`` converts it to a ``RequestError``. Its
kind decides how the protocol reports it. A client raises ``RefusedError`` for an unsuccessful
answer, or ``UnavailableError`` if the kind says that sending the request again may help.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from enum import Enum
from secrets import token_hex
from typing import Literal

from nemo_aligner.utils.errors import AlignerError, ServingError, one_line

logger = logging.getLogger(__name__)


class FailureKind(Enum):
    """Cause of a failure, and how each protocol reports it.

    Attributes:
        status: HTTP status.
        aliases: statuses with which other servers and proxies report the same cause.
        triton_code: error code of Triton, which turns INVALID_ARG, UNAVAILABLE and INTERNAL into
            HTTP 400, 503 and 500, and has no code for 401 and 413.
        openai_type: ``error.type`` in the form of OpenAI's errors, with vLLM's names.
        tei_type: ``error_type`` of Text Embeddings Inference, from ``router/src/lib.rs``, which has
            no type for a wrong token.
        gym_kind: ``failure_kind`` of a rollout, from NeMo Gym's ``failure_kinds.py``; None if the
            answer is an HTTP error instead of a rollout.
        reaction: what a client does: "skip" gives a bad row no reward, if the caller permits it;
            "fail" raises; "retry" sends the request again.
    """

    # Kinds that the sender must correct: fix the request (bad_request), send the right token
    # (unauthorized), name a model of the server (unknown_model), or send a smaller request
    # (too_large).
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
    unknown_model = (404, (), "INVALID_ARG", "NotFoundError", "Validation", None, "fail")
    too_large = (413, (), "INVALID_ARG", "BadRequestError", "Validation", "verifier_error", "skip")
    # A judge or function next to the model has no score for the row, and a retry would not help.
    unscored = (400, (), "INVALID_ARG", "BadRequestError", "Validation", "judge_failed", "skip")
    # The server is full (busy), or does not answer (unreachable). Both are temporary, so the status
    # is the same. Only after unreachable, a client needs a new handshake before it sends more. With
    # 408 and 425, a proxy rejects a request that came too slowly or too early, as a full server
    # does: before it is computed.
    busy = (
        503,
        (408, 425, 429),
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
    # A judgment or tokenizing a row took too long. Sending the request again may help, but computes
    # all of its rows again.
    slow = (
        503,
        (),
        "UNAVAILABLE",
        "ServiceUnavailableError",
        "Overloaded",
        "transport_unreachable",
        "retry",
    )
    # A bug or a failure of the model; the server's log has the details. The same request would fail
    # again, and so would all other rollouts of NeMo Gym: a run must not continue with a reward of 0
    # for each of them.
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
        """The name of this kind in an answer of ``/v1/rewards``."""
        return self.name.replace("_", " ")

    @classmethod
    def of_status(cls, status: int) -> FailureKind:
        """Return the kind for an HTTP status of any server; ``internal`` for an unknown status."""
        kinds = (kind for kind in cls if status in (kind.status, *kind.aliases))
        return next(kinds, cls.internal)


# Sets of failure kinds with which a row does not fail its request: the row gets NaN and a reason,
# and the other rows get their rewards. A row with any other kind fails the whole request.
NO_ROWS: frozenset[FailureKind] = frozenset()
REJECTED_ROWS = frozenset({FailureKind.bad_request})
FINAL_ROWS = frozenset(kind for kind in FailureKind if kind.reaction == "skip") | {FailureKind.slow}
ALL_ROWS = FINAL_ROWS | {FailureKind.unreachable}


class RequestError(ServingError):
    """A request that cannot be answered.

    Attributes:
        message: the reason, in one line.
        kind: cause of the failure.
        retry_after_s: when the request may be sent again, in seconds from now; None if unknown.
        row: the row that is at fault; None if the whole request is at fault.
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

    def renumber(self, row_numbers: Sequence[int]) -> RequestError:
        """Return the error with the row's number in a larger request, of which this was a part.

        ``row_numbers`` has the number in the larger request of each row of the part. An error
        that names no row is returned itself.
        """
        match = _ROW.match(self.message)
        if match is None or int(match[1]) >= len(row_numbers):
            return self
        number = row_numbers[int(match[1])]
        message = f"{self.message[: match.start(1)]}{number}{self.message[match.end(1) :]}"
        row = None if self.row is None else number
        return RequestError(message, self.kind, self.retry_after_s, row)


def failure_of(error: Exception) -> RequestError:
    """Convert the exception of a request to the failure that is reported to its sender."""
    text = one_line(error)
    # An AlignerError has a message that is written for the sender; any other exception is a bug.
    if not isinstance(error, AlignerError):
        logger.error("a request failed because of a bug", exc_info=error)
        text = f"internal error: {type(error).__name__}: {text}"
        return RequestError(text, FailureKind.internal)
    logger.debug("a request was rejected", exc_info=error)  # shown with ``--debug``
    if isinstance(error, RequestError):
        return error
    return RequestError(text, FailureKind.bad_request)


def public_failure(error: Exception) -> RequestError:
    """Convert an exception to a ``RequestError`` for the answer to an HTTP request.

    The details of a bug are hidden: the sender gets only a number, and the log has the details
    under the same number.
    """
    if isinstance(error, AlignerError):
        return failure_of(error)
    number = token_hex(4)
    logger.error("internal error %s: a request could not be answered", number, exc_info=error)
    text = (
        f"internal error {number}: {type(error).__name__}; the server's log has the details under "
        "this number"
    )
    return RequestError(text, FailureKind.internal)


# Parts of messages from which a client recognizes the bad row, a wrong token, a request that is too
# large, and when to try again. These facts are in the messages, because Triton sends no status 401
# or 413 and no Retry-After. Never change the messages of a server: older clients would break.

NO_TOKEN = "the bearer token is missing or wrong (server.token_file, server.token_variable)"
# The client adds one of these to the message, because the server does not know what was sent.
NOT_SENT = "no token was sent"
WRONG_TOKEN = "the token that was sent is not the server's"
_ROW = re.compile(r"^(?:\w+, )?row (\d+): ")
_SECONDS = r"[0-9]{1,9}(?:\.[0-9]{1,9})?"
_RETRY_AFTER = re.compile(rf"retry after ({_SECONDS}) ?s")
_TOO_LARGE = re.compile(r"\d+ bytes, wanted at most \d+ \(server\.max_request_bytes\)")


class RefusedError(RequestError):
    """A server's rejection of a request; sending it again would not help.

    Attributes:
        server: name of the server.
        status: HTTP status: 400 if the request is at fault, 401 if the bearer token is missing or
            wrong, 413 if the request is too large, 500 if the model failed.
        is_foreign: whether the answer is not a KServe error, so that it comes from another kind of
            server or from a proxy.
    """

    def __init__(
        self,
        server: str,
        status: int,
        message: str,
        is_foreign: bool = False,
        kind: FailureKind | None = None,
    ) -> None:
        """Store the answer; ``kind`` None stands for the kind of the status."""
        match = _ROW.match(message)
        row = int(match[1]) if match else None
        super().__init__(message, kind or FailureKind.of_status(status), row=row)
        self.server, self.status, self.is_foreign = server, status, is_foreign

    def __str__(self) -> str:
        return f"{self.server}: {self.message}"

    @property
    def is_too_large(self) -> bool:
        """True if the request has too many bytes; then smaller requests may be accepted."""
        is_triton_error = self.status == 400 and bool(_TOO_LARGE.search(self.message))
        return is_triton_error or self.kind is FailureKind.too_large

    @property
    def is_unknown_model(self) -> bool:
        """True if the server may not have the model: Triton answers 404 or, in one case, 400."""
        return self.status == 404 or self.kind is FailureKind.bad_request

    @property
    def reason(self) -> str:
        """The message without the row number."""
        return _ROW.sub("", self.message)

    def of_row(self, row: int) -> RefusedError:
        """Return a copy with another ``row``: the row's number in the caller's list of samples."""
        message = self.message.replace(f"row {self.row}: ", f"row {row}: ", 1)
        return RefusedError(self.server, self.status, message, kind=self.kind)


class UnavailableError(RequestError):
    """A server does not answer for now; the pool of a client catches it and tries again.

    Attributes:
        waiting_helps: whether the server may answer later; False for a wrong address or
            certificate.
        is_hang: whether the server accepted the connection, and then did not answer in time.
    """

    def __init__(
        self,
        message: str,
        kind: FailureKind = FailureKind.unreachable,
        retry_after_s: float | None = None,
        waiting_helps: bool = True,
        is_hang: bool = False,
    ) -> None:
        super().__init__(message, kind, retry_after_s)
        self.waiting_helps, self.is_hang = waiting_helps, is_hang


def retry_after(message: str, header: str) -> float | None:
    """Return the seconds to wait before sending to a busy server again; None if unknown.

    The seconds in the error ``message`` take precedence over those in ``header`` (``Retry-After``).
    """
    match = _RETRY_AFTER.search(message)
    seconds = match[1] if match else header.strip()
    # ``str.isdigit`` would also accept characters that ``float`` does not, such as a superscript 2.
    return float(seconds) if re.fullmatch(_SECONDS, seconds) else None
