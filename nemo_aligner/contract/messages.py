"""Samples: raw texts and conversations, their normal form, and which part of a sample is the reply.

Messages have the form of OpenAI's chat API and of Hugging Face transformers. Code that takes a
sample from outside calls ``read_text``, which maps every spelling of the same conversation to one
normal form:

- keys whose value is null are dropped, and so are an empty ``tool_calls`` or ``annotations``;
- ``content`` is always present: a string, a list of parts of type ``text``, or null if the message
  has tool calls or reasoning instead;
- ``arguments`` of a tool call are an object, even where they arrive as a JSON string;
- ``reasoning`` and ``thinking`` are renamed to ``reasoning_content``;
- empty ``tools`` and ``documents`` are dropped, and ``tools`` may arrive as a JSON string.

Whether a chat template can render all of a conversation is checked in ``template_check.py``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from nemo_aligner.config.describe import suggestion
from nemo_aligner.utils.errors import DataError, shown

# Roles of the trial conversations by which a template is checked. ``developer`` and ``function``
# are not tried, because few templates render them.
ROLES = ("system", "user", "assistant", "tool")
ALL_ROLES = (*ROLES, "developer", "function")
REASONING = ("reasoning_content", "reasoning", "thinking")

Message: TypeAlias = dict[str, Any]
Messages: TypeAlias = list[Message]


@dataclass(frozen=True)
class Conversation:
    """Messages together with the tools and documents that the model was given.

    A conversation with messages only is the same as its bare list of messages.

    Attributes:
        principle: the principle by which the reply is rewarded, such as "correctness"; None if
            there is none. ``principles.py`` explains how it becomes a part of the sample.
    """

    messages: Messages
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    principle: str | None = None


Text: TypeAlias = str | Messages | Conversation
"""A sample to score. A str is raw text and is scored verbatim; a conversation is rendered by the
contract's chat template."""

_PLAIN = {"role", "content"}
_TEXT_PARTS = ("text", "input_text", "output_text")
_CALL_KEYS = {"id", "type", "function"}
_FUNCTION_KEYS = {"name", "arguments"}
_CONTEXT_KEYS = ("tools", "documents")
_KEYS_NEXT_TO_MESSAGES = (*_CONTEXT_KEYS, "principle")
_STRUCT_KEYS = (*_CONTEXT_KEYS, "tool_calls")
_MAX_SHOWN = 60
_MAX_DEPTH = 64
# Python parses and prints integers of up to 4,300 digits (``sys.set_int_max_str_digits``).
_TOO_LARGE = 10**4300


def messages_of(text: Text) -> Messages:
    """Return the messages of a sample; an empty list for raw text."""
    if isinstance(text, str):
        return []
    return text.messages if isinstance(text, Conversation) else text


def without_struct_nulls(value: Any, is_inside: bool = False) -> Any:
    """Remove the nulls that Arrow inserts below ``tools``, ``tool_calls`` and ``documents``.

    All structs of an Arrow column have the same keys, so an argument of one call is null in all
    other calls. Outside these keys null is a real value, such as a missing label.

    Args:
        is_inside: True if ``value`` is the content of one of these keys.
    """
    if isinstance(value, list):
        return [without_struct_nulls(item, is_inside) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: without_struct_nulls(item, is_inside or key in _STRUCT_KEYS)
        for key, item in value.items()
        if item is not None or not is_inside
    }


def with_messages(text: Messages | Conversation, messages: Messages) -> Messages | Conversation:
    """Replace the messages of a conversation ``text``; keep its tools and documents."""
    return replace(text, messages=messages) if isinstance(text, Conversation) else messages


def prompt_of(text: Text) -> Messages:
    """Return all messages before the last one; an empty list for raw text."""
    return messages_of(text)[:-1]


def question_of(text: Text) -> Messages:
    """Return the prompt without the tool calls and tool results after the last user turn.

    If no tool is used after that turn, the result is the same as that of ``prompt_of``.
    """
    prompt = prompt_of(text)
    question_length = next(
        (number for number in range(len(prompt), 0, -1) if prompt[number - 1]["role"] == "user"), 0
    )
    after_question = prompt[question_length:]
    uses_tools = any(turn["role"] == "tool" or "tool_calls" in turn for turn in after_question)
    return prompt[:question_length] if uses_tools and question_length else prompt


