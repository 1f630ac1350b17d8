"""Texts, conversations and labels out of a record's fields; each error names the field."""

from __future__ import annotations

from typing import Any

from nemo_aligner.config.suggest import suggestion
from nemo_aligner.data.formats.base import WantedLabels
from nemo_aligner.errors import DataError
from nemo_aligner.text.messages import Conversation, check_text

# Labels are float32.
_LARGEST = (2 - 2**-23) * 2.0**127


def read_string(value: dict[str, Any], key: str) -> str:
    """A field that is a text."""
    text = value[key]
    if not isinstance(text, str):
        raise DataError(f"{key}: got {text!r:.60}, wanted a string")
    checked(text, key)
    return text


def checked(text: Any, key: str) -> Any:
    """The text or conversation of a field, once ``check_text`` lets it pass."""
    try:
        check_text(text)
    except DataError as error:
        raise DataError(f"{key}: {error}") from error
    return text


def read_conversation(prompt: object, reply: object, key: str) -> Conversation:
    """Prompt and reply, each a string or messages, put together by the rule of the formats."""
    if not isinstance(reply, str | list) or reply == []:
        raise DataError(f"{key}: got {reply!r:.60}, wanted a string or a list of messages")
    if not isinstance(prompt, str | list | None):
        raise DataError(f"prompt: got {prompt!r:.60}, wanted a string or a list of messages")
    if isinstance(reply, str):
        turns: list[Any] = [{"role": "assistant", "content": reply}]
    else:
        turns = reply
    first = turns[0]
    if isinstance(first, dict) and first.get("role") == "assistant":
        if prompt is None:
            raise DataError(f"missing key 'prompt': {key} begins with the reply")
        before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return checked([*before, *turns], key)
    conversation = checked(turns, key)
    if isinstance(prompt, str):
        holds_prompt = {"role": "user", "content": prompt} in conversation
    else:
        holds_prompt = prompt is None or conversation[: len(prompt)] == prompt
    if not holds_prompt:
        raise DataError(f"{key}: got a whole conversation that does not hold the record's prompt")
    return conversation


def read_labels(value: dict[str, Any], wanted: WantedLabels, why: str) -> tuple[float | None, ...]:
    """The label of every wanted column, by the field of its name; ``why`` says who wants it."""
    missing = [name for name in wanted.names if name not in value]
    if missing:
        near = suggestion(missing[0], value)
        meant = "" if near is None else f"did you mean {near!r}? "
        raise DataError(
            f"missing key {missing[0]!r}, {why}; {meant}this record has "
            f"{', '.join(map(repr, value))} (a label that is not known is null)"
        )
    return tuple(read_label(value[name], name, wanted) for name in wanted.names)


def read_pair_labels(value: dict[str, Any], wanted: WantedLabels) -> tuple[float | None, ...]:
    """``read_labels`` of a pair, whose columns an objective asks for."""
    return read_labels(value, wanted, "a label column that model.objective reads")


def read_label(value: object, name: str, wanted: WantedLabels) -> float | None:
    """A label, None where it is missing."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"{name}: got {value!r:.60}, wanted a number, or null where it is missing")
    if value == wanted.missing:
        return None
    # A whole number may be too large for a float; NaN is not within the bounds, either.
    if not -_LARGEST <= value <= _LARGEST:
        raise DataError(f"{name}: got {value!r:.60}, wanted a number that 32 bits hold")
    return float(value)
