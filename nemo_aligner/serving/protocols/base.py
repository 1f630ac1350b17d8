r"""A protocol over plain HTTP and JSON, as the gateway serves it.

A protocol is one file of this folder with its ``Route``\ s, listed in ``ROUTES`` of
``serving/http.py``. It only translates: its body to a ``ScoreRequest``, and what became of that to
its own answer.
"""

from __future__ import annotations

import codecs
import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, NoReturn, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from nemo_aligner.config.describe import suggestion
from nemo_aligner.config.serving import FrontConfig
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.messages import Text, read_text
from nemo_aligner.contract.readout import one_reward
from nemo_aligner.serving.failures import FailureKind, RequestError
from nemo_aligner.serving.protocols import ScoredRows, ScoreRequest
from nemo_aligner.serving.protocols.strict_json import check_keys
from nemo_aligner.utils.errors import DataError, ServingError, short, shown

_SHOWN_PROBLEMS = 3  # of a body
# Of these; a union's branches have one each, most of which say the same. Others are only counted.
_READ_PROBLEMS = 8
# Characters of a bad value, so that the line has room for what was wanted.
_SHOWN_VALUE = 60
# Branches of a union in the place of a problem, which are no names of the body.
_BRANCH = re.compile(r"(str|int|float|bool)$|(list|dict)\[")
# By pydantic's error types; others keep pydantic's words.
_WORDS = {
    "missing": "required, but missing",
    "too_short": "got {actual_length}, wanted at least {min_length}",
    "list_type": "got {got}, wanted a list",
    "string_type": "got {got}, wanted a text",
    "int_type": "got {got}, wanted an integer",
    "model_type": "got {got}, wanted an object",
    "dict_type": "got {got}, wanted an object",
    "literal_error": "got {got}, wanted {expected}",
}


class Body(BaseModel):
    """Base of requests and answers; unknown names of a request are kept."""

    # Strict: otherwise pydantic takes "1" for a number and a number for a text.
    model_config = ConfigDict(extra="allow", strict=True)


T = TypeVar("T", bound=Body)
Item = TypeVar("Item")
# A list of a body. Validation stops at its first bad element: pydantic would make an error for each
# of millions, which takes seconds in which nothing else is answered.
Items = Annotated[list[Item], Field(fail_fast=True)]
# Samples of a request. No setting allows more, as looking at millions of them takes many seconds.
MOST_ROWS = 2**16
Rows = Annotated[list[Item], Field(fail_fast=True, max_length=MOST_ROWS)]


@dataclass(frozen=True)
class Served:
    """The model behind the gateway, for answers that name it.

    ``attributes`` are the names of a reward's columns, and ``weights`` (None where no server says)
    make one number of them. ``scale`` is the contract's ``reward_scale``, None likewise.
    """

    model_name: str
    attributes: Sequence[str]
    weights: Sequence[float] | None
    reward_threshold: float | None = None
    scale: str | None = None

    def one_reward(self, rewards: np.ndarray) -> list[float]:
        """Merge ``[B, A]`` rewards into one per row, as evaluation does; A = 1 is left as it is.

        Raises:
            ServingError: A > 1, and nobody says how much each attribute counts.
        """
        if self.weights is None and rewards.shape[1] > 1:
            raise ServingError(
                f"the model has {rewards.shape[1]} attributes, and its server publishes no scoring "
                "contract with their weights; wanted one reward for each text"
            )
        return one_reward(rewards, self.weights or (1.0,)).tolist()


@dataclass(frozen=True)
class HttpAnswer:
    """A status, an object for JSON, and further headers than those of every answer."""

    status: int
    content: Any
    headers: Mapping[str, str] = field(default_factory=dict)


# Numbers of rows, from 0, that were cut to the model's length, or are not written in its chat
# template. Headers, as some protocols' answers have no room for a further field.
TRUNCATED_ROWS = "X-Truncated-Rows"
FOREIGN_ROWS = "X-Foreign-Template-Rows"
_MOST_SHOWN_ROWS = 100  # clients refuse headers of more than 8 KiB


