r"""Building blocks of the protocols over plain HTTP and JSON.

Each protocol is one file of this folder. It lists its ``Route``\ s, which ``ROUTES`` of
``serving/front/app.py`` collects. A protocol only translates: its body to a ``ScoreRequest``, and
rewards or a failure to an answer.
"""

from __future__ import annotations

import codecs
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, NoReturn, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from nemo_aligner.config.describe import suggestion
from nemo_aligner.config.serving import FrontConfig
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.messages import (
    Conversation,
    Messages,
    Text,
    read_messages,
    read_text,
    with_principle,
    with_tools,
)
from nemo_aligner.contract.readout import one_reward, weighted_components
from nemo_aligner.serving.failures import (
    ALL_ROWS,
    NO_ROWS,
    REJECTED_ROWS,
    FailureKind,
    RequestError,
)
from nemo_aligner.serving.protocols import ScoredRows, ScoreRequest
from nemo_aligner.serving.protocols.strict_json import check_keys
from nemo_aligner.utils.errors import DataError, ServingError, short, shown

# Maximum number of problems that the error message of one body lists.
_SHOWN_PROBLEMS = 3
# pydantic reports a value that fits no branch of a union once for each branch, in nearly the same
# words. So only this many reports are read, and the further ones are only counted.
_READ_PROBLEMS = 8
# Maximum length of a bad value in a message, so that the line has room for the expected type.
_SHOWN_VALUE = 60
# pydantic appends the branch of a union, e.g. "str", to the location of a problem. Messages omit
# it, because it is not a key of the body.
_BRANCH = re.compile(r"(str|int|float|bool)$|(list|dict)\[")
# Our messages for some of pydantic's error types; other types keep pydantic's message.
_WORDS = {
    "missing": "required, but missing",
    "too_short": "got {actual_length}, wanted at least {min_length}",
    "list_type": "got {got}, wanted a list",
    "string_type": "got {got}, wanted a string",
    "int_type": "got {got}, wanted an integer",
    "model_type": "got {got}, wanted an object",
    "dict_type": "got {got}, wanted an object",
    "literal_error": "got {got}, wanted {expected}",
}


class Body(BaseModel):
    """Base of all request and answer bodies; it keeps fields of a request that are not declared."""

    # Strict: otherwise pydantic converts "1" to a number, and a number to a string.
    model_config = ConfigDict(extra="allow", strict=True)


T = TypeVar("T", bound=Body)
Item = TypeVar("Item")
# A list in a body. Validation stops at the first bad element: an error for each of millions of
# elements would block the server for seconds.
Items = Annotated[list[Item], Field(fail_fast=True)]
# Maximum number of samples of one request. It is not a setting, because validating millions of
# samples takes many seconds.
MOST_ROWS = 2**16
Rows = Annotated[list[Item], Field(fail_fast=True, max_length=MOST_ROWS)]


@dataclass(frozen=True)
class Served:
    """The served model, for answers that name it.

    Attributes:
        model_name: name of the model in answers of vLLM's and the reranking protocols.
        attributes: names of the A columns of a reward.
        weights: A weights that merge the attributes into one reward; None if the server publishes
            no scoring contract.
        reward_threshold: from this reward on, NeMo Gym counts a reply as good.
        scale: ``reward_scale`` of the contract; None if the server publishes none.
        refused_reward: reward of a rejected sample, on routes that use it; None if such a sample
            fails its request.
    """

    model_name: str
    attributes: Sequence[str]
    weights: Sequence[float] | None
    reward_threshold: float | None = None
    scale: str | None = None
    refused_reward: float | None = None

    def fill_refused(self, values: np.ndarray, scored: ScoredRows) -> list[Any]:
        """Return ``values [B, ...]`` with ``refused_reward`` in each row of ``scored.errors``.

        All of them are rejected rows, because an unscored one fails the request on these routes.
        """
        filled = values.copy()
        if self.refused_reward is not None:
            filled[[*scored.errors]] = self.refused_reward
        return filled.tolist()

    def one_reward(self, rewards: np.ndarray) -> list[float]:
        """Merge the A attributes of rewards ``[B, A]`` into one reward per row, by ``weights``.

        Raises:
            ServingError: A > 1, and the weights are not known.
        """
        if self.weights is None and rewards.shape[1] > 1:
            raise ServingError(
                f"the model has {rewards.shape[1]} attributes, and its server publishes no scoring "
                "contract with their weights; wanted one reward per sample"
            )
        return one_reward(rewards, self.weights or (1.0,)).tolist()

    def components(self, rewards: np.ndarray) -> list[dict[str, float]]:
        """Return, by attribute, what each row of ``rewards [B, A]`` adds to its ``one_reward``."""
        rows = weighted_components(rewards, self.weights or (1.0,)).tolist()
        return [dict(zip(self.attributes, row, strict=True)) for row in rows]


