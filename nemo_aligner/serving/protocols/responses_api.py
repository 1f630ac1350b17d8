"""Convert items of OpenAI's Responses API, which NeMo Gym uses, to chat messages."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import Any

from nemo_aligner.contract.messages import Message, Messages
from nemo_aligner.serving.protocols.base import as_json, text_of
from nemo_aligner.utils.errors import ServingError

_ROLES = {"developer": "system"}  # the Responses API's name for the system role


def turns_of(items: list[Any], location: str) -> Messages:
    """Convert items of the Responses API to messages, including tool calls and their results.

    Raises:
        ServingError: an item is not text; the message begins with ``location`` and the item's
            number.
    """
    turns: Messages = []
    for number, item in enumerate(items):
        place = f"{location}.{number}"
        kind = item.get("type") or "message" if isinstance(item, dict) else None
        # Drop reasoning: reward models are trained on replies without it.
        if kind == "reasoning":
            continue
        read_item = _ITEM_READERS.get(kind) if isinstance(kind, str) else None
        if read_item is not None:
            turns.append(read_item(item, place))
            continue
        if kind != "message" or not isinstance(item.get("role"), str):
            raise ServingError(
                f"{place}: got {as_json(item)}, wanted a message with role and content"
            )
        role = _ROLES.get(item["role"], item["role"])
        turns.append({"role": role, "content": text_of(item.get("content"), place)})
    return turns


def _read_call(item: dict[str, Any], place: str) -> Message:
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    calls = [{"id": item.get("call_id"), "type": "function", "function": function}]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def _read_call_result(item: dict[str, Any], place: str) -> Message:
    text = text_of(item.get("output"), place)
    return {"role": "tool", "content": text, "tool_call_id": item.get("call_id")}


_ITEM_READERS = {"function_call": _read_call, "function_call_output": _read_call_result}


def merge_assistant_turns(turns: Messages) -> Messages:
    """Merge successive messages and tool calls of the assistant into one message.

    The Responses API has separate items for text and calls; chat templates expect one turn.
    """
    messages: Messages = []
    for role, group in groupby(turns, key=itemgetter("role")):
        run = [*group]
        messages += [_merge_turns(run)] if role == "assistant" and len(run) > 1 else run
    return messages


def _merge_turns(run: Messages) -> Message:
    contents = [turn["content"] for turn in run if turn["content"] is not None]
    calls = [call for turn in run for call in turn.get("tool_calls", ())]
    message = {"role": "assistant", "content": "".join(contents) if contents else None}
    return {**message, "tool_calls": calls} if calls else message