def reply_of(text: Text) -> str:
    """Return the reply that is scored: the last message as one string, or the whole raw text."""
    return text if isinstance(text, str) else flatten_message(messages_of(text)[-1])


def first_prompt(text: Text) -> str:
    """Return the first user turn of a conversation; empty for raw text."""
    return next((flatten_message(turn) for turn in messages_of(text) if turn["role"] == "user"), "")


def flatten_message(message: Message) -> str:
    """Flatten a message to one string, to display it or to measure its length.

    Reasoning, content and each tool call (as JSON) are joined by newlines.
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
    """Join the text parts of a message's content by newlines, as vLLM does; null becomes ""."""
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""


def as_json(text: Messages | Conversation) -> Any:
    """Return a conversation as JSON values.

    The result is a list of messages. If there are tools, documents or a principle, it is an object
    with ``messages``, and with those of ``tools``, ``documents`` and ``principle`` that exist.
    """
    if not isinstance(text, Conversation):
        return text
    context = {name: getattr(text, name) for name in _KEYS_NEXT_TO_MESSAGES}
    return {
        "messages": text.messages,
        **{name: value for name, value in context.items() if value},
    }


def with_tools(text: Text, tools: Any, documents: Any = None) -> Text:
    """Attach tools and documents to a sample, in the normal form; null or an empty list adds none.

    Raises:
        DataError: they are not lists of objects, or the sample has others or is raw text.
    """
    fields = {"tools": tools, "documents": documents}
    read = {name: _read_objects(value, name) for name, value in fields.items()}
    context: dict[str, Any] = {name: objects for name, objects in read.items() if objects}
    if not context:
        return text
    if isinstance(text, str):
        name = next(iter(context))
        raise DataError(
            f"{name}: got {name} with a raw text, which no chat template renders; "
            "wanted a conversation"
        )
    conversation = text if isinstance(text, Conversation) else Conversation(text)
    for name, objects in context.items():
        if getattr(conversation, name) not in (None, objects):
            raise DataError(f"{name}: got {name} for a sample with others. Keep one of the two")
    return replace(conversation, **context)


def principle_of(text: Text) -> str | None:
    """Return the principle of a sample; None if it has none."""
    return text.principle if isinstance(text, Conversation) else None


def read_principle(value: Any) -> str | None:
    """Validate a principle, and return its normal form: None for null or a blank string.

    Raises:
        DataError: the principle is not a string.
    """
    if value is None:
        return None
    if not isinstance(value, str):
        raise DataError(f"principle: got {_show_value(value)}, wanted a string")
    _check_unicode(value, "principle: ")
    return value if value.strip() else None


def with_principle(text: Text, principle: Any) -> Text:
    """Attach a principle to a sample in the normal form; null or a blank string attaches none.

    Raises:
        DataError: the principle is not a string, the sample has another one, or it is raw text.
    """
    return attach_principle(text, read_principle(principle))


def attach_principle(text: Text, principle: str | None) -> Text:
    """Attach a principle that is in the normal form, like ``with_principle``."""
    if principle is None:
        return text
    if isinstance(text, str):
        raise DataError(
            "principle: got a principle with a raw text, which is scored verbatim; wanted a "
            "conversation"
        )
    if principle_of(text) not in (None, principle):
        raise DataError(
            f"principle: got {_show_value(principle)} for a sample with the principle "
            f"{_show_value(principle_of(text))}. Keep one of the two"
        )
    conversation = text if isinstance(text, Conversation) else Conversation(text)
    return replace(conversation, principle=principle)


def with_context(text: Text, value: Mapping[Any, Any]) -> Text:
    """Attach to a sample what an object with ``messages`` has next to them.

    Raises:
        DataError: the object has an unknown key, or one of its fields cannot be attached.
    """
    known_keys = ("messages", *_KEYS_NEXT_TO_MESSAGES)
    for key, field in value.items():
        # In a column of Arrow, all objects have the same keys, and null where they have none.
        if key not in known_keys and field is not None:
            raise DataError(f"got the key {key!r:.60}, wanted {', '.join(known_keys)} only")
    text = with_tools(text, value.get("tools"), value.get("documents"))
    return with_principle(text, value.get("principle"))


