"""Texts to score, from lines of JSON, each with a label for people."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nemo_aligner.data.reading import read_records
from nemo_aligner.data.sources import read_lines
from nemo_aligner.text.messages import prompt_of, reply_of

_MOST_SHOWN = 80


def labelled_texts(path: str | Path) -> Iterator[tuple[str, Any]]:
    """What a file asks about: each ``text``, ``messages``, or reply of a pair, with its label.

    A line is ``{"text": ...}``, ``{"messages": [...]}`` or a pair (``prompt``, ``chosen``,
    ``rejected``), whose replies give a conversation each.

    Raises:
        DataError: the file cannot be read; see ``read_lines``.
    """
    for line in read_lines(path):
        yield from _texts_of(line.value)


def label_of(text: Any) -> str:
    """A text or a conversation on one line, its middle left out where it is long."""
    if not isinstance(text, str):
        text = " | ".join(turn["content"] for turn in text)
    line = " ".join(text.split())
    return line if len(line) <= _MOST_SHOWN else f"{line[:38]} ... {line[-37:]}"


def _texts_of(record: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in ("text", "messages"):
        if key in record:
            yield label_of(record[key]), record[key]
    for key in ("chosen", "rejected"):
        if key in record:
            text = _reply_to(record.get("prompt", ""), record[key])
            yield f"{key:8}  {label_of(text)}", text


def _reply_to(prompt: Any, reply: Any) -> Any:
    """A prompt and a reply, each a string or messages, as one conversation."""
    turns = _turns(prompt, "user") if prompt else []
    return turns + _turns(reply, "assistant")


def _turns(text: Any, role: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}] if isinstance(text, str) else list(text)


def write_first_replies(source: Path, target: Path) -> str:
    """Write the first two texts of preference data for ``labelled_texts``; both, for people.

    Raises:
        DataError: the file cannot be read.
    """
    records = read_records(source, None).records
    texts = [text for record in records[:2] for text in record.texts][:2]
    rows = [{"text" if isinstance(text, str) else "messages": text} for text in texts]
    target.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "\n".join(
        [f"{turn['role']}: {turn['content']}" for turn in prompt_of(texts[0])]
        + [f"reply: {reply_of(text)}" for text in texts]
    )