@dataclass(frozen=True)
class HttpAnswer:
    """The answer of a protocol: HTTP status, object to send as JSON, and additional headers."""

    status: int
    content: Any
    headers: Mapping[str, str] = field(default_factory=dict)


# Headers of an answer that list row numbers (from 0): samples that were cut to the model's length,
# and samples that are not written in the model's chat template. They are headers because the bodies
# of some protocols have no field for them.
TRUNCATED_ROWS = "X-Truncated-Rows"
FOREIGN_ROWS = "X-Foreign-Template-Rows"
_MOST_SHOWN_ROWS = 100  # not all rows: clients reject headers of more than 8 KiB


def row_headers(scored: ScoredRows) -> dict[str, str]:
    """Build the headers that list the row numbers of truncated samples and of foreign samples.

    A foreign sample is a raw text, or token ids, not written in the model's chat template.
    """
    masks = {TRUNCATED_ROWS: scored.exceeded, FOREIGN_ROWS: scored.foreign_template}
    marked = {
        name: np.flatnonzero(mask).tolist() for name, mask in masks.items() if mask is not None
    }
    return {name: _list_row_numbers(rows) for name, rows in marked.items() if rows}


def _list_row_numbers(rows: Sequence[int]) -> str:
    more = [f"and {len(rows) - _MOST_SHOWN_ROWS} more"] * (len(rows) > _MOST_SHOWN_ROWS)
    return ", ".join([*map(str, rows[:_MOST_SHOWN_ROWS]), *more])


@dataclass(frozen=True)
class Route(Generic[T]):
    """One URL of a protocol that answers with rewards, and the functions that translate for it.

    Attributes:
        path: path of the URL, for POST requests.
        summary: one line for the OpenAPI page.
        request: model of the body; a body that does not fit is rejected with a one-line message.
        response: model of the answer, for the OpenAPI page.
        read: converts a body to a ``ScoreRequest``; raises ServingError if it is rejected.
        answer: builds the answer of a request that was scored.
        refuse: builds the answer of a request that failed; the body is None if it is unreadable.
        sets_rows_aside: whether a rejected or unscored row gets a separate error, while the other
            rows are scored. If not, one such row fails the whole request.
        completes_turns: whether a raw text or token row that ends with an end-of-turn token is
            completed with the text that the model's chat template writes after that token
            (``server.complete_turns``, ``gateway.complete_turns``).
        with_other_reply: builds the same request with a reply that is always valid. If a sample is
            rejected, the front scores that request to find out what is at fault. If this succeeds,
            the reply is at fault, and ``answer`` gets the sample as a row with an error. Otherwise
            the prompt is at fault, and ``refuse`` builds the answer.
        takes_refused_reward: whether a rejected row gets the setting ``refused_reward``, if it is
            not null. It is for trainers whose runs end without a reward for each sample.
        marks: names of fields that only this protocol has. They select this route if another
            protocol has an earlier route at the same ``path``.
        count_rows: counts the samples that ``read`` would build from a body, without building them.
            Needed if samples share a part of the body, so that they may be far larger than it.
    """

    path: str
    summary: str
    request: type[T]
    response: type[BaseModel]
    read: Callable[[T], ScoreRequest]
    answer: Callable[[T, ScoredRows, Served], Any]
    refuse: Callable[[RequestError, T | None], HttpAnswer]
    sets_rows_aside: bool = False
    completes_turns: bool = False
    with_other_reply: Callable[[T], ScoreRequest] | None = None
    marks: tuple[str, ...] = ()
    takes_refused_reward: bool = False
    count_rows: Callable[[T], int] | None = None

    def parse(self, body: bytes) -> T:
        """Parse the body of a request.

        Raises:
            ServingError: the body is not valid JSON, or does not fit ``request``.
            RequestError: the body has too many samples.
        """
        return parse_body(self.request, body)

    def rows_aside(self, refused_reward: float | None) -> frozenset[FailureKind]:
        """Return the failures with which a row does not fail the request (see ``failures.py``)."""
        if self.sets_rows_aside:
            return ALL_ROWS
        has_reward = self.takes_refused_reward and refused_reward is not None
        return REJECTED_ROWS if has_reward else NO_ROWS


