"""A request of the Responses API and its response -> the conversation that is scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, str]

_ROLES = {"developer": "system"}
_TEXTS = ("input_text", "output_text", "text")


class NoReplyError(ValueError):
    """The policy has said nothing at the end."""


class UnscorableError(ValueError):
    """Something that is no text, as the calls of tools: a reward model reads messages."""


def conversation_of(request: Mapping[str, Any], response: Mapping[str, Any]) -> list[Message]:
    """Messages with ``role`` and ``content``; the last one is the reply.

    ``instructions`` and developers' messages are the system's. Messages of the assistant that
    follow each other are one. Reasoning is left out.

    Raises:
        NoReplyError, UnscorableError: see there.
    """
    asked = request.get("input") or []
    items = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
    if request.get("instructions"):
        items.insert(0, {"role": "system", "content": request["instructions"]})
    said = response.get("output", [])
    messages = _messages([*items, *said])
    if not _messages(said) or messages[-1]["role"] != "assistant":
        raise NoReplyError("response.output: got no message of the assistant at its end")
    return messages


def _messages(items: Sequence[Mapping[str, Any]]) -> list[Message]:
    messages: list[Message] = []
    for item in items:
        if item.get("type") == "reasoning":
            continue
        message = _message(item)
        if messages and messages[-1]["role"] == message["role"] == "assistant":
            messages[-1]["content"] += message["content"]
        else:
            messages.append(message)
    return messages


def _message(item: Mapping[str, Any]) -> Message:
    kind, role = item.get("type") or "message", item.get("role")
    if kind != "message" or not isinstance(role, str):
        raise UnscorableError(f"got an item of type {kind!r}, wanted a message")
    return {"role": _ROLES.get(role, role), "content": _text(item["content"])}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if part.get("type") not in _TEXTS:
            raise UnscorableError(f"got a part of type {part.get('type')!r}, wanted text")
    return "".join(part["text"] for part in content)
