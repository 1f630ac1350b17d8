"""Format: how records of a public format are recognized and read; and functions to read fields.

The other modules of this package define the formats. Errors of the functions here name the field;
``parse_lines`` adds file and line.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from nemo_aligner.config.common import RecordKind
from nemo_aligner.config.describe import suggestion
from nemo_aligner.config.model import ScoredPosition
from nemo_aligner.contract.messages import (
    Conversation,
    Messages,
    Text,
    read_messages,
    read_text,
    with_context,
)
from nemo_aligner.data.records import Comparison, Origin, Record
from nemo_aligner.utils.errors import DataError, writable

# ``Format``, which says how the records of a public format are recognized and read.


class Fields(dict[str, Any]):
    """A JSON object of a file, as a dict that remembers which of its fields were read.

    The report on a file lists the columns that were not read. With this class a format need not
    list the columns that it reads.
    """

    def __init__(self, value: dict[str, Any]) -> None:
        super().__init__(value)
        self.names_read: set[str] = set()
        # Names of columns, such as ``system``, whose content was put before the messages.
        self.names_in_prompt: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names_read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names_read.add(name)
        return super().get(name, default)

    def unread(self, excluded: Sequence[str] = ()) -> list[str]:
        """List the fields, except ``excluded``, that are not empty and were not read."""
        return [
            name
            for name, content in self.items()
            if name not in self.names_read
            and name not in excluded
            and content not in (None, "", [], {})
        ]


@dataclass(frozen=True)
class WantedLabels:
    """The label columns to read.

    Attributes:
        names: names of the columns, in order; if empty, no labels are read.
        missing: number that stands for a missing label, like null.
        neutral: label of a step that is rated neither right nor wrong; None leaves it unlabelled.
    """

    names: Sequence[str] = ()
    missing: float | None = None
    neutral: float | None = 1.0


@dataclass(frozen=True)
class PairKeys:
    """Names of the fields with the prompt, the chosen reply and the rejected reply of a pair."""

    prompt: str = "prompt"
    chosen: str = "chosen"
    rejected: str = "rejected"

    @classmethod
    def of(cls, prompt: str | None, chosen: str | None, rejected: str | None) -> PairKeys | None:
        """Build the keys from settings, where None stands for the usual name of a field.

        Returns None if all three names are None, which means that no field has another name.
        """
        if all(key is None for key in (prompt, chosen, rejected)):
            return None
        return cls(prompt or cls.prompt, chosen or cls.chosen, rejected or cls.rejected)


@dataclass(frozen=True)
class Format:
    """A public format.

    Attributes:
        name: name in ``model.data.format``.
        kind: kind of its records.
        matches: function that returns True if an object (a line of the file) has the keys that
            this format needs.
        wanted: description of the keys that an object needs, for errors.
        parse: function that turns ``lines_per_record`` objects into one or more records. Its
            DataError has no file and line; the caller adds them.
        sample: the objects of an example record.
        lines_per_record: number of objects that make a record.
        recognizes: function that returns True if an object certainly has this format, so that
            ``auto`` may choose it; None if ``matches`` is certain enough.
        reads: value of ``model.head.reads`` of a model that learns the labels of this format; None
            if its labels are not of turns or steps.
    """

    name: str
    kind: RecordKind
    matches: Callable[[dict[str, Any]], bool]
    wanted: str
    parse: Callable[[list[dict[str, Any]], Origin, WantedLabels], Record | Sequence[Record]]
    sample: tuple[dict[str, Any], ...]
    lines_per_record: int = 1
    recognizes: Callable[[dict[str, Any]], bool] | None = None
    reads: ScoredPosition | None = None

    def is_certain(self, value: dict[str, Any]) -> bool:
        """True if an object certainly has this format, so that ``auto`` may choose it."""
        return (self.recognizes or self.matches)(value)


def has(*keys: str) -> Callable[[dict[str, Any]], bool]:
    """Return a function that tests whether an object has all of ``keys``."""
    return lambda value: set(keys) <= set(value)


class OtherKindError(DataError):
    """A file fits a format of another kind than the one that is needed, comparisons or ratings.

    Attributes:
        summary: first sentences of the message: the record, its place, and the format that it fits.
        reads: ``reads`` of that format, as a string.
    """

    # The defaults are for ``pickle``, which passes only the message and sets the attributes itself.
    def __init__(self, message: str, summary: str = "", reads: str | None = None) -> None:
        super().__init__(message)
        self.summary, self.reads = summary, reads


# Functions that read texts, conversations and labels from fields.

# The label column with the difference in quality of the chosen and the rejected reply.
LABEL_MARGIN = "label_margin"
# The largest float32, which is the type of labels.
_LARGEST = (2 - 2**-23) * 2.0**127
_MIN_COMPLETIONS = 2
# Matches the line before each later turn in a prompt of HelpSteer and HelpSteer2.
_TURN = re.compile(r"\n<extra_id_1>(User|Assistant)\n")


def read_string(value: dict[str, Any], key: str) -> str:
    """Return the field ``key`` of a record; raise DataError if it is not a string."""
    if key not in value:
        raise DataError(f"missing key {key!r}, got {', '.join(map(repr, value)) or 'none'}")
    text = value[key]
    if not isinstance(text, str):
        raise DataError(f"{key}: got {text!r:.60}, wanted a string")
    check_text(text, key)
    return text


def check_text(text: Any, key: str) -> Any:
    """Check the text or conversation of the field ``key`` with ``read_text``, and return it."""
    text = _standard_turns(text, key)
    try:
        return read_text(text)
    except DataError as error:
        raise DataError(f"{key}: {error}") from error


def read_turns(turns: list[Any], key: str) -> Messages:
    """Check and translate the messages ``turns`` of the field ``key``; they may end with any role.

    ShareGPT's form is translated. Errors name the field.
    """
    turns = _standard_turns(turns, key)
    try:
        return read_messages(turns)
    except DataError as error:
        raise DataError(f"{key}: {error}") from error


# ShareGPT's messages have the fields ``from`` and ``value`` and other role names. In the data of
# LLaMA-Factory and ms-swift a tool call is a message whose content is the JSON of the call or of a
# list of calls; the result of the call is the next message.
_FROM, _VALUE = "from", "value"
_SPEAKERS = {"human": "user", "gpt": "assistant", "bot": "assistant"}
_RESULTS = ("observation", "function_response", "tool_response")
_CALLS = ("function_call", "tool_call")


# Standard roles. Most data has only these, and its messages need no translation.
_STANDARD_ROLES = ("user", "assistant", "system", "tool", "developer")


def is_assistant(turn: dict[str, Any]) -> bool:
    """True for a message of the assistant, with the usual or with ShareGPT's fields."""
    role = turn.get("role") or turn.get(_FROM)
    if not isinstance(role, str):
        return False
    return _SPEAKERS.get(role, role) == "assistant" or role in _CALLS


