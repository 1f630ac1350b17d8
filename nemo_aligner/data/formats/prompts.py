"""Columns with a part of the prompt that is not in the messages: system prompts, earlier turns.

Data of LLaMA-Factory has ``system`` and ``history`` columns, Orca has a ``system`` column. If these
were not read, the model would learn preferences for replies to a prompt that it has not seen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from typing import Any

from nemo_aligner.contract.messages import (
    Messages,
    Text,
    flatten_message,
    messages_of,
    with_messages,
    with_principle,
    with_tools,
)
from nemo_aligner.data.formats.base import Fields, is_assistant, messages_in, read_turns
from nemo_aligner.data.records import Record, is_blank, with_texts
from nemo_aligner.utils.errors import DataError, shown

_SYSTEM = ("system", "system_prompt")
_HISTORY = "history"
# Maps the letters of the names of system columns to the names, for columns such as ``System``.
_SPELLINGS = {name.replace("_", ""): name for name in _SYSTEM}
_NOT_LETTERS = re.compile("[^a-z]")
# Maps each prompt column, such as ``system``, to the key in ``counts`` with the number of lines
# that have the column.
COLUMN_COUNTS = {name: f"{name}_column" for name in (*_SYSTEM, _HISTORY)}


def count_records(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of records (read, dropped, kept), without the counts of prompt columns."""
    column_names = COLUMN_COUNTS.values()
    return {name: count for name, count in counts.items() if name not in column_names}


_SYSTEM_ROLES = ("system", "developer")
_PROMPT_WORD = (
    "(prompt|question|instruction|input|query|context|message|conversation|dialog(ue)?|history"
    "|system|user|human|problem|post|passage|article|document|request|premise)s?"
)
# Names of columns with a part of the prompt: one of these words, also after another word
# (``user_prompt``), and with a number after it; or before another word (``problem_statement``).
_PROMPT_NAMES = re.compile(
    rf"(.*[^a-z])?{_PROMPT_WORD}([ _]?([0-9]+|text))?|{_PROMPT_WORD}[^a-z].*"
)
# Last words of the names of columns that tell something about a prompt, such as ``prompt_id``.
_ABOUT_PROMPTS = re.compile(
    r".*[^a-z](id|uid|uuid|guid|index|idx|number|num|count|rank|hash|sha|md5|fingerprint|embedding"
    r"|length|len|size|token|char|word|type|kind|class|category|label|tag|topic|domain|task|subset"
    r"|split|source|origin|dataset|model|agent|name|author|role|language|lang|locale|date|time"
    r"|timestamp|year|url|link|score|rating|quality|difficulty|level|complexity|safety|toxicity"
    r"|following|version|metadata|meta)(s|es)?[^a-z]*"
)


def looks_like_prompt(name: str) -> bool:
    """True if a column of this name usually holds a prompt, or a part of one."""
    # Split camel case into words: ``userPrompt`` becomes ``user_prompt``.
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    return bool(_PROMPT_NAMES.fullmatch(words)) and not _ABOUT_PROMPTS.fullmatch(words)


def prompt_like(
    value: dict[str, Any], replies: Container[str] = ("chosen", "rejected")
) -> list[str]:
    """List the columns of a record, except its ``replies``, that may hold a part of the prompt.

    Such a column holds messages that are not all the assistant's, whatever its name; or a text, a
    list or an object with a text, and ``looks_like_prompt`` is True for its name. History and
    system prompt come last, because they do not hold the question.
    """
    names = [
        name
        for name, cell in value.items()
        if name not in replies
        and (
            not all(map(is_assistant, messages_in(cell)))
            or (_holds_text(cell) and looks_like_prompt(name))
        )
    ]
    return sorted(names, key=lambda name: (name in _SYSTEM, name == _HISTORY))


def find_prompt_messages(value: dict[str, Any]) -> str | None:
    """Return the only column of a pair that may hold the prompt, if it holds messages.

    The columns ``system`` and ``history`` do not count, because they are read next to a prompt.

    Returns:
        The column; None if there is none, if several columns may hold the prompt, or if the
        messages do not end with the prompt but with a reply.
    """
    names = prompt_like(value)
    if not names or not COLUMN_COUNTS.keys() >= set(names[1:]):
        return None
    messages = messages_in(value[names[0]])
    return names[0] if messages and not is_assistant(messages[-1]) else None


def advise_prompt(value: dict[str, Any], name: str) -> str:
    """Write the advice in errors about a pair whose prompt may be in the column ``name``."""
    if isinstance(value[name], dict) and not messages_in(value[name]):
        return f"If {name!r} holds the prompt, write the prompt's text to a column 'prompt'"
    return f"If {name!r} is the prompt, set {every_form('prompt_key', name)}"


def every_form(name: str, value: str) -> str:
    """Write a data setting in each verb's form, since code that reads files knows no verb."""
    flag = f"--{name.replace('_', '-')} {value}"
    return (
        f"{flag} (data inspect, data split, score), model.data.{name}={value} (train) or "
        f"data.{name}={value} (evaluate)"
    )


def _holds_text(cell: object) -> bool:
    if isinstance(cell, dict):
        return any(map(_holds_text, cell.values()))
    return _has_text(cell)


def _has_text(cell: object) -> bool:
    return not is_blank(cell) if isinstance(cell, str) else isinstance(cell, list) and bool(cell)


