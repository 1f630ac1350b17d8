"""Format: how records of a public format are recognized and read; errors name the field."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from nemo_aligner.config.common import RecordKind
from nemo_aligner.config.describe import suggestion
from nemo_aligner.contract.messages import (
    Conversation,
    Messages,
    Text,
    read_messages,
    read_text,
    with_tools,
)
from nemo_aligner.data.records import Comparison, Origin, Record
from nemo_aligner.utils.errors import DataError, writable

# A format: how its records are recognized and read.


class Fields(dict[str, Any]):
    """An object of a file that remembers which of its fields were read.

    So the table of a file can name the columns that no rule of its format has looked at, without a
    list of columns in every format.
    """

    def __init__(self, value: dict[str, Any]) -> None:
        super().__init__(value)
        self.names_read: set[str] = set()
        # Of those, the ones that hold a part of the prompt next to the messages.
        self.names_in_prompt: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names_read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names_read.add(name)
        return super().get(name, default)

    def unread(self, others: Sequence[str] = ()) -> list[str]:
        """Names of fields, except ``others``, that hold something and were not read."""
        return [
            name
            for name, content in self.items()
            if name not in self.names_read
            and name not in others
            and content not in (None, "", [], {})
        ]


@dataclass(frozen=True)
class WantedLabels:
    """The label columns that a reader has to find.

    Attributes:
        names: of the columns, in order; none are read where it is empty.
        missing: the number that, like null, stands for a missing label.
        neutral: label of a step that is rated as neither right nor wrong; None leaves it out.
    """

    names: Sequence[str] = ()
    missing: float | None = None
    neutral: float | None = 1.0


@dataclass(frozen=True)
class PairKeys:
    """Names of a pair's fields: its prompt, its chosen and its rejected reply."""

    prompt: str = "prompt"
    chosen: str = "chosen"
    rejected: str = "rejected"

    @classmethod
    def of(cls, prompt: str | None, chosen: str | None, rejected: str | None) -> PairKeys | None:
        """The usual one where one is None; None if all are."""
        if all(key is None for key in (prompt, chosen, rejected)):
            return None
        return cls(prompt or cls.prompt, chosen or cls.chosen, rejected or cls.rejected)


@dataclass(frozen=True)
class Format:
    """A public format.

    Attributes:
        name: as ``model.data.format`` has it.
        kind: what its records are.
        matches: whether an object of a file can be read as a record of it, or as a line of one.
        wanted: the keys by which it is known, for errors.
        parse: a record, or some, of the objects that it is made of; raises DataError without file
            and line, which the caller knows.
        sample: the objects of one record.
        lines_per_record: objects that make a record.
        recognizes: whether an object is one for sure, so that ``auto`` may take it; None is the
            same as ``matches``.
    """

    name: str
    kind: RecordKind
    matches: Callable[[dict[str, Any]], bool]
    wanted: str
    parse: Callable[[list[dict[str, Any]], Origin, WantedLabels], Record | Sequence[Record]]
    sample: tuple[dict[str, Any], ...]
    lines_per_record: int = 1
    recognizes: Callable[[dict[str, Any]], bool] | None = None

    def is_certain(self, value: dict[str, Any]) -> bool:
        """True if an object is surely a record of this format, or a line of one."""
        return (self.recognizes or self.matches)(value)


def has(*keys: str) -> Callable[[dict[str, Any]], bool]:
    """A test for objects that have all of ``keys``."""
    return lambda value: set(keys) <= set(value)


# Texts, conversations and labels out of a record's fields; each error names the field.

# The column that says by how much the chosen reply is better, as objectives ask for it.
LABEL_MARGIN = "label_margin"
# Labels are float32.
_LARGEST = (2 - 2**-23) * 2.0**127
_FEWEST = 2  # completions of a comparison
# Where a turn begins inside a prompt of HelpSteer and HelpSteer2.
_TURN = re.compile(r"\n<extra_id_1>(User|Assistant)\n")


def read_string(value: dict[str, Any], key: str) -> str:
    """A field that is a text."""
    if key not in value:
        raise DataError(f"missing key {key!r}, got {', '.join(map(repr, value)) or 'none'}")
    text = value[key]
    if not isinstance(text, str):
        raise DataError(f"{key}: got {text!r:.60}, wanted a string")
    checked(text, key)
    return text


