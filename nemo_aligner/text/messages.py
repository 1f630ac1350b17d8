"""Texts and conversations: what is scored, and what of it is the reply."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from nemo_aligner.errors import DataError

ROLES = ("system", "user", "assistant", "tool")


Message: TypeAlias = dict[str, str]


Conversation: TypeAlias = list[Message]


# A str is raw text, scored as it stands; a conversation goes through the contract's chat template.
Text: TypeAlias = str | Conversation


def prompt_of(text: Text) -> Conversation:
    """Everything before the last turn of a conversation; nothing for raw text."""
    return [] if isinstance(text, str) else text[:-1]


def reply_of(text: Text) -> str:
    """What is judged: the last turn of a conversation; the whole of a raw text."""
    return text if isinstance(text, str) else text[-1]["content"]


def first_prompt(text: Text) -> str:
    """The first user turn of a conversation; empty for raw text."""
    turns: Iterator[Message] = iter(() if isinstance(text, str) else text)
    return next((turn["content"] for turn in turns if turn["role"] == "user"), "")


def check_text(text: object) -> None:
    """Refuse anything but a raw text or a conversation that ends with the assistant's reply.

    Raises:
        DataError: it says what was got and what was wanted, but not where; the caller knows that.
    """
    if isinstance(text, str):
        _check_unicode(text)
        return
    if not isinstance(text, list):
        raise DataError(f"got {_shown(text)}, wanted a text or a list of messages")
    if not text:
        raise DataError("got an empty conversation, wanted at least the reply that is scored")
    for number, message in enumerate(text, start=1):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise DataError(
                f"message {number}: got {_shown(message)}, wanted exactly 'role' and 'content'"
            )
        for key, value in message.items():
            if not isinstance(value, str):
                raise DataError(f"message {number}, {key}: got {_shown(value)}, wanted a string")
            _check_unicode(value)
        if message["role"] not in ROLES:
            raise DataError(
                f"message {number}: got role {message['role']!r:.60}, "
                f"wanted one of {', '.join(ROLES)}"
            )
    if text[-1]["role"] != "assistant":
        raise DataError(
            f"the last message is the reply that is scored: got role {text[-1]['role']!r}, "
            "wanted 'assistant'"
        )


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"got half of a surrogate pair at character {error.start}, wanted valid Unicode"
        ) from error


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return f"an object with keys {', '.join(map(repr, value)) or 'none'}"
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