@dataclass(frozen=True)
class PlainRoute:
    """A URL of a protocol that does not return rewards, e.g. NeMo Gym's ``/seed_session``.

    Attributes:
        path: path of the URL.
        summary: one line for the OpenAPI page.
        answer: converts the bytes of a body to the answer; raises ServingError (HTTP 400) if the
            body is invalid.
        method: HTTP method of its requests.
        is_slow: whether answering takes more than a few milliseconds even for a small body. The
            front then calls ``answer`` in a thread.
    """

    path: str
    summary: str
    answer: Callable[[bytes], HttpAnswer]
    method: str = "POST"
    is_slow: bool = False


@dataclass(frozen=True)
class ModelRoute:
    """A URL that describes the model, e.g. TEI's ``/info``; requests are GET.

    Attributes:
        path: path of the URL.
        summary: one line for the OpenAPI page.
        answer: builds the answer from the scoring contracts by the models' names (None if the
            backends publish none), and the settings of the server or gateway. The first model is
            the one that is described if the answer has room for one.
    """

    path: str
    summary: str
    answer: Callable[[Mapping[str, ScoringContract | None], FrontConfig], HttpAnswer]


def refuse_with_detail(failure: RequestError, body: Any) -> HttpAnswer:
    """Build the error answer ``{"detail": message}``, FastAPI's form, which many clients read."""
    return HttpAnswer(failure.kind.status, {"detail": failure.message})