def checked(text: Any, key: str) -> Any:
    """The text or conversation of a field, as ``read_text`` gives it."""
    text = _standard_turns(text, key)
    try:
        return read_text(text)
    except DataError as error:
        raise DataError(f"{key}: {error}") from error


def read_turns(turns: list[Any], key: str) -> Messages:
    """The messages of a field, whoever speaks last."""
    turns = _standard_turns(turns, key)
    try:
        return read_messages(turns)
    except DataError as error:
        raise DataError(f"{key}: {error}") from error


# ShareGPT's messages have ``from`` and ``value``, and names of their own for who speaks. In
# LLaMA-Factory's and ms-swift's data a call of a tool is a message, whose JSON is the call's name
# and arguments, or a list of calls; and so is its result.
_FROM, _VALUE = "from", "value"
_SPEAKERS = {"human": "user", "gpt": "assistant", "bot": "assistant"}
_RESULTS = ("observation", "function_response", "tool_response")
_CALLS = ("function_call", "tool_call")


# Roles of messages that need no translation: most of all data.
_STANDARD_ROLES = ("user", "assistant", "system", "tool", "developer")


def is_assistant(turn: dict[str, Any]) -> bool:
    """True for a message of the assistant, in any writing that is read."""
    role = turn.get("role") or turn.get(_FROM)
    if not isinstance(role, str):
        return False
    return _SPEAKERS.get(role, role) == "assistant" or role in _CALLS


def _standard_turns(turns: Any, key: str) -> Any:
    """A list of messages in ShareGPT's writing in the usual one; anything else unchanged."""
    if not isinstance(turns, list):
        return turns
    if all(isinstance(turn, dict) and turn.get("role") in _STANDARD_ROLES for turn in turns):
        return turns
    return [
        _standard_turn(turn, f"{key}: messages[{number}]") if isinstance(turn, dict) else turn
        for number, turn in enumerate(turns)
    ]


def _standard_turn(turn: dict[str, Any], where: str) -> dict[str, Any]:
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
        raise DataError(f"{where}: got {calls!r:.60} of {role}, wanted JSON: {error}") from error
    calls = calls if isinstance(calls, list) else [calls]
    return {**turn, "role": "assistant", "content": None, "tool_calls": calls}


def read_source(value: object) -> str:
    """Source of a record, from a text or a number, as tables print it; empty for anything else."""
    if isinstance(value, float):
        value = int(value) if value.is_integer() else value if math.isfinite(value) else None
    is_named = isinstance(value, str | int | float) and not isinstance(value, bool)
    return writable(str(value)) if is_named else ""


def read_objects(value: dict[str, Any], key: str, *needed: str) -> list[dict[str, Any]]:
    """A field that is a list of two or more objects, each with the keys that are ``needed``."""
    found = value[key]
    if not isinstance(found, list) or len(found) < _FEWEST:
        raise DataError(f"{key}: got {found!r:.60}, wanted a list of two or more objects")
    for number, one in enumerate(found):
        if not isinstance(one, dict) or not set(needed) <= set(one):
            raise DataError(
                f"{key}[{number}]: got {one!r:.60}, wanted an object with "
                f"{' and '.join(map(repr, needed))}"
            )
    return found