def read_text(value: Any) -> Text:
    """Validate a sample from outside, and return it in the normal form.

    Args:
        value: a raw text, or a conversation that ends with the assistant's reply: a list of
            messages, a ``Conversation``, or a JSON object with ``messages`` and optionally
            ``tools``, ``documents`` and ``principle``.

    Raises:
        DataError: the message names the key and the value. The caller adds the file and line.
    """
    if isinstance(value, str):
        _check_unicode(value)
        return value
    if isinstance(value, list):
        return _check_reply(read_messages(value))
    if isinstance(value, Conversation):
        value = {name: getattr(value, name) for name in ("messages", *_KEYS_NEXT_TO_MESSAGES)}
    if not isinstance(value, Mapping) or "messages" not in value:
        raise DataError(
            f"got {_show_value(value)}, wanted a sample: a string, or a list of messages with role "
            "and content"
        )
    if not isinstance(value["messages"], list):
        raise DataError(
            f"messages: got {_show_value(value['messages'])}, wanted a list of messages"
        )
    return with_context(_check_reply(read_messages(value["messages"])), value)


def check_texts(texts: Iterable[Any]) -> list[Any]:
    """Return the samples as a list, without checking each sample.

    Raises:
        TypeError: the argument is one sample (a string or a conversation) instead of a list.
    """
    expected = "wanted a list of texts"
    if isinstance(texts, str | Mapping | Conversation):
        raise TypeError(f"texts: got one text ({shown(texts)}), {expected}")
    samples = list(texts)
    if (
        samples
        and isinstance(samples[0], Mapping)
        and "role" in samples[0]
        and "messages" not in samples[0]
    ):
        raise TypeError(f"texts: got the messages of one text ({shown(samples[0])}), {expected}")
    return samples


def read_messages(values: Sequence[Any], first: int = 0) -> Messages:
    """Validate messages, and return them in the normal form; the last one may have any role.

    A list that is in the normal form already is returned itself, not a copy. ``first`` is the
    number of the first message in its conversation, for error messages.

    Raises:
        DataError: a message is not valid; the error names its key and the value.
    """
    if all(map(_is_plain_message, values)):
        return values if isinstance(values, list) else [*values]
    return [
        message if _is_plain_message(message) else _read_message(message, f"messages[{number}]")
        for number, message in enumerate(values, first)
    ]


def is_plain(messages: Messages) -> bool:
    """Return whether every message has only a role, one of ``ROLES``, and a string as content."""
    return all(
        message.keys() == _PLAIN
        and isinstance(message["content"], str)
        and message["role"] in ROLES
        for message in messages
    )


def walk_strings(value: Any, location: str = "") -> Iterator[tuple[str, str]]:
    """Yield ``(location, string)`` for every string in a JSON value, the keys included."""
    if isinstance(value, str):
        yield location, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield f"{location}, the key {key!r:.40}", key
            yield from walk_strings(item, f"{location}.{key:.40}" if location else key)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from walk_strings(item, f"{location}[{number}]")


def _is_plain_message(message: Any) -> bool:
    """Fast path: return whether a message has only role and content, and is in the normal form."""
    if not isinstance(message, dict) or message.keys() != _PLAIN:
        return False
    role, content = message["role"], message["content"]
    if not isinstance(content, str) or not isinstance(role, str) or role not in ALL_ROLES:
        return False
    return content.isascii() or _is_unicode(content)


def _check_reply(messages: Messages) -> Messages:
    if not messages:
        raise DataError("got an empty conversation, wanted at least the reply that is scored")
    if messages[-1]["role"] != "assistant":
        raise DataError(
            f"the last message is the reply that is scored: got role {messages[-1]['role']!r}, "
            "wanted 'assistant'"
        )
    return messages