def messages_in(cell: Any) -> list[dict[str, Any]]:
    """Return the messages of a cell, which may be a list of them or an object with ``messages``.

    Messages have a role and a content, with the usual or with ShareGPT's fields. An empty list is
    returned for any other cell.
    """
    turns = cell["messages"] if _has_messages(cell) else cell
    return turns if isinstance(turns, list) and all(map(_is_message, turns)) else []


def _is_message(turn: Any) -> bool:
    if not isinstance(turn, dict):
        return False
    has_content = not {"content", "tool_calls"}.isdisjoint(turn)
    return (isinstance(turn.get("role"), str) and has_content) or {_FROM, _VALUE} <= set(turn)


def _standard_turns(turns: Any, key: str) -> Any:
    """Translate a list of ShareGPT's messages to messages with ``role`` and ``content``.

    Anything else is returned unchanged. ``key`` names the field, for errors.
    """
    if not isinstance(turns, list):
        return turns
    if all(isinstance(turn, dict) and turn.get("role") in _STANDARD_ROLES for turn in turns):
        return turns
    return [
        _standard_turn(turn, f"{key}: messages[{number}]") if isinstance(turn, dict) else turn
        for number, turn in enumerate(turns)
    ]


def _standard_turn(turn: dict[str, Any], location: str) -> dict[str, Any]:
    if "role" not in turn and {_FROM, _VALUE} <= set(turn):
        names = {_FROM: "role", _VALUE: "content"}
        turn = {names.get(key, key): content for key, content in turn.items()}
        speaker = turn["role"]
        turn["role"] = _SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else speaker
    role = turn.get("role")
    if role in _RESULTS:
        return {**turn, "role": "tool"}
    if role not in _CALLS:
        return turn
    calls = turn.get("content")
    try:
        calls = json.loads(calls) if isinstance(calls, str) else calls
    except (ValueError, RecursionError) as error:
        raise DataError(f"{location}: got {calls!r:.60} of {role}, wanted JSON: {error}") from error
    calls = calls if isinstance(calls, list) else [calls]
    return {**turn, "role": "assistant", "content": None, "tool_calls": calls}