def split_turns(prompt: object) -> object:
    """A prompt of several turns in HelpSteer's writing as messages; any other one as it is.

    Turns after the first begin with a line ``<extra_id_1>User`` or ``<extra_id_1>Assistant`` (the
    card of the data set nvidia/HelpSteer2).
    """
    if not isinstance(prompt, str):
        return prompt
    first, *rest = _TURN.split(prompt)
    if not rest:
        return prompt
    roles = ["user", *(name.lower() for name in rest[::2])]
    if roles != ["user", "assistant"] * (len(roles) // 2) + ["user"]:
        raise DataError(
            f"prompt: got turns of {', '.join(roles)}, wanted user and assistant in turn, "
            "ending with the user"
        )
    said = [first, *rest[1::2]]
    return [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]


def read_conversation(
    prompt: object, reply: object, key: str, prompt_key: str = "prompt"
) -> Messages | Conversation:
    """Prompt and reply put together by the rule of the formats.

    Each is a string, messages or an object with ``messages``, ``tools`` and ``documents``; the
    reply may also be one message.
    """
    if _has_messages(reply):
        text = read_conversation(prompt, reply["messages"], key, prompt_key)
        return _with_tools_of(reply, text, key)
    if _has_messages(prompt):
        text = read_conversation(prompt["messages"], reply, key, prompt_key)
        return _with_tools_of(prompt, text, prompt_key)
    is_message = isinstance(reply, dict) and not {"role", _FROM}.isdisjoint(reply)
    turns = _standard_turns([reply] if is_message else reply, key)
    return _put_together(_standard_turns(prompt, prompt_key), turns, key, prompt_key)


def _has_messages(part: Any) -> TypeGuard[dict[str, Any]]:
    """True for the JSON of a ``Conversation`` with tools or documents."""
    return isinstance(part, dict) and isinstance(part.get("messages"), list)


def _with_tools_of(
    part: dict[str, Any], text: Messages | Conversation, key: str
) -> Messages | Conversation:
    try:
        whole = with_tools(text, part.get("tools"), part.get("documents"))
    except DataError as error:
        raise DataError(f"{key}: {error}") from error
    assert not isinstance(whole, str)  # as text is none
    return whole


def _put_together(prompt: Any, reply: Any, key: str, prompt_key: str) -> Messages:
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
            raise DataError(f"missing key {prompt_key!r}: {key} begins with the reply")
        before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return _joined(before, turns, key, prompt_key)
    conversation: Messages = checked(turns, key)
    if isinstance(prompt, str):
        holds_prompt = {"role": "user", "content": prompt} in conversation
    else:
        holds_prompt = prompt is None or conversation[: len(prompt)] == read_turns(
            prompt, prompt_key
        )
    if not holds_prompt:
        raise DataError(
            f"{key}: got a whole conversation that does not hold the record's {prompt_key}"
        )
    return conversation


def _joined(before: list[Any], turns: list[Any], key: str, prompt_key: str) -> Messages:
    try:
        whole: Messages = checked([*before, *turns], key)
    except DataError:
        # Which of the two fields it is in, and where.
        read_turns(before, prompt_key)
        read_turns(turns, key)
        raise
    return whole


def read_labels(value: dict[str, Any], wanted: WantedLabels, why: str) -> tuple[float | None, ...]:
    """The label of every wanted column, by the field of its name; ``why`` says who wants it."""
    missing = [name for name in wanted.names if name not in value]
    if missing:
        near = suggestion(missing[0], value)
        meant = "" if near is None else f"did you mean {near!r}? "
        raise DataError(
            f"missing key {missing[0]!r}, {why}; {meant}this record has "
            f"{', '.join(map(repr, value))} (a label that is not known is null)"
        )
    return tuple(read_label(value[name], name, wanted) for name in wanted.names)


def read_pair_labels(value: dict[str, Any], wanted: WantedLabels) -> tuple[float | None, ...]:
    """``read_labels`` of a pair, whose columns an objective asks for."""
    return read_labels(value, wanted, "a label column that model.objective reads")


def read_label(value: object, name: str, wanted: WantedLabels) -> float | None:
    """A label, None where it is missing."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"{name}: got {value!r:.60}, wanted a number, or null where it is missing")
    if value == wanted.missing:
        return None
    # A whole number may be too large for a float; NaN is not within the bounds, either.
    if not -_LARGEST <= value <= _LARGEST:
        raise DataError(f"{name}: got {value!r:.60}, wanted a number that fits float32")
    return float(value)


# Completions in order of how good they are, by ranks, scores or the strength of a preference.


def ranked(
    texts: Sequence[Text],
    standing: Sequence[float],
    origin: Origin,
    labels: tuple[float | None, ...] = (),
) -> Comparison:
    """The texts best first; a lower ``standing`` is better, and texts with equal ones are tied.

    Tied texts stay in the order that they came in; ranks begin with 0 and leave none out.
    """
    order = sorted(range(len(texts)), key=standing.__getitem__)
    levels = sorted(set(standing))
    ranks = tuple(levels.index(standing[number]) for number in order)
    return Comparison(tuple(texts[number] for number in order), ranks, origin, labels=labels)
