"""Texts to score, from lines of JSON, each with a label for people."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_aligner.contract.messages import (
    as_json,
    messages_of,
    prompt_of,
    read_text,
    reply_of,
    said,
    with_tools,
)
from nemo_aligner.data.clean import MOST_LISTED, list_malformed
from nemo_aligner.data.files import AnyLine, BadLine, read_lines
from nemo_aligner.data.formats.base import checked
from nemo_aligner.data.readers import ReaderConfig, read_records
from nemo_aligner.data.records import MalformedRecord, Origin
from nemo_aligner.utils.errors import ConfigError, DataError, shown

_MOST_SHOWN = 80


def labelled_conversation(given: str) -> tuple[str, Any]:
    """The conversation of a command line, with its label.

    Raises:
        ConfigError: it is no JSON, or no conversation that ends with a reply.
    """
    try:
        messages = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--conversation: got {given[:60]!r}, wanted JSON: {error}") from error
    if isinstance(messages, str):
        raise ConfigError(f"--conversation: got {shown(messages)}, wanted a list of messages")
    try:
        conversation = read_text(messages)
    except DataError as error:
        raise ConfigError(f"--conversation: {error}") from error
    return label_of(conversation), conversation


def labelled_texts(path: str | Path) -> Iterator[tuple[str, Any]]:
    """Texts to score from a file: each ``text``, ``messages`` or reply of a pair, with its label.

    A line is ``{"text": ...}``, ``{"messages": [...]}`` or a pair (``prompt``, ``chosen``,
    ``rejected``), whose replies give a conversation each; conversations get the line's ``tools``
    and ``documents``.

    Raises:
        DataError: the file cannot be read, or has lines without anything to score; it lists them.
    """
    found: list[tuple[str, Any]] = []
    malformed: list[MalformedRecord] = []
    lines = read_lines(path)
    for line in lines:
        try:
            found += _texts_of(line)
        except DataError as error:
            malformed.append(MalformedRecord(Origin(str(path), line.number), str(error)))
    if malformed:
        heading = f"{path}: {len(malformed)} of its {len(lines)} lines are malformed"
        raise DataError("\n".join([heading, *list_malformed(malformed, MOST_LISTED)]))
    yield from found


def label_of(text: Any) -> str:
    """A text or a conversation on one line, its middle left out where it is long."""
    if not isinstance(text, str):
        text = " | ".join(map(said, messages_of(text)))
    line = " ".join(text.split())
    return line if len(line) <= _MOST_SHOWN else f"{line[:38]} ... {line[-37:]}"


def _texts_of(line: AnyLine) -> list[tuple[str, Any]]:
    if isinstance(line, BadLine):
        raise DataError(line.reason)
    record = line.value
    plain = [checked(record[key], key) for key in ("text", "messages") if key in record]
    replies = {
        key: _beside(checked(_reply_to(record.get("prompt", ""), record[key]), key), record)
        for key in ("chosen", "rejected")
        if key in record
    }
    plain = [_beside(text, record) for text in plain]
    if not plain and not replies:
        keys = ", ".join(map(repr, record)) or "none"
        raise DataError(f"got keys {keys}; wanted 'text', 'messages', or 'chosen' and 'rejected'")
    return [(label_of(text), text) for text in plain] + [
        (f"{key:8}  {label_of(text)}", text) for key, text in replies.items()
    ]


def _beside(text: Any, record: dict[str, Any]) -> Any:
    if isinstance(text, str):
        return text
    return with_tools(text, record.get("tools"), record.get("documents"))


def _reply_to(prompt: Any, reply: Any) -> Any:
    """A prompt and a reply, each a string or messages, as one conversation."""
    turns = _turns(prompt, "user") if prompt else []
    return turns + _turns(reply, "assistant")


def _turns(text: Any, role: str) -> list[Any]:
    if isinstance(text, str):
        return [{"role": role, "content": text}]
    if not isinstance(text, list):
        raise DataError(f"got {text!r:.60}, wanted a string or a list of messages")
    return list(text)


def write_first_replies(source: Path, target: Path) -> str:
    """Write the first two texts of preference data for ``labelled_texts``; both, for people.

    Raises:
        DataError: the file cannot be read.
    """
    records = read_records(source, ReaderConfig()).records
    texts = [text for record in records[:2] for text in record.texts][:2]
    rows = [{"text": text} if isinstance(text, str) else _row(as_json(text)) for text in texts]
    target.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "\n".join(
        [f"{turn['role']}: {said(turn)}" for turn in prompt_of(texts[0])]
        + [f"reply: {reply_of(text)}" for text in texts]
    )


def _row(conversation: Any) -> Any:
    return {"messages": conversation} if isinstance(conversation, list) else conversation