def read_source(value: object) -> str:
    """Convert a record's source, a string or number, to text; return "" for another value."""
    if isinstance(value, float):
        value = int(value) if value.is_integer() else value if math.isfinite(value) else None
    is_named = isinstance(value, str | int | float) and not isinstance(value, bool)
    return writable(str(value)) if is_named else ""


def read_objects(value: dict[str, Any], key: str, *needed: str) -> list[dict[str, Any]]:
    """Read a field that is a list of two or more objects, each with all keys in ``needed``."""
    objects = value[key]
    if not isinstance(objects, list) or len(objects) < _MIN_COMPLETIONS:
        raise DataError(f"{key}: got {objects!r:.60}, wanted a list of two or more objects")
    for number, item in enumerate(objects):
        if not isinstance(item, dict) or not set(needed) <= set(item):
            raise DataError(
                f"{key}[{number}]: got {item!r:.60}, wanted an object with "
                f"{' and '.join(map(repr, needed))}"
            )
    return objects


def split_turns(prompt: object) -> object:
    """Split a prompt of several turns in HelpSteer's form into messages.

    Any other prompt is returned unchanged.

    Turns after the first begin with a line ``<extra_id_1>User`` or ``<extra_id_1>Assistant`` (the
    card of the data set nvidia/HelpSteer2).
    """
    if not isinstance(prompt, str):
        return prompt
    first, *parts = _TURN.split(prompt)
    if not parts:
        return prompt
    roles = ["user", *(name.lower() for name in parts[::2])]
    if roles != ["user", "assistant"] * (len(roles) // 2) + ["user"]:
        raise DataError(
            f"prompt: got turns of {', '.join(roles)}, wanted user and assistant in turn, "
            "ending with the user"
        )
    contents = [first, *parts[1::2]]
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=True)]


def read_conversation(
    prompt: object, reply: object, key: str, prompt_key: str = "prompt"
) -> Messages | Conversation:
    """Join prompt and reply to a conversation, by the rules in the docstring of this package.

    Prompt and reply are each a string, a list of messages, or an object with ``messages``,
    ``tools``, ``documents`` and ``principle``. The reply may also be a single message.

    Args:
        key: name of the reply's field, for errors.
        prompt_key: name of the prompt's field.
    """
    if _has_messages(reply):
        text = read_conversation(prompt, reply["messages"], key, prompt_key)
        return _add_context(reply, text, key)
    if _has_messages(prompt):
        text = read_conversation(prompt["messages"], reply, key, prompt_key)
        return _add_context(prompt, text, prompt_key)
    is_message = isinstance(reply, dict) and not {"role", _FROM}.isdisjoint(reply)
    turns = _standard_turns([reply] if is_message else reply, key)
    return _join(_standard_turns(prompt, prompt_key), turns, key, prompt_key)


def _has_messages(part: Any) -> TypeGuard[dict[str, Any]]:
    """True for an object with ``messages``, which may also have tools and the like."""
    return isinstance(part, dict) and isinstance(part.get("messages"), list)


def _add_context(
    part: dict[str, Any], text: Messages | Conversation, key: str
) -> Messages | Conversation:
    try:
        conversation = with_context(text, part)
    except DataError as error:
        raise DataError(f"{key}: {error}") from error
    assert not isinstance(conversation, str)  # ``with_context`` returns a string only for one
    return conversation


