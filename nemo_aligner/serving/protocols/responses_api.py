"""Convert items of OpenAI's Responses API, which NeMo Gym uses, to chat messages."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import Any

from nemo_aligner.contract.messages import (
    Conversation,
    Message,
    Messages,
    messages_of,
    read_messages,
    with_messages,
)
from nemo_aligner.serving.failures import FailureKind, RequestError
from nemo_aligner.serving.protocols.base import as_json, locate_errors, text_of
from nemo_aligner.utils.errors import ServingError

# Maximum number of elements that the conversations of one request copy from their common prompt:
# pointers to messages and calls, and characters.
_MOST_COPIED = 2**24
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


def check_copies(prompt: Messages, num_replies: int) -> None:
    """Check that the copies of the prompt, one for each reply, are not far larger than the request.

    A copy has a pointer to each message. If the prompt ends with the assistant's turn, it also has
    the text and calls of this turn, which each reply continues.

    Raises:
        RequestError: the copies are too large.
    """
    size = len(prompt)
    if prompt and prompt[-1]["role"] == "assistant":
        size += len(prompt[-1]["content"] or "") + len(prompt[-1].get("tool_calls", ()))
    if size * num_replies > _MOST_COPIED:
        raise RequestError(
            f"response_objs: got {num_replies} replies to a conversation_history of {len(prompt)} "
            "turns, which is too long to be copied for each reply. Send fewer replies per request",
            FailureKind.too_large,
        )


def count_shared_turns(prompt: Messages | Conversation) -> int:
    """Count the prompt's messages that do not depend on the reply that ``append_turns`` appends.

    A reply continues the assistant's turn at the end of the prompt, if there is one.
    """
    messages = messages_of(prompt)
    continues = bool(messages) and messages[-1]["role"] == "assistant"
    return len(messages) - continues


def append_turns(
    prompt: Messages | Conversation, reply: Messages, location: str
) -> Messages | Conversation:
    """Append the turns of a reply to a prompt in the normal form, and share the prompt's messages.

    Raises:
        ServingError: a turn is not valid; the message begins with ``location``.
    """
    messages = messages_of(prompt)
    turns_of_reply = merge_assistant_turns(reply)
    # The first turn of the reply continues the prompt's last turn if both are the assistant's.
    continues = bool(messages) and messages[-1]["role"] == turns_of_reply[0]["role"] == "assistant"
    with locate_errors(location):
        turns = read_messages(turns_of_reply, len(messages) - continues)
    # Both are in the normal form, so merging keeps them in it.
    ending = merge_assistant_turns([*messages[-1:], *turns])
    return with_messages(prompt, [*messages[:-1], *ending])
