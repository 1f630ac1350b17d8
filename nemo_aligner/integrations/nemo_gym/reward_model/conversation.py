"""A request of the Responses API and its response -> the conversation that is scored."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, str]

_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
_TEXTS = ("input_text", "output_text", "text", "refusal")


class UnscorableError(ValueError):
    """What the policy was asked, or did, is no conversation of texts."""


def conversation_of(request: Mapping[str, Any], response: Mapping[str, Any]) -> list[Message]:
    """Messages with ``role`` and ``content``; the last one is the reply.

    ``instructions`` and developers' messages are the system's. A tool's output is a message of the
    role ``tool``, and a call of it the assistant's, as JSON. Reasoning is left out.

    Raises:
        UnscorableError: there is no reply, or something that is not a text.
    """
    asked = request.get("input") or []
    items = [{"role": "user", "content": asked}] if isinstance(asked, str) else list(asked)
    if request.get("instructions"):
        items.insert(0, {"role": "system", "content": request["instructions"]})
    messages = _messages([*items, *response.get("output", [])])
    if not messages or messages[-1]["role"] != "assistant" or not response.get("output"):
        raise UnscorableError("the response has no reply at its end")
    return messages


def _messages(items: Sequence[Mapping[str, Any]]) -> list[Message]:
    messages = [message for item in items if (message := _message(item)) is not None]
    return [_merged(group) for group in _runs(messages)]


def _message(item: Mapping[str, Any]) -> Message | None:
    kind = item.get("type") or "message"
    if kind == "reasoning":
        return None
    if kind == "function_call":
        call = {"name": item["name"], "arguments": item["arguments"]}
        return {"role": "assistant", "content": json.dumps(call, ensure_ascii=False)}
    if kind == "function_call_output":
        return {"role": "tool", "content": _text(item["output"])}
    if kind != "message" or item.get("role") not in _ROLES:
        raise UnscorableError(f"got an item of type {kind!r}, wanted messages and function calls")
    return {"role": _ROLES[item["role"]], "content": _text(item["content"])}


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if part.get("type") not in _TEXTS:
            raise UnscorableError(f"got a part of type {part.get('type')!r}, wanted text")
        texts.append(part.get("text", part.get("refusal")))
    return "".join(texts)


def _runs(messages: Sequence[Message]) -> list[list[Message]]:
    """Neighbours of one role, assistants' alone: what a policy says before a call is its turn."""
    runs: list[list[Message]] = []
    for message in messages:
        is_same = runs and runs[-1][-1]["role"] == message["role"] == "assistant"
        if is_same:
            runs[-1].append(message)
        else:
            runs.append([message])
    return runs


def _merged(group: Sequence[Message]) -> Message:
    return {"role": group[0]["role"], "content": "\n".join(turn["content"] for turn in group)}
