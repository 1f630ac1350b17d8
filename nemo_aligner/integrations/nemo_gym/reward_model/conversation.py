"""A request of the Responses API and its response -> the conversation that is scored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]

_ROLES = {"developer": "system"}
_TEXTS = ("input_text", "output_text", "text")
_OF_FUNCTION = ("name", "description", "parameters", "strict")


class NoReplyError(ValueError):
    """The policy has said nothing at the end."""


class UnscorableError(ValueError):
    """Something that is neither text nor the call of a function: a reward model reads messages."""


def conversation_of(request: Mapping[str, Any], response: Mapping[str, Any]) -> dict[str, Any]:
    """``messages`` as the chat API has them, the last one the reply; and ``tools``.

    ``instructions`` and developers' messages are the system's. Messages and calls of the assistant
    that follow each other are one. Reasoning is left out.

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
    return {"messages": messages, "tools": [_tool(tool) for tool in request.get("tools") or ()]}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type", "function") != "function":
        raise UnscorableError(f"got a tool of type {tool.get('type')!r}, wanted functions")
    kept = {key: tool[key] for key in _OF_FUNCTION if tool.get(key) is not None}
    return {"type": "function", "function": kept}


def _messages(items: Sequence[Mapping[str, Any]]) -> list[Message]:
    messages: list[Message] = []
    for item in items:
        if item.get("type") == "reasoning":
            continue
        message = _message(item)
        if messages and messages[-1]["role"] == message["role"] == "assistant":
            messages[-1] = _together(messages[-1], message)
        else:
            messages.append(message)
    return messages


def _together(first: Message, second: Message) -> Message:
    contents = [each["content"] for each in (first, second) if each["content"] is not None]
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    together = {"role": "assistant", "content": "".join(contents) if contents else None}
    return {**together, "tool_calls": calls} if calls else together


def _message(item: Mapping[str, Any]) -> Message:
    kind, role = item.get("type") or "message", item.get("role")
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        calls = [{"id": item.get("call_id"), "type": "function", "function": function}]
        return {"role": "assistant", "content": None, "tool_calls": calls}
    if kind == "function_call_output":
        result = _text(item.get("output") or "")
        return {"role": "tool", "content": result, "tool_call_id": item.get("call_id")}
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