def row_headers(scored: ScoredRows) -> dict[str, str]:
    """Headers about rows that have a reward by less than the whole text, or by other rules."""
    masks = {TRUNCATED_ROWS: scored.exceeded, FOREIGN_ROWS: scored.foreign_template}
    marked = {
        name: np.flatnonzero(mask).tolist() for name, mask in masks.items() if mask is not None
    }
    return {name: _listed(rows) for name, rows in marked.items() if rows}


def _listed(rows: Sequence[int]) -> str:
    more = [f"and {len(rows) - _MOST_SHOWN_ROWS} more"] * (len(rows) > _MOST_SHOWN_ROWS)
    return ", ".join([*map(str, rows[:_MOST_SHOWN_ROWS]), *more])


@dataclass(frozen=True)
class Route(Generic[T]):
    """A URL of a protocol.

    Attributes:
        path: the URL's path; requests come by POST.
        about: for people, in one line.
        request: what the body has; unfit ones are refused in one line.
        response: what the answer has, for the OpenAPI page.
        read: raises ServingError where the body cannot be scored.
        answer: to a request that was scored.
        refuse: to one that was not; the body is None where it could not be read.
        sets_rows_aside: a row that is refused has an error of its own; else the request has.
        completes_turns: a raw text or token row that ends at an end of turn gets what the model's
            template writes behind it (``gateway.complete_turns``).
        with_other_reply: the request of one text with a reply that nobody refuses. Where the text
            is refused, this says whose fault it is: the reply's, if this is scored; ``answer`` then
            gets it as a row with an error. Else the prompt's, which is for ``refuse``.
        marks: names of a body's fields by which it is this protocol's, where another one has its
            route at the same ``path``, before this.
    """

    path: str
    about: str
    request: type[T]
    response: type[BaseModel]
    read: Callable[[T], ScoreRequest]
    answer: Callable[[T, ScoredRows, Served], Any]
    refuse: Callable[[RequestError, T | None], HttpAnswer]
    sets_rows_aside: bool = False
    completes_turns: bool = False
    with_other_reply: Callable[[T], ScoreRequest] | None = None
    marks: tuple[str, ...] = ()

    def parse(self, body: bytes) -> T:
        """The body of a request.

        Raises:
            ServingError, RequestError: see ``parse_body``.
        """
        return parse_body(self.request, body)


@dataclass(frozen=True)
class PlainRoute:
    """A URL that a protocol's clients ask beside rewards; ``answer`` to the bytes of a body.

    It raises ServingError where the body is unfit: HTTP 400. Where it ``is_slow``, answering takes
    more than a few milliseconds and belongs in a thread, however small the body is.
    """

    path: str
    about: str
    answer: Callable[[bytes], HttpAnswer]
    method: str = "POST"
    is_slow: bool = False


@dataclass(frozen=True)
class ModelRoute:
    """A URL with what is known of the model, asked by GET.

    ``answer`` gets the backends' contract, None if they publish none, and the gateway's settings.
    """

    path: str
    about: str
    answer: Callable[[ScoringContract | None, FrontConfig], HttpAnswer]


def refuse_with_detail(failure: RequestError, body: Any) -> HttpAnswer:
    """``{"detail"}``, FastAPI's own shape, which clients of servers made with it read."""
    return HttpAnswer(failure.kind.status, {"detail": failure.message})