def _read_message(value: Any, location: str) -> Message:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise DataError(
            f"{location}: got {_show_value(value)}, wanted an object with role and content"
        )
    role = value["role"]
    if role not in ALL_ROLES:
        raise DataError(
            f"{location}: got role {role!r:.{_MAX_SHOWN}}, wanted one of {', '.join(ALL_ROLES)}"
        )
    message: Message = {"role": role, "content": _read_content(value.get("content"), location)}
    extra_fields = {
        key: field for key, field in value.items() if key not in _PLAIN and field is not None
    }
    for key, field in extra_fields.items():
        if key == "annotations" and field == []:
            continue
        if key == "tool_calls":
            calls = _read_calls(field, f"{location}.tool_calls", role)
            message |= {"tool_calls": calls} if calls else {}
        elif key in REASONING:
            _add_reasoning(message, key, field, location)
        else:
            message[key] = _read_other_key(key, field, location)
    if message["content"] is None and not ("tool_calls" in message or REASONING[0] in message):
        raise DataError(_describe_missing_content(value, location))
    return message


def _describe_missing_content(value: Mapping[Any, Any], location: str) -> str:
    if "content" in value:
        return f"{location}.content: got null, wanted a string, as there are no tool calls"
    near = suggestion("content", [key for key in value if isinstance(key, str) and key != "role"])
    hint = f"; did you mean 'content' for {near!r:.60}?" if near else ""
    return f"{location}: got {_show_value(value)}, wanted content, as there are no tool calls{hint}"


def _read_content(content: Any, location: str) -> Any:
    if content is None:
        return None
    if isinstance(content, str):
        _check_unicode(content, f"{location}.content: ")
        return content
    if not isinstance(content, list):
        raise DataError(
            f"{location}.content: got {_show_value(content)}, wanted text, or parts of text"
        )
    parts = []
    for number, part in enumerate(content):
        part_location = f"{location}.content[{number}]"
        if not isinstance(part, Mapping) or part.get("type", "text") not in _TEXT_PARTS:
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise DataError(
                f"{part_location}: got a part of type {_show_value(kind)}, wanted only text parts"
            )
        if not isinstance(part.get("text"), str):
            raise DataError(f"{part_location}: got {_show_value(part)}, wanted a part with text")
        _check_unicode(part["text"], f"{part_location}: ")
        parts.append({"type": "text", "text": part["text"]})
    return parts


def _add_reasoning(message: Message, key: str, value: Any, location: str) -> None:
    if not isinstance(value, str):
        raise DataError(f"{location}.{key}: got {_show_value(value)}, wanted a string")
    _check_unicode(value, f"{location}.{key}: ")
    if message["role"] != "assistant":
        raise DataError(
            f"{location}.{key}: got this key in a message of role {message['role']!r}, "
            "wanted it only in messages of role 'assistant'"
        )
    if message.setdefault(REASONING[0], value) != value:
        raise DataError(
            f"{location}: got two different reasoning texts, wanted only one of the keys "
            f"{', '.join(REASONING)}"
        )


def _read_other_key(key: Any, value: Any, location: str) -> Any:
    if not isinstance(key, str):
        raise DataError(f"{location}: got the key {key!r:.60}, wanted a string")
    if key in ("name", "tool_call_id") and not isinstance(value, str):
        raise DataError(f"{location}.{key}: got {_show_value(value)}, wanted a string")
    _check_json(value, f"{location}.{key}")
    return value


def _read_calls(values: Any, location: str, role: str) -> list[dict[str, Any]]:
    if not isinstance(values, list):
        raise DataError(f"{location}: got {_show_value(values)}, wanted a list of calls")
    if values and role != "assistant":
        raise DataError(
            f"{location}: got tool calls in a message of role {role!r}, "
            "wanted them only in messages of role 'assistant'"
        )
    return [_read_call(call, f"{location}[{number}]") for number, call in enumerate(values)]


def _read_call(value: Any, location: str) -> dict[str, Any]:
    """Read a tool call: an object with the key ``function``, or that function object alone.

    Chat templates in transformers accept both forms.
    """
    if not isinstance(value, Mapping):
        raise DataError(
            f"{location}: got {_show_value(value)}, wanted an object with the key 'function'"
        )
    call = {key: field for key, field in value.items() if field is not None}
    if "function" not in call:
        return _read_function(call, location, {*_FUNCTION_KEYS, "id", "type"})
    _check_keys(call, _CALL_KEYS, location)
    if call.get("type", "function") != "function":
        raise DataError(f"{location}.type: got {_show_value(call['type'])}, wanted 'function'")
    if not isinstance(call.get("id", ""), str):
        raise DataError(f"{location}.id: got {_show_value(call['id'])}, wanted a string")
    _check_unicode(call.get("id", ""), f"{location}.id: ")
    function_location = f"{location}.function"
    return {**call, "function": _read_function(call["function"], function_location, _FUNCTION_KEYS)}