_GZIP, _UTF16 = b"\x1f\x8b", (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_ENCODINGS = ("", "identity", "gzip", "x-gzip", "deflate")
# Bytes that are unpacked per step; the memory in use exceeds the limit by at most this many.
_UNPACKED_AT_ONCE = 2**16


def unpack_body(content: bytes, encoding: str, max_bytes: int) -> bytes:
    """Decompress a body, and remove a byte order mark, to get its JSON.

    Raises:
        RequestError: the unpacked body is longer than ``max_bytes``.
        ServingError: the body's encoding is not supported, its data is damaged, or its text is
            UTF-16.
    """
    content = decompress(content, encoding, max_bytes)
    if content.startswith(_UTF16):
        raise ServingError("body: got text in UTF-16; wanted JSON in UTF-8")
    return content.removeprefix(codecs.BOM_UTF8)


def is_packed(content: bytes, encoding: str) -> bool:
    """Return whether a body is compressed; then even a small one may take long to unpack."""
    return encoding.strip().lower() == "deflate" or content.startswith(_GZIP)


def decompress(content: bytes, encoding: str, max_bytes: int) -> bytes:
    """Unpack a body that is compressed with gzip or deflate; return any other body unchanged.

    gzip is recognized by the first bytes, deflate only by ``encoding``, the ``Content-Encoding``
    header. Unpacking stops at ``max_bytes``, so a compression bomb does not fill the memory. zlib
    releases the GIL.

    Raises:
        RequestError: the unpacked body is longer than ``max_bytes``.
        ServingError: the body's encoding is not supported, or its compressed data is damaged or is
            followed by more bytes.
    """
    encoding = encoding.strip().lower()
    if encoding not in _ENCODINGS:
        raise ServingError(
            f"Content-Encoding: got {shown(encoding)}, wanted gzip, deflate or none; send the body "
            "uncompressed"
        )
    if "gzip" in encoding and not content.startswith(_GZIP):
        raise ServingError(
            "Content-Encoding: got gzip, but the body is not compressed; omit the header"
        )
    return _unpack(content, max_bytes) if is_packed(content, encoding) else content


def _unpack(content: bytes, max_bytes: int) -> bytes:
    pieces, size = [], 0
    for piece in _unpacked_pieces(content):
        size += len(piece)
        if size > max_bytes:
            raise too_large(max_bytes)
        pieces.append(piece)
    return b"".join(pieces)


def _unpacked_pieces(content: bytes) -> Iterator[bytes]:
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # + 32: gzip or zlib
    start = 0
    try:
        while start < len(content) and not unpacker.eof:
            # Pass the input in slices, because each call of zlib copies the input that it has not
            # used.
            packed = content[start : start + _UNPACKED_AT_ONCE]
            start += len(packed)
            piece = b""
            # If a piece is full, zlib may have more output even when no input is left.
            while packed or len(piece) == _UNPACKED_AT_ONCE:
                piece = unpacker.decompress(packed, _UNPACKED_AT_ONCE)
                packed = unpacker.unconsumed_tail
                yield piece
    except zlib.error as error:
        raise ServingError(f"body: its compressed data cannot be read: {error}") from error
    if not unpacker.eof or unpacker.unused_data or start < len(content):
        raise ServingError(
            "body: its compressed data is incomplete, or more bytes follow its end; send it again"
        )


def too_large(max_bytes: int) -> RequestError:
    """Return the error for a body of more than ``max_bytes`` bytes."""
    return RequestError(
        f"got a body of more than {max_bytes} bytes (max_request_bytes); send smaller requests",
        FailureKind.too_large,
    )


def parse_body(form: type[T], body: bytes) -> T:
    """Parse and validate a JSON body.

    Raises:
        ServingError: the body is not JSON, has a duplicate key, or does not fit the model ``form``.
        RequestError: the body has more than ``MOST_ROWS`` samples.
    """
    if not body or body.isspace():
        raise ServingError("body: it is empty; wanted a JSON object")
    check_keys(body)
    try:
        return form.model_validate_json(body)
    except ValidationError as error:
        if any(problem["type"] == "too_long" for problem in error.errors(include_url=False)):
            check_row_count(MOST_ROWS + 1)
        raise ServingError(_describe_problems(error, form)) from error


def check_row_count(count: int) -> None:
    """Raise RequestError if a request has more than ``MOST_ROWS`` samples."""
    if count > MOST_ROWS:
        raise RequestError(
            f"got more than {MOST_ROWS} samples in one request; send smaller requests",
            FailureKind.too_large,
        )


# Names that protocols use for a sample. A route reads one of them; without the check below it would
# ignore the others, because unknown fields are kept.
_SAMPLE_FIELDS = (
    *("input", "inputs", "input_ids", "messages", "conversations"),
    *("text", "texts", "prompt", "query", "queries"),
)


def refuse_other_samples(body: Body, name: str) -> None:
    """Reject a body that has samples under ``name`` and also under another name.

    Raises:
        ServingError: there are other samples; the message has both names.
    """
    extra = body.model_extra or {}
    for other in _SAMPLE_FIELDS:
        if extra.get(other):
            raise ServingError(f"got {name} and {other}, which are both samples; send one of them")


def as_json(value: Any) -> str:
    """Write a value of a body as one short line of JSON, for an error message."""
    try:
        return short(json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):
        return shown(value)


def read_conversation(value: Any) -> Text:
    """Read a conversation (a list of messages, or an object with ``messages``) of a body.

    Raises:
        DataError: ``value`` is not a conversation.
    """
    if isinstance(value, str):
        raise DataError(f"got {as_json(value)}, wanted a list of messages")
    return read_text(value)


def conversation_of(value: Any, location: str) -> Text:
    """Read one conversation of a request; error messages show ``location``, its place in the body.

    Raises:
        ServingError: ``value`` is not a conversation.
    """
    with locate_errors(location):
        return read_conversation(value)


def read_prompt(
    messages: Sequence[Any], tools: Any = None, principle: Any = None
) -> Messages | Conversation:
    """Read a conversation without its reply; replies to it may share its messages and tools.

    Raises:
        DataError: a message, the tools or the principle are not valid.
    """
    prompt = with_principle(with_tools(read_messages(messages), tools), principle)
    assert not isinstance(prompt, str)
    return prompt


@contextmanager
def locate_errors(location: str) -> Iterator[None]:
    """Convert a DataError to a ServingError that shows ``location``, the value's place in the body.

    Raises:
        ServingError: the ``with`` block raises DataError.
    """
    try:
        yield
    except DataError as error:
        prefix = "" if str(error).startswith(f"{location}[") else f"{location}: "
        raise ServingError(f"{prefix}{error}") from error


def text_of(content: Any, location: str) -> str:
    """Return the text of a message's content: a string, or a list of text parts (OpenAI's form).

    Raises:
        ServingError: a part is an image or anything else that is not text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        _refuse_content(content, location)
    texts = [part.get("text") if isinstance(part, dict) else None for part in content]
    for part, text in zip(content, texts, strict=True):
        if not isinstance(text, str):
            _refuse_content(part, location)
    return "".join(text for text in texts if text is not None)


def _refuse_content(content: Any, location: str) -> NoReturn:
    raise ServingError(
        f"{location}: got {as_json(content)}, wanted a string or a list of parts with text"
    )


def _describe_problems(error: ValidationError, request: type[BaseModel]) -> str:
    """Describe in one line what is wrong with a body.

    Args:
        error: pydantic's report, with one problem or many.
        request: the model that the body does not fit.
    """
    # Omit the links to pydantic's own pages: they do not help the sender of a request.
    errors = error.errors(include_url=False)
    problems: dict[tuple[Any, ...], str] = {}
    for details in errors[:_READ_PROBLEMS]:
        location, message = details["loc"], _describe_problem(details, request)
        actual, separator, expected = message.partition(", wanted ")
        if location and separator and _BRANCH.match(str(location[-1])):
            # Merge the reports of a union's branches into one: "wanted a string or a list".
            key = (*location[:-1], actual)
            merged = problems.get(key, "")
            if expected not in merged:
                problems[key] = f"{merged} or {expected}" if merged else message
        else:
            problems[(*location, actual)] = message
    lines = [
        f"{'.'.join(map(_escape_key, key[:-1])) or 'body'}: {message}"
        for key, message in problems.items()
    ]
    unshown = len(lines[_SHOWN_PROBLEMS:]) + len(errors[_READ_PROBLEMS:])
    ending = [f"and {unshown} more"] if unshown else []
    return short("; ".join([*lines[:_SHOWN_PROBLEMS], *ending]))


def _escape_key(part: str | int) -> str:
    """Return a key of a body for a message, with line breaks and control characters escaped."""
    text = str(part)
    return text if text.isprintable() else json.dumps(text)


def _describe_problem(details: ErrorDetails, request: type[BaseModel]) -> str:
    if details["type"] == "extra_forbidden":
        # The fields of a nested object are not known here, only those of the body itself.
        fields = request.model_fields if len(details["loc"]) == 1 else ()
        key = str(details["loc"][0])
        # Comparing a key of megabytes with the field names would take seconds.
        near = suggestion(key, fields) if len(key) <= _SHOWN_VALUE else None
        meant = f"; did you mean {near}?" if near else ""
        return f"unknown field{meant}" + (f"; known are {', '.join(fields)}" if fields else "")
    message = _WORDS.get(details["type"])
    if message is None:
        return details["msg"]
    value = as_json(details["input"])
    shortened = value if len(value) <= _SHOWN_VALUE else f"{value[:_SHOWN_VALUE]}..."
    return message.format(got=shortened, **details.get("ctx", {}))