_GZIP, _UTF16 = b"\x1f\x8b", (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_ENCODINGS = ("", "identity", "gzip", "x-gzip", "deflate")
# Bytes that are unpacked at once, so that no more than these are held beyond the limit.
_UNPACKED_AT_ONCE = 2**16


def unpack_body(content: bytes, encoding: str, most: int) -> bytes:
    """A body's JSON: unpacked (see ``decompress``), and without a byte order mark.

    Raises:
        RequestError: it has more bytes than ``most`` once unpacked.
        ServingError: it is packed otherwise, cut off or damaged, or in UTF-16.
    """
    content = decompress(content, encoding, most)
    if content.startswith(_UTF16):
        raise ServingError("body: got text in UTF-16; wanted JSON in UTF-8")
    return content.removeprefix(codecs.BOM_UTF8)


def is_packed(content: bytes, encoding: str) -> bool:
    """Whether a body is packed, so that a small one may take long to unpack."""
    return encoding.strip().lower() == "deflate" or content.startswith(_GZIP)


def decompress(content: bytes, encoding: str, most: int) -> bytes:
    """A body without gzip, which its first bytes say, or deflate, which only its header can say.

    ``encoding`` is the header ``Content-Encoding``. At no time are more than ``most`` bytes and a
    buffer held before it is known that they are all; zlib works without the GIL.

    Raises:
        RequestError: it has more bytes than ``most`` once unpacked.
        ServingError: it is packed otherwise, cut off or damaged, or has more behind its end.
    """
    encoding = encoding.strip().lower()
    if encoding not in _ENCODINGS:
        raise ServingError(
            f"Content-Encoding: got {shown(encoding)}, wanted gzip, deflate or none; send the body "
            "as it is"
        )
    if "gzip" in encoding and not content.startswith(_GZIP):
        raise ServingError("Content-Encoding: got gzip, and a body that is not; leave it out")
    return _unpack(content, most) if is_packed(content, encoding) else content


def _unpack(content: bytes, most: int) -> bytes:
    pieces, size = [], 0
    for piece in _unpacked_pieces(content):
        size += len(piece)
        if size > most:
            raise too_large(most)
        pieces.append(piece)
    return b"".join(pieces)


def _unpacked_pieces(content: bytes) -> Iterator[bytes]:
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # gzip or zlib, by the first bytes
    start = 0
    try:
        while start < len(content) and not unpacker.eof:
            # In slices: at each call zlib copies what it has not used of its input.
            packed = content[start : start + _UNPACKED_AT_ONCE]
            start += len(packed)
            piece = b""
            # A full piece without input that is left may have more behind it, too.
            while packed or len(piece) == _UNPACKED_AT_ONCE:
                piece = unpacker.decompress(packed, _UNPACKED_AT_ONCE)
                packed = unpacker.unconsumed_tail
                yield piece
    except zlib.error as error:
        raise ServingError(f"body: its packed data cannot be read: {error}") from error
    if not unpacker.eof or unpacker.unused_data or start < len(content):
        raise ServingError("body: its packed data is cut off, or has more behind its end")


def too_large(most: int) -> RequestError:
    """The failure of a body of more bytes than ``most``."""
    return RequestError(
        f"got a body of more than {most} bytes (max_request_bytes); send less at once",
        FailureKind.too_large,
    )


def parse_body(form: type[T], body: bytes) -> T:
    """Read a body of this form.

    Raises:
        ServingError: it has another form, a key twice, or is no JSON.
        RequestError: it has more than ``MOST_ROWS`` samples.
    """
    if not body or body.isspace():
        raise ServingError("body: it is empty, wanted a JSON object")
    check_keys(body)
    try:
        return form.model_validate_json(body)
    except ValidationError as error:
        if any(each["type"] == "too_long" for each in error.errors(include_url=False)):
            raise RequestError(
                f"got more than {MOST_ROWS} samples in one request; send less at once",
                FailureKind.too_large,
            ) from error
        raise ServingError(_problems_of(error, form)) from error


# Names that one protocol or another has for a sample. A route that reads one of them would ignore
# the others, as names that it does not know.
_SAMPLE_FIELDS = (
    *("input", "inputs", "input_ids", "messages", "conversations"),
    *("text", "texts", "prompt", "query", "queries"),
)


def refuse_other_samples(body: Body, name: str, others: Sequence[str] = _SAMPLE_FIELDS) -> None:
    """Refuse a body that has samples under ``name`` and under another name, too.

    Raises:
        ServingError: it names both.
    """
    extra = body.model_extra or {}
    for other in others:
        if extra.get(other):
            raise ServingError(f"got {name} and {other}, wanted one of them: both are samples")


def as_json(value: Any) -> str:
    """A value of a body for an error message, as its sender wrote it, in one short line."""
    try:
        return short(json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):
        return shown(value)


def read_conversation(given: Any) -> Text:
    """A conversation of a body in the normal form.

    Raises:
        DataError: it is none.
    """
    if isinstance(given, str):
        raise DataError(f"got {as_json(given)}, wanted a list of messages")
    return read_text(given)


def conversation_of(given: Any, where: str) -> Text:
    """``read_conversation`` for a request of one conversation, which fails as a whole.

    Raises:
        ServingError: it is none.
    """
    try:
        return read_conversation(given)
    except DataError as error:
        place = "" if str(error).startswith(f"{where}[") else f"{where}: "
        raise ServingError(f"{place}{error}") from error


def text_of(content: Any, where: str) -> str:
    """The text of a message's content: a string, or parts that are all texts (OpenAI's form).

    Raises:
        ServingError: a part is an image, or anything else but text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        _refuse_content(content, where)
    texts = [part.get("text") if isinstance(part, dict) else None for part in content]
    for part, text in zip(content, texts, strict=True):
        if not isinstance(text, str):
            _refuse_content(part, where)
    return "".join(text for text in texts if text is not None)


def _refuse_content(content: Any, where: str) -> NoReturn:
    raise ServingError(
        f"{where}: got {as_json(content)}, wanted a text or a list of parts with text"
    )


def _problems_of(error: ValidationError, request: type[BaseModel]) -> str:
    """Describe what is wrong with a body, in one line."""
    # Without pydantic's links to its own pages, which nobody follows from an answer.
    errors = error.errors(include_url=False)
    problems: dict[tuple[Any, ...], str] = {}
    for each in errors[:_READ_PROBLEMS]:
        place, words = each["loc"], _problem(each, request)
        got, wants, wanted = words.partition(", wanted ")
        if place and wants and _BRANCH.match(str(place[-1])):
            # A value that fits no branch of a union is one problem.
            key = (*place[:-1], got)
            before = problems.get(key, "")
            if wanted not in before:
                problems[key] = f"{before} or {wanted}" if before else words
        else:
            problems[(*place, got)] = words
    lines = [
        f"{'.'.join(map(_key, key[:-1])) or 'body'}: {words}" for key, words in problems.items()
    ]
    more = len(lines[_SHOWN_PROBLEMS:]) + len(errors[_READ_PROBLEMS:])
    rest = [f"and {more} more"] if more else []
    return short("; ".join([*lines[:_SHOWN_PROBLEMS], *rest]))


def _key(part: str | int) -> str:
    """A part of a place, escaped where a sender's key would break the line."""
    text = str(part)
    return text if text.isprintable() else json.dumps(text)


def _problem(each: ErrorDetails, request: type[BaseModel]) -> str:
    if each["type"] == "extra_forbidden":
        # Which model a name further inside belongs to is not known here.
        known = request.model_fields if len(each["loc"]) == 1 else ()
        key = str(each["loc"][0])
        # Comparing a key of megabytes with the known ones takes seconds.
        near = suggestion(key, known) if len(key) <= _SHOWN_VALUE else None
        meant = f"; did you mean {near}?" if near else ""
        return f"unknown field{meant}" + (f"; known are {', '.join(known)}" if known else "")
    words = _WORDS.get(each["type"])
    if words is None:
        return each["msg"]
    got = as_json(each["input"])
    cut = got if len(got) <= _SHOWN_VALUE else f"{got[:_SHOWN_VALUE]}..."
    return words.format(got=cut, **each.get("ctx", {}))