def _read_function(value: Any, location: str, allowed_keys: set[str]) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
        raise DataError(
            f"{location}: got {_show_value(value)}, wanted an object with name and arguments"
        )
    _check_keys(value, allowed_keys, location)
    arguments = _read_arguments(value.get("arguments"), f"{location}.arguments")
    function = {**value, "arguments": arguments}
    _check_json(function, location)
    return function


def _read_arguments(value: Any, location: str) -> dict[str, Any]:
    """Parse the arguments of a call; an empty or blank string means no arguments.

    vLLM also parses them before it renders the template.
    """
    arguments = _parse_json(value, location, "a JSON object")
    is_blank = isinstance(arguments, str) and not arguments.strip()
    if arguments is None or is_blank:
        return {}
    if not isinstance(arguments, Mapping):
        raise DataError(f"{location}: got {_show_value(value)}, wanted a JSON object")
    return dict(arguments)


def _read_objects(value: Any, name: str) -> list[dict[str, Any]] | None:
    """Read tools or documents: a list of objects, or its JSON string; None if there are none."""
    objects = _parse_json(value, name, "a JSON list")
    if not objects:
        return None
    if not isinstance(objects, list):
        raise DataError(f"{name}: got {_show_value(value)}, wanted a list of objects")
    for number, item in enumerate(objects):
        if not isinstance(item, dict):
            raise DataError(f"{name}[{number}]: got {_show_value(item)}, wanted an object")
        _check_json(item, f"{name}[{number}]")
    return objects


def _parse_json(value: Any, location: str, expected: str) -> Any:
    """Parse a JSON string; a blank string or a value of another type is returned unchanged."""
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{location}: got {_show_value(value)}, wanted {expected}") from error


def _check_keys(value: Mapping[str, Any], allowed_keys: set[str], location: str) -> None:
    unknown_keys = [key for key in value if key not in allowed_keys]
    if unknown_keys:
        raise DataError(
            f"{location}: got the key {unknown_keys[0]!r:.60}, wanted only "
            f"{', '.join(sorted(allowed_keys))}"
        )


def _check_json(value: Any, location: str, depth: int = 0) -> None:
    """Raise DataError for a value that JSON cannot hold, at any depth."""
    if depth > _MAX_DEPTH:
        raise DataError(f"{location}: got objects nested more than {_MAX_DEPTH} deep")
    if isinstance(value, str):
        _check_unicode(value, f"{location}: ")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise DataError(f"{location}: got the key {key!r:.60}, wanted a string")
            _check_unicode(key, f"{location}: ")
            _check_json(item, f"{location}.{key:.40}", depth + 1)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            _check_json(item, f"{location}[{number}]", depth + 1)
    elif not _is_json_number(value) and value is not None:
        raise DataError(f"{location}: got {_show_value(value)}, wanted a JSON value")


def _is_json_number(value: object) -> bool:
    """Return whether a value is a bool, a finite float, or an integer that Python can print."""
    if isinstance(value, int):
        # math.isfinite is not used, because it raises for integers that are too large for a float.
        return abs(value) < _TOO_LARGE
    return isinstance(value, float) and math.isfinite(value)


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _check_unicode(text: str, prefix: str = "") -> None:
    """Raise DataError for half of a surrogate pair; the message begins with ``prefix``."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{prefix}got half of a surrogate pair at character {error.start + 1}, "
            "wanted valid Unicode"
        ) from error


def _show_value(value: object) -> str:
    """Format a value for an error message; only the keys of an object are shown."""
    if isinstance(value, Mapping):
        keys = ", ".join(map(repr, value)) or "none"
        return f"an object with keys {keys if len(keys) <= 200 else keys[:197] + '...'}"
    if value is None:
        return "null"
    text = shown(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
