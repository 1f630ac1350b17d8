"""Check that a rendered conversation has every text of the conversation.

``TemplateReading`` finds by trials which keys a template reads at all. Some templates read a key
but drop its text in certain places or with a certain content: Mistral's drop the system prompt
unless the last message is the user's, Llama 3.1's drop the text next to a tool call, and
DeepSeek-R1's drop everything before ``</think>``. The reward would then be that of another
conversation, so such a conversation is rejected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from nemo_aligner.contract.messages import (
    REASONING,
    Conversation,
    Message,
    Messages,
    messages_of,
    walk_strings,
)
from nemo_aligner.utils.errors import DataError, shown

_MAX_SHOWN = 60
_END_OF_THOUGHTS = "</think>"
_DOCUMENT_TEXTS = ("text", "content", "contents")
# Templates write the thoughts of a reply in their own tags, and may move them.
_THOUGHT_TAG = re.compile("</?think>")


def check_rendered(conversation: Messages | Conversation, rendered: str) -> None:
    """Check that every text of a conversation in the normal form is in ``rendered``.

    Texts are the contents, the reasoning of the last message, the names and arguments of tool
    calls, the names of tools, and the text of each document. Whitespace may differ, and
    arguments may be written as JSON or as Python. Reasoning of earlier messages may be missing, as
    in the templates of most reasoning models, and so may names of speakers and ids of calls.

    Raises:
        DataError: a text is missing; the message names its place.
    """
    squeezed = ""
    for location, text in _texts_of(conversation):
        if text.strip() in rendered:
            continue
        squeezed = squeezed or _squeeze(rendered)
        if not _is_in(squeezed, text):
            raise DataError(
                f"{location}: the chat template does not render it in this conversation, so the "
                f"model would never see {shown(text[:_MAX_SHOWN])}. Remove it, or train with a "
                "template that renders it, as every built-in one does (model.data.template=chatml)"
            )


def _texts_of(conversation: Messages | Conversation) -> Iterator[tuple[str, str]]:
    """Yield the location and the text of everything that a template has to render."""
    messages = messages_of(conversation)
    for number, message in enumerate(messages):
        location = f"messages[{number}]"
        is_last = number == len(messages) - 1
        if is_last:
            for key in REASONING:
                yield from walk_strings(message.get(key), f"{location}.{key}")
        yield from _contents_of(message, f"{location}.content", is_last)
        for index, call in enumerate(message.get("tool_calls", ())):
            call_location, function = f"{location}.tool_calls[{index}]", call.get("function", call)
            yield f"{call_location}, its name", function["name"]
            yield from walk_strings(function["arguments"], f"{call_location}, its arguments")
    tools = conversation.tools if isinstance(conversation, Conversation) else None
    for number, tool in enumerate(tools or ()):
        function = tool.get("function", tool)
        name = function.get("name") if isinstance(function, Mapping) else None
        yield from walk_strings(name, f"tools[{number}], its name")
    documents = conversation.documents if isinstance(conversation, Conversation) else None
    for number, document in enumerate(documents or ()):
        yield f"documents[{number}]", _text_of(document)


def _text_of(document: Mapping[str, Any]) -> str:
    """Return the text of a document: the longest of its usual fields, else its longest string.

    Templates leave out ids, addresses and the like.
    """
    fields = [document.get(key) for key in _DOCUMENT_TEXTS]
    texts = [field for field in fields if isinstance(field, str) and field.strip()]
    strings = texts or [text for _, text in walk_strings([*document.values()])]
    return max(strings, key=len, default="")


def _contents_of(message: Message, location: str, is_last: bool) -> Iterator[tuple[str, str]]:
    content: Any = message.get("content")
    texts = [part["text"] for part in content] if isinstance(content, list) else [content or ""]
    if not is_last and message["role"] == "assistant":
        texts = [text.rpartition(_END_OF_THOUGHTS)[2] for text in texts]
    for text in texts:
        yield location, text


def _is_in(squeezed: str, text: str) -> bool:
    """Return whether ``squeezed``, a rendering without whitespace, has a text in any of its forms.

    The forms are the text itself, its escaped forms in JSON and Python, and its parts between
    ``<think>`` tags.
    """
    as_json = [json.dumps(text, ensure_ascii=is_ascii)[1:-1] for is_ascii in (True, False)]
    # Arguments that were encoded as a JSON string, which the template encodes as JSON again.
    twice = json.dumps(as_json[1], ensure_ascii=False)[1:-1]
    if any(_squeeze(form) in squeezed for form in (text, *as_json, twice, repr(text)[1:-1])):
        return True
    pieces = _THOUGHT_TAG.split(text)
    return len(pieces) > 1 and all(_squeeze(piece) in squeezed for piece in pieces)


def _squeeze(text: str) -> str:
    """Remove all whitespace."""
    return "".join(text.split())