def with_prompt_columns(record: Record, fields: Fields, labels: Container[str]) -> Record:
    """Put a record's ``history`` and ``system`` columns before its conversations.

    Turns that a conversation already begins with are not added again. A column is not added if the
    samples are raw texts, if the format has already read it, or if it is one of the ``labels``.

    Raises:
        DataError: a system column has another type or a misspelt name, or a conversation has
            another system prompt.
    """
    if isinstance(record.texts[0], str):
        return record
    _check_spelling(fields, labels)
    record = _add_turns(record, fields, _HISTORY, _read_history(fields, labels), _add_history)
    for name in _SYSTEM:
        turns = _read_system(fields, name, labels)
        record = _add_turns(record, fields, name, turns, _add_system)
    return record


def with_record_columns(record: Record, fields: Fields, labels: Container[str]) -> Record:
    """Add to a record's samples all columns that the formats share.

    These are ``history``, ``system``, ``tools``, ``documents`` and ``principle``, unless they are
    ``labels``.

    Raises:
        DataError: a column cannot be added.
    """
    record = _add_tools(with_prompt_columns(record, fields, labels), fields)
    return _add_principle(record, fields, labels)


def _add_tools(record: Record, value: Fields) -> Record:
    """Add the ``tools`` and ``documents`` of the fields ``value`` to a record's conversations.

    Raises DataError if a conversation has others, or the record has ``chat_template_kwargs``, which
    are not supported.
    """
    if isinstance(record.texts[0], str):
        return record
    if value.get("chat_template_kwargs"):
        raise DataError(
            "chat_template_kwargs of single records are not supported. Set "
            "model.data.chat_template_kwargs, which applies to all records"
        )
    # A format that has tools of its own, such as fc-reward-bench, has added them already.
    tools = None if "tools" in value.names_read else value.get("tools")
    documents = dict.get(value, "documents")
    # Ignore a ``documents`` field that is not a list of objects, as a chat template needs: other
    # data may have a field of this name.
    is_list = isinstance(documents, list) and all(isinstance(item, dict) for item in documents)
    documents = value["documents"] if is_list and "documents" in value else None
    if not (tools or documents):
        return record
    return with_texts(record, [with_tools(text, tools, documents) for text in record.texts])


def _add_principle(record: Record, value: Fields, labels: Container[str]) -> Record:
    """Add the ``principle`` of the fields ``value`` to a record, unless it is one of ``labels``.

    Raises DataError if it is not a string, or the record has raw texts.
    """
    if "principle" in labels or "principle" not in value:
        return record
    principle = value["principle"]
    return with_texts(record, [with_principle(text, principle) for text in record.texts])


def _add_turns(
    record: Record,
    fields: Fields,
    name: str,
    turns: Messages,
    add: Callable[[Messages, Messages], Messages],
) -> Record:
    if not turns:
        return record
    fields.names_in_prompt.add(name)

    def extend(text: Text) -> Text:
        assert not isinstance(text, str)  # with_prompt_columns does not change raw texts
        return with_messages(text, add(messages_of(text), turns))

    return with_texts(record, [*map(extend, record.texts)])


def _is_available(fields: Fields, name: str, labels: Container[str]) -> bool:
    return name in fields and name not in fields.names_read and name not in labels


def _read_history(fields: Fields, labels: Container[str]) -> Messages:
    """Read earlier turns: messages, or pairs of a user's text and the reply to it.

    A history of another type, for example a string, is not read.
    """
    history = dict.get(fields, _HISTORY)
    if not _is_available(fields, _HISTORY, labels) or not isinstance(history, list):
        return []
    if not all(isinstance(turn, list | dict) for turn in history):
        return []
    turns: list[Any] = []
    for number, turn in enumerate(fields[_HISTORY]):
        if isinstance(turn, dict):
            turns.append(turn)
            continue
        if len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise DataError(
                f"{_HISTORY}[{number}]: got {shown(turn)}, wanted two texts: of the user and of "
                "the assistant"
            )
        turns += [
            {"role": role, "content": text}
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
    return read_turns(turns, _HISTORY)


def _read_system(fields: Fields, name: str, labels: Container[str]) -> Messages:
    if not _is_available(fields, name, labels):
        return []
    prompt = fields[name]  # this marks the column as read, even if it is empty
    if prompt is None or prompt in ([], {}):
        return []
    if not isinstance(prompt, str):
        raise DataError(f"{name}: got {shown(prompt)}, wanted a string, the system prompt")
    return [] if is_blank(prompt) else read_turns([{"role": "system", "content": prompt}], name)


def _check_spelling(fields: Fields, labels: Container[str]) -> None:
    """Check that no unread column has a name like ``System``, which would not be read.

    Raises:
        DataError: there is such a column, and it has a text.
    """
    for name in fields:
        spelling = _SPELLINGS.get(_NOT_LETTERS.sub("", name.lower()))
        if spelling in (None, name) or not _is_available(fields, name, labels):
            continue
        if _has_text(dict.get(fields, name)):
            raise DataError(
                f"{name}: no column of this name is read. If it is the system prompt, rename the "
                f"column to {spelling!r}; otherwise rename or remove it"
            )


def _add_history(messages: Messages, turns: Messages) -> Messages:
    start = 0
    while messages[start]["role"] in _SYSTEM_ROLES:
        start += 1
    following = messages[start:]
    is_present = len(following) > len(turns) and following[: len(turns)] == turns
    return messages if is_present else [*messages[:start], *turns, *following]


def _add_system(messages: Messages, turns: Messages) -> Messages:
    if messages[0]["role"] not in _SYSTEM_ROLES:
        return [*turns, *messages]
    present, column = flatten_message(messages[0]), flatten_message(turns[0])
    if present.strip() != column.strip():
        raise DataError(
            f"system: got {shown(column)} next to a conversation whose system prompt is "
            f"{shown(present)}. Keep one of the two."
        )
    return messages
