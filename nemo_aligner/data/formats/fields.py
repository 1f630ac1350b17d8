"""Texts, conversations and labels out of a record's fields; each error names the field."""

from __future__ import annotations

import math
import re
from typing import Any

from nemo_aligner.config.suggest import suggestion
from nemo_aligner.data.formats.base import WantedLabels
from nemo_aligner.errors import DataError
from nemo_aligner.text.messages import Messages, read_messages, read_text

# The column that says by how much the chosen reply is better, as objectives ask for it.
LABEL_MARGIN = "label_margin"
# Labels are float32.
_LARGEST = (2 - 2**-23) * 2.0**127
_FEWEST = 2  # completions of a comparison
# Where a turn begins inside a prompt of HelpSteer and HelpSteer2.
_TURN = re.compile(r"\n<extra_id_1>(User|Assistant)\n")


def read_string(value: dict[str, Any], key: str) -> str:
    """A field that is a text."""
    text = value[key]
    if not isinstance(text, str):
        raise DataError(f"{key}: got {text!r:.60}, wanted a string")
    checked(text, key)
    return text


def checked(text: Any, key: str) -> Any:
    """The text or conversation of a field, as ``read_text`` gives it."""
    try:
        return read_text(text)
    except DataError as error:
        raise DataError(f"{key}: {error}") from error


def read_source(value: object) -> str:
    """Where a record is from, by a text or a number that says so; empty for anything else."""
    if isinstance(value, float):
        value = int(value) if value.is_integer() else value if math.isfinite(value) else None
    is_named = isinstance(value, str | int | float) and not isinstance(value, bool)
    return str(value) if is_named else ""


def read_objects(value: dict[str, Any], key: str, *needed: str) -> list[dict[str, Any]]:
    """A field that is a list of two or more objects, each with the keys that are ``needed``."""
    found = value[key]
    if not isinstance(found, list) or len(found) < _FEWEST:
        raise DataError(f"{key}: got {found!r:.60}, wanted a list of two or more objects")
    for number, one in enumerate(found, start=1):
        if not isinstance(one, dict) or not set(needed) <= set(one):
            raise DataError(
                f"{key}, {number}: got {one!r:.60}, wanted an object with "
                f"{' and '.join(map(repr, needed))}"
            )
    return found


def split_turns(prompt: object) -> object:
    """A prompt of several turns in HelpSteer's writing as messages; any other one as it is.

    Turns after the first begin with a line ``<extra_id_1>User`` or ``<extra_id_1>Assistant`` (the
    card of the data set nvidia/HelpSteer2).
    """
    if not isinstance(prompt, str):
        return prompt
    first, *rest = _TURN.split(prompt)
    if not rest:
        return prompt
    roles = ["user", *(name.lower() for name in rest[::2])]
    if roles != ["user", "assistant"] * (len(roles) // 2) + ["user"]:
        raise DataError(
            f"prompt: got turns of {', '.join(roles)}, wanted user and assistant to take turns, "
            "the last one the user's"
        )
    said = [first, *rest[1::2]]
    return [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]


def read_conversation(
    prompt: object, reply: object, key: str, prompt_key: str = "prompt"
) -> Messages:
    """Prompt and reply, each a string or messages, put together by the rule of the formats."""
    if not isinstance(reply, str | list) or reply == []:
        raise DataError(f"{key}: got {reply!r:.60}, wanted a string or a list of messages")
    if not isinstance(prompt, str | list | None):
        raise DataError(f"{prompt_key}: got {prompt!r:.60}, wanted a string or a list of messages")
    if isinstance(reply, str):
        turns: list[Any] = [{"role": "assistant", "content": reply}]
    else:
        turns = reply
    first = turns[0]
    if isinstance(first, dict) and first.get("role") == "assistant":
        if prompt is None:
            raise DataError(f"missing key {prompt_key!r}: {key} begins with the reply")
        before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        whole: Messages = checked([*before, *turns], key)
        return whole
    conversation: Messages = checked(turns, key)
    if isinstance(prompt, str):
        holds_prompt = {"role": "user", "content": prompt} in conversation
    else:
        holds_prompt = prompt is None or conversation[: len(prompt)] == _messages(
            prompt, prompt_key
        )
    if not holds_prompt:
        raise DataError(
            f"{key}: got a whole conversation that does not hold the record's {prompt_key}"
        )
    return conversation


def _messages(prompt: list[Any], key: str) -> Messages:
    try:
        return read_messages(prompt)
    except DataError as error:
        raise DataError(f"{key}: {error}") from error


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
