"""Texts and conversations: what is scored, what of it is the reply, and the one normal form.

Messages are those of OpenAI's chat API and of Hugging Face transformers. Whoever takes them from
outside calls ``read_text``, which gives every writing of the same conversation one form:

- a key whose value is null, and an empty ``tool_calls`` or ``annotations``, is left out;
- ``content`` is always there: a text, parts of type ``text``, or null, beside tool calls or
  reasoning alone;
- ``arguments`` of a call are an object, also where they came as its JSON text;
- ``reasoning`` and ``thinking`` are called ``reasoning_content``;
- empty ``tools`` and ``documents`` are none, and tools may come as JSON text.

What a chat template can write of it is decided elsewhere (``template_check.py``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from nemo_aligner.config.describe import suggestion
from nemo_aligner.utils.errors import DataError, shown

# Roles that any template may be tried with; few templates write developer and function.
ROLES = ("system", "user", "assistant", "tool")
ALL_ROLES = (*ROLES, "developer", "function")
REASONING = ("reasoning_content", "reasoning", "thinking")

Message: TypeAlias = dict[str, Any]
Messages: TypeAlias = list[Message]


@dataclass(frozen=True)
class Conversation:
    """Messages, and what was given beside them: tools, and documents to answer from.

    Without any of the two, a bare list of messages is the same.
    """

    messages: Messages
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None


# A str is raw text, scored as it stands; a conversation goes through the contract's chat template.
Text: TypeAlias = str | Messages | Conversation

_PLAIN = {"role", "content"}
_TEXT_PARTS = ("text", "input_text", "output_text")
_CALL_KEYS = {"id", "type", "function"}
_FUNCTION_KEYS = {"name", "arguments"}
_BESIDE = ("tools", "documents")
_WITH_STRUCTS = ("tools", "tool_calls")
_SHOWN = 60
_DEEPEST = 64
# Python reads and writes integers of up to 4,300 digits (``sys.set_int_max_str_digits``).
_TOO_LARGE = 10**4300


def messages_of(text: Text) -> Messages:
    """The messages of a conversation; none for raw text."""
    if isinstance(text, str):
        return []
    return text.messages if isinstance(text, Conversation) else text


def without_struct_nulls(value: Any, is_inside: bool = False) -> Any:
    """A row of Arrow without the nulls that it puts below ``tools`` and ``tool_calls``.

    Its structs have every key in every row: an argument that only another call has would be null in
    this one. Elsewhere null is a value, as that of a missing label.
    """
    if isinstance(value, list):
        return [without_struct_nulls(each, is_inside) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: without_struct_nulls(each, is_inside or key in _WITH_STRUCTS)
        for key, each in value.items()
        if each is not None or not is_inside
    }


def with_messages(text: Messages | Conversation, messages: Messages) -> Messages | Conversation:
    """Replace the messages, and keep tools and documents."""
    return replace(text, messages=messages) if isinstance(text, Conversation) else messages


def prompt_of(text: Text) -> Messages:
    """Everything before the last turn of a conversation; nothing for raw text."""
    return messages_of(text)[:-1]


def question_of(text: Text) -> Messages:
    """``prompt_of`` without the calls of tools, and their results, after the last user's turn."""
    prompt = prompt_of(text)
    asked = next((n for n in range(len(prompt), 0, -1) if prompt[n - 1]["role"] == "user"), 0)
    after = prompt[asked:]
    uses_tools = any(turn["role"] == "tool" or "tool_calls" in turn for turn in after)
    return prompt[:asked] if uses_tools and asked else prompt


def reply_of(text: Text) -> str:
    """The reply that is judged: the last turn of a conversation, as ``said``; all of a raw text."""
    return text if isinstance(text, str) else said(messages_of(text)[-1])


def first_prompt(text: Text) -> str:
    """The first user turn of a conversation; empty for raw text."""
    return next((said(turn) for turn in messages_of(text) if turn["role"] == "user"), "")


def said(message: Message) -> str:
    """Everything that a message says, for people and for its length.

    Reasoning, content and every call of a tool, as JSON, on lines of their own.
    """
    if message.keys() == _PLAIN and isinstance(message["content"], str):
        return message["content"]
    calls = [call.get("function", call) for call in message.get("tool_calls", ())]
    parts = [
        message.get(REASONING[0]) or "",
        joined_content(message["content"]),
        *(json.dumps(call, ensure_ascii=False) for call in calls),
    ]
    return "\n".join(part for part in parts if part)