def _join(prompt: Any, reply: Any, key: str, prompt_key: str) -> Messages:
    if not isinstance(reply, str | list) or reply == []:
        raise DataError(f"{key}: got {reply!r:.60}, wanted a string or a list of messages")
    if not isinstance(prompt, str | list | None):
        raise DataError(f"{prompt_key}: got {prompt!r:.60}, wanted a string or a list of messages")
    if isinstance(reply, str):
        turns: list[Any] = [{"role": "assistant", "content": reply}]
    else:
        turns = reply
    first = turns[0]
    if isinstance(first, dict) and first.get("role") == "assistant":
        if prompt is None:
            raise DataError(
                f"missing key {prompt_key!r}: {key} begins with the reply, so it has no prompt"
            )
        if prompt == []:
            raise DataError(
                f"{prompt_key}: got an empty list, and {key} begins with the reply, so it has no "
                "prompt"
            )
        question = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return _concatenate(question, turns, key, prompt_key)
    conversation: Messages = check_text(turns, key)
    if isinstance(prompt, str):
        holds_prompt = {"role": "user", "content": prompt} in conversation
    else:
        holds_prompt = prompt is None or conversation[: len(prompt)] == read_turns(
            prompt, prompt_key
        )
    if not holds_prompt:
        raise DataError(
            f"{key}: got a whole conversation that does not hold the record's {prompt_key}. Begin "
            "it with the prompt, or write only the reply"
        )
    return conversation


def _concatenate(question: list[Any], turns: list[Any], key: str, prompt_key: str) -> Messages:
    try:
        conversation: Messages = check_text([*question, *turns], key)
    except DataError:
        # Read prompt and reply separately, so that the error names the field that caused it and
        # the position in this field.
        read_turns(question, prompt_key)
        read_turns(turns, key)
        raise
    return conversation


def read_labels(
    value: dict[str, Any], columns: WantedLabels, purpose: str
) -> tuple[float | None, ...]:
    """Read the label of each column from the field of its name.

    ``purpose`` says what the columns are for, in the error about a record without one of them.
    """
    missing = [name for name in columns.names if name not in value]
    if missing:
        near = suggestion(missing[0], value)
        hint = "" if near is None else f"did you mean {near!r}? "
        raise DataError(
            f"missing key {missing[0]!r}, {purpose}; {hint}this record has "
            f"{', '.join(map(repr, value))} (write null for a label that is not known)"
        )
    return tuple(read_label(value[name], name, columns) for name in columns.names)


def read_pair_labels(value: dict[str, Any], columns: WantedLabels) -> tuple[float | None, ...]:
    """Read the labels of a pair, one for each label column that the objective needs."""
    return read_labels(value, columns, "a label column that model.objective reads")


def read_label(value: object, name: str, columns: WantedLabels) -> float | None:
    """Convert the ``value`` of a label to a float; None if the label is missing.

    A label is missing if it is null or ``columns.missing``. ``name`` is the field, for errors.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"{name}: got {value!r:.60}, wanted a number, or null where it is missing")
    if value == columns.missing:
        return None
    # Compare before converting: an integer may be too large for a float. NaN also fails this test.
    if not -_LARGEST <= value <= _LARGEST:
        raise DataError(f"{name}: got {value!r:.60}, wanted a number that fits float32")
    return float(value)


# Building comparisons from ranks, scores or the strength of a preference.


def rank_samples(
    texts: Sequence[Text],
    standing: Sequence[float],
    origin: Origin,
    labels: tuple[float | None, ...] = (),
) -> Comparison:
    """Build a comparison of the samples ``texts``, sorted from the best to the worst.

    ``standing`` has a number for each sample, such as a rank or a negative score: a lower number is
    better, and samples with equal numbers are tied. Tied samples keep their order. The ranks of the
    comparison are 0, 1, 2 and so on.
    """
    order = sorted(range(len(texts)), key=standing.__getitem__)
    levels = sorted(set(standing))
    ranks = tuple(levels.index(standing[number]) for number in order)
    samples = tuple(texts[number] for number in order)
    return Comparison(samples, ranks, origin, labels=labels, positions=tuple(order))