def joined_content(content: Any) -> str:
    """Content as one text: parts are joined by a newline, as vLLM joins them; null is empty."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""


def as_json(text: Messages | Conversation) -> Any:
    """A conversation as JSON has it: a list of messages, or an object with them and the rest."""
    if not isinstance(text, Conversation):
        return text
    beside = {name: getattr(text, name) for name in _BESIDE}
    return {"messages": text.messages, **{name: each for name, each in beside.items() if each}}


def with_tools(text: Text, tools: Any, documents: Any = None) -> Text:
    """A text with the tools and documents that it was asked with, in the normal form.

    Raises:
        DataError: they are no lists of objects, or come beside a raw text.
    """
    found = {
        name: _read_objects(value, name)
        for name, value in (("tools", tools), ("documents", documents))
    }
    if not any(found.values()):
        return text
    if isinstance(text, str):
        name = next(name for name in found if found[name])
        raise DataError(f"{name}: got some beside a raw text, wanted a conversation")
    return Conversation(messages_of(text), **found)


def read_text(given: Any) -> Text:
    """The normal form of a raw text, or of a conversation that ends with the assistant's reply.

    A conversation is a list of messages, a ``Conversation``, or the JSON object of one, with
    ``messages``, ``tools`` and ``documents``.

    Raises:
        DataError: it says what was got and what was wanted, but not where; the caller knows that.
    """
    if isinstance(given, str):
        _check_unicode(given)
        return given
    if isinstance(given, list):
        return _with_reply(read_messages(given))
    if isinstance(given, Conversation):
        given = as_json(given) if given.tools or given.documents else {"messages": given.messages}
    if not isinstance(given, Mapping) or "messages" not in given:
        raise DataError(f"got {_shown(given)}, wanted a text or a list of messages")
    unknown = [key for key in given if key != "messages" and key not in _BESIDE]
    if unknown:
        raise DataError(
            f"got the key {unknown[0]!r:.60}, wanted messages, {' and '.join(_BESIDE)} alone"
        )
    if not isinstance(given["messages"], list):
        raise DataError(f"messages: got {_shown(given['messages'])}, wanted a list of messages")
    messages = _with_reply(read_messages(given["messages"]))
    return with_tools(messages, given.get("tools"), given.get("documents"))


def check_texts(texts: Iterable[Any]) -> list[Any]:
    """A list of texts, in any form that ``read_text`` takes; their contents are not looked at.

    Raises:
        TypeError: it is one text, a string or a conversation, and no list of them.
    """
    wanted = "wanted a list of texts"
    if isinstance(texts, str | Mapping | Conversation):
        raise TypeError(f"texts: got one text ({shown(texts)}), {wanted}")
    rows = list(texts)
    if rows and isinstance(rows[0], Mapping) and "role" in rows[0] and "messages" not in rows[0]:
        raise TypeError(f"texts: got the messages of one text ({shown(rows[0])}), {wanted}")
    return rows


def read_messages(given: Sequence[Any]) -> Messages:
    """The normal form of messages, whoever speaks last; a list that has it is given back.

    Raises:
        DataError: see ``read_text``.
    """
    if all(map(_is_plain, given)):
        return given if isinstance(given, list) else [*given]
    return [
        message if _is_plain(message) else _read_message(message, f"messages[{number}]")
        for number, message in enumerate(given)
    ]


def is_plain(messages: Messages) -> bool:
    """True if every message has a role of ``ROLES`` and a text, and nothing more."""
    return all(
        message.keys() == _PLAIN
        and isinstance(message["content"], str)
        and message["role"] in ROLES
        for message in messages
    )


def strings_of(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield every string of a JSON value, keys included, and where it stands."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield f"{where}, the key {key!r:.40}", key
            yield from strings_of(each, f"{where}.{key:.40}" if where else key)
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from strings_of(each, f"{where}[{number}]")


def _is_plain(message: Any) -> bool:
    """True for a message in the normal form with nothing but role and content: the quick path."""
    if not isinstance(message, dict) or message.keys() != _PLAIN:
        return False
    role, content = message["role"], message["content"]
    if not isinstance(content, str) or not isinstance(role, str) or role not in ALL_ROLES:
        return False
    return content.isascii() or _is_unicode(content)


def _with_reply(messages: Messages) -> Messages:
    if not messages:
        raise DataError("got an empty conversation, wanted at least the reply that is scored")
    if messages[-1]["role"] != "assistant":
        raise DataError(
            f"the last message is the reply that is scored: got role {messages[-1]['role']!r}, "
            "wanted 'assistant'"
        )
    return messages


def _read_message(given: Any, where: str) -> Message:
    if not isinstance(given, Mapping) or not isinstance(given.get("role"), str):
        raise DataError(f"{where}: got {_shown(given)}, wanted an object with role and content")
    role = given["role"]
    if role not in ALL_ROLES:
        raise DataError(
            f"{where}: got role {role!r:.{_SHOWN}}, wanted one of {', '.join(ALL_ROLES)}"
        )
    message: Message = {"role": role, "content": _read_content(given.get("content"), where)}
    rest = {key: value for key, value in given.items() if key not in _PLAIN and value is not None}
    for key, value in rest.items():
        if key == "annotations" and value == []:
            continue
        if key == "tool_calls":
            calls = _read_calls(value, f"{where}.tool_calls", role)
            message |= {"tool_calls": calls} if calls else {}
        elif key in REASONING:
            _add_reasoning(message, key, value, where)
        else:
            message[key] = _read_other(key, value, where)
    if message["content"] is None and not ("tool_calls" in message or REASONING[0] in message):
        raise DataError(_no_content(given, where))
    return message


def _no_content(given: Mapping[Any, Any], where: str) -> str:
    if "content" in given:
        return f"{where}.content: got null, wanted a text, as there are no tool calls"
    near = suggestion("content", [key for key in given if isinstance(key, str) and key != "role"])
    meant = f"; did you mean 'content' for {near!r:.60}?" if near else ""
    return f"{where}: got {_shown(given)}, wanted content, as there are no tool calls{meant}"


def _read_content(content: Any, where: str) -> Any:
    if content is None:
        return None
    if isinstance(content, str):
        _check_unicode(content, f"{where}.content: ")
        return content
    if not isinstance(content, list):
        raise DataError(f"{where}.content: got {_shown(content)}, wanted text, or parts of text")
    parts = []
    for number, part in enumerate(content):
        place = f"{where}.content[{number}]"
        if not isinstance(part, Mapping) or part.get("type", "text") not in _TEXT_PARTS:
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise DataError(f"{place}: got a part of type {_shown(kind)}, wanted text alone")
        if not isinstance(part.get("text"), str):
            raise DataError(f"{place}: got {_shown(part)}, wanted a part with text")
        _check_unicode(part["text"], f"{place}: ")
        parts.append({"type": "text", "text": part["text"]})
    return parts


def _add_reasoning(message: Message, key: str, value: Any, where: str) -> None:
    if not isinstance(value, str):
        raise DataError(f"{where}.{key}: got {_shown(value)}, wanted a text")
    _check_unicode(value, f"{where}.{key}: ")
    if message["role"] != "assistant":
        raise DataError(f"{where}.{key}: got it of role {message['role']!r}, wanted 'assistant'")
    if message.setdefault(REASONING[0], value) != value:
        raise DataError(f"{where}: got two different reasonings, wanted one of {REASONING}")


def _read_other(key: Any, value: Any, where: str) -> Any:
    if not isinstance(key, str):
        raise DataError(f"{where}: got the key {key!r:.60}, wanted a text")
    if key in ("name", "tool_call_id") and not isinstance(value, str):
        raise DataError(f"{where}.{key}: got {_shown(value)}, wanted a text")
    _check_json(value, f"{where}.{key}")
    return value


def _read_calls(given: Any, where: str, role: str) -> list[dict[str, Any]]:
    if not isinstance(given, list):
        raise DataError(f"{where}: got {_shown(given)}, wanted a list of calls")
    if given and role != "assistant":
        raise DataError(f"{where}: got them of role {role!r}, wanted 'assistant'")
    return [_read_call(call, f"{where}[{number}]") for number, call in enumerate(given)]


def _read_call(given: Any, where: str) -> dict[str, Any]:
    """A call, or a bare function of one, as the templates of transformers take both."""
    if not isinstance(given, Mapping):
        raise DataError(f"{where}: got {_shown(given)}, wanted an object with function")
    call = {key: value for key, value in given.items() if value is not None}
    if "function" not in call:
        return _read_function(call, where, {*_FUNCTION_KEYS, "id", "type"})
    _check_keys(call, _CALL_KEYS, where)
    if call.get("type", "function") != "function":
        raise DataError(f"{where}.type: got {_shown(call['type'])}, wanted 'function'")
    if not isinstance(call.get("id", ""), str):
        raise DataError(f"{where}.id: got {_shown(call['id'])}, wanted a text")
    _check_unicode(call.get("id", ""), f"{where}.id: ")
    place = f"{where}.function"
    return {**call, "function": _read_function(call["function"], place, _FUNCTION_KEYS)}


def _read_function(given: Any, where: str, known: set[str]) -> dict[str, Any]:
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise DataError(f"{where}: got {_shown(given)}, wanted an object with name and arguments")
    _check_keys(given, known, where)
    arguments = _read_arguments(given.get("arguments"), f"{where}.arguments")
    function = {**given, "arguments": arguments}
    _check_json(function, where)
    return function


def _read_arguments(given: Any, where: str) -> dict[str, Any]:
    """vLLM parses them before it renders, too, and takes an empty text for none."""
    found = _parsed(given, where, "a JSON object")
    if found is None or found == "" or (isinstance(found, str) and not found.strip()):
        return {}
    if not isinstance(found, Mapping):
        raise DataError(f"{where}: got {_shown(given)}, wanted a JSON object")
    return dict(found)


def _read_objects(given: Any, name: str) -> list[dict[str, Any]] | None:
    """Tools or documents: a list of objects, or its JSON text."""
    found = _parsed(given, name, "a JSON list")
    if not found:
        return None
    if not isinstance(found, list):
        raise DataError(f"{name}: got {_shown(given)}, wanted a list of objects")
    for number, each in enumerate(found):
        if not isinstance(each, dict):
            raise DataError(f"{name}[{number}]: got {_shown(each)}, wanted an object")
        _check_json(each, f"{name}[{number}]")
    return found


def _parsed(given: Any, where: str, wanted: str) -> Any:
    """The value of a JSON text; anything else, and a blank text, as it is."""
    if not isinstance(given, str) or not given.strip():
        return given
    try:
        return json.loads(given)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: got {_shown(given)}, wanted {wanted}") from error


def _check_keys(given: Mapping[str, Any], known: set[str], where: str) -> None:
    unknown = [key for key in given if key not in known]
    if unknown:
        raise DataError(
            f"{where}: got the key {unknown[0]!r:.60}, wanted {', '.join(sorted(known))} alone"
        )


def _check_json(value: Any, where: str, depth: int = 0) -> None:
    """Refuse what JSON cannot hold, at any depth."""
    if depth > _DEEPEST:
        raise DataError(f"{where}: got objects nested more than {_DEEPEST} deep")
    if isinstance(value, str):
        _check_unicode(value, f"{where}: ")
    elif isinstance(value, Mapping):
        for key, each in value.items():
            if not isinstance(key, str):
                raise DataError(f"{where}: got the key {key!r:.60}, wanted a text")
            _check_unicode(key, f"{where}: ")
            _check_json(each, f"{where}.{key:.40}", depth + 1)
    elif isinstance(value, list):
        for number, each in enumerate(value):
            _check_json(each, f"{where}[{number}]", depth + 1)
    elif not _is_json_number(value) and value is not None:
        raise DataError(f"{where}: got {_shown(value)}, wanted a JSON value")


def _is_json_number(value: object) -> bool:
    """True for a number, or a bool, that JSON can hold and Python can write."""
    if isinstance(value, int):
        return abs(value) < _TOO_LARGE  # math.isfinite fails on integers that no float holds
    return isinstance(value, float) and math.isfinite(value)


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _check_unicode(text: str, where: str = "") -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}got half of a surrogate pair at character {error.start + 1}, "
            "wanted valid Unicode"
        ) from error


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        keys = ", ".join(map(repr, value)) or "none"
        return f"an object with keys {keys if len(keys) <= 200 else keys[:197] + '...'}"
    if value is None:
        return "null"
    text = shown(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
