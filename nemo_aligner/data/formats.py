"""The public data formats, one small reader each; found by sniffing the first record, or by name.

=================  ==========  ==================================================================
name               kind        one record
=================  ==========  ==================================================================
comparison_text    comparison  two neighbouring lines, ``{"text": prompt + chosen}`` and then
                               ``{"text": prompt + rejected}``: raw text, as NeMo-Aligner has it
hh                 comparison  ``{"chosen", "rejected"}`` in HH-RLHF's writing, ``"\\n\\nHuman:
                               ... \\n\\nAssistant: ..."``; a ``"prompt"`` goes in front of both
chat_pairs         comparison  ``{"prompt", "chosen", "rejected"}``: strings or lists of messages
rated_text         rating      ``{"text", "label"}``: raw text, a number or null per attribute
rated_chat         rating      ``{"prompt", "response", "<attribute>": number or null, ...}``
=================  ==========  ==================================================================

In ``chat_pairs`` and ``rated_chat`` a string prompt is one user turn, and a string reply one
assistant turn. A reply that is a list either begins with an assistant turn and goes on from the
prompt, or is the whole conversation and must then begin with the prompt (contain it, if the prompt
is a string); with whole conversations ``prompt`` may be left out. Of other keys only ``source``,
``subset`` or ``kind`` is read, the first of them that holds a string: metrics are also given apart
for each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nemo_aligner.data.records import Comparison, Origin, Rating, Record
from nemo_aligner.data.sources import Line
from nemo_aligner.errors import ConfigError, DataError
from nemo_aligner.text.messages import Conversation, Text, check_text


@dataclass(frozen=True)
class _Labels:
    """What a reader needs to know about the labels of ratings."""

    attributes: Sequence[str]
    loss_mask_val: float | None


@dataclass(frozen=True)
class Format:
    """A reader, and the keys by which its records are known."""

    name: str
    kind: str
    matches: Callable[[dict[str, Any]], bool]
    wanted: str
    parse: Callable[[list[dict[str, Any]], Origin, _Labels], Record]
    lines_per_record: int = 1

    def read(
        self,
        lines: list[Line],
        path: str,
        attributes: Sequence[str],
        loss_mask_val: float | None,
    ) -> Iterator[Record]:
        """The records of a whole file.

        Raises:
            DataError: a record is not of this format; the message says file:line.
        """
        labels = _Labels(attributes, loss_mask_val)
        for start in range(0, len(lines), self.lines_per_record):
            group = lines[start : start + self.lines_per_record]
            for line in group:
                self._check(line, path)
            origin = Origin(path, group[0].number)
            if len(group) < self.lines_per_record:
                raise DataError(
                    f"{origin}: the chosen text on this line has no rejected text after it; got an "
                    f"odd number of comparison lines ({len(lines)})"
                )
            try:
                record = self.parse([line.value for line in group], origin, labels)
            except DataError as error:
                raise DataError(f"{origin}: {error}") from error
            yield replace(record, source=_source(group[0].value))

    def _check(self, line: Line, path: str) -> None:
        if self.matches(line.value):
            return
        others = [known.name for known in FORMATS.values() if known.matches(line.value)]
        keys = ", ".join(map(repr, line.value)) or "none"
        if others:
            raise DataError(
                f"{path}:{line.number}: mixed formats in one file: got a record of "
                f"{' or '.join(others)} (keys {keys}), wanted {self.name}: {self.wanted}"
            )
        raise DataError(f"{path}:{line.number}: got keys {keys}; {self.name} wants {self.wanted}")


def _source(value: dict[str, Any]) -> str:
    named = (value.get(key) for key in ("source", "subset", "kind"))
    return next((name for name in named if isinstance(name, str)), "")


def choose_format(fmt: str, kind: str | None, lines: list[Line], path: str) -> Format:
    """The format called ``fmt``, or for ``auto`` the one that the first record fits.

    Raises:
        ConfigError: there is no format of that name, or it holds another kind of records.
        DataError: the file is empty, or its first record fits no format of this kind.
    """
    fitting = [known for known in FORMATS.values() if kind in (None, known.kind)]
    names = ", ".join(known.name for known in fitting)
    if fmt != "auto":
        if fmt not in {known.name for known in fitting}:
            raise ConfigError(f"model.data.format: got {fmt!r}, wanted auto or one of {names}")
        return FORMATS[fmt]
    if not lines:
        raise DataError(f"{path}: the file has no records")
    for known in fitting:
        if known.matches(lines[0].value):
            return known
    keys = ", ".join(map(repr, lines[0].value)) or "none"
    raise DataError(
        f"{path}:{lines[0].number}: got a record with keys {keys}; wanted one of these formats: "
        + "; ".join(f"{known.name}: {known.wanted}" for known in fitting)
    )


def _comparison_text(values: list[dict[str, Any]], origin: Origin, _: _Labels) -> Comparison:
    chosen, rejected = (_string(value, "text") for value in values)
    return Comparison(chosen, rejected, origin)


_HH_TURN = re.compile(r"\n\n(Human|Assistant):")
_HH_ROLES = {"Human": "user", "Assistant": "assistant"}


def _is_hh(value: dict[str, Any]) -> bool:
    if not {"chosen", "rejected"} <= set(value):
        return False
    start = value.get("prompt", value["chosen"])
    return isinstance(start, str) and start.startswith("\n\nHuman:")


def _hh(values: list[dict[str, Any]], origin: Origin, _: _Labels) -> Comparison:
    prompt = _string(values[0], "prompt") if "prompt" in values[0] else ""
    chosen, rejected = (
        _hh_conversation(prompt + _string(values[0], key), key) for key in ("chosen", "rejected")
    )
    return Comparison(chosen, rejected, origin)


def _hh_conversation(text: str, key: str) -> Conversation:
    before, *rest = _HH_TURN.split(text)
    if before.strip() or not rest:
        raise DataError(f"{key}: got {text[:40]!r}, wanted a text that begins with '\\n\\nHuman:'")
    conversation = [
        {"role": _HH_ROLES[speaker], "content": said.strip()}
        for speaker, said in zip(rest[::2], rest[1::2], strict=True)
    ]
    return _checked(conversation, key)


def _chat_pair(values: list[dict[str, Any]], origin: Origin, _: _Labels) -> Comparison:
    prompt = values[0].get("prompt")
    chosen, rejected = (
        _conversation(prompt, values[0][key], key) for key in ("chosen", "rejected")
    )
    return Comparison(chosen, rejected, origin)


def _conversation(prompt: object, reply: object, key: str) -> Conversation:
    """Prompt and reply, each a string or messages, put together by the rule above."""
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
        return _checked([*before, *turns], key)
    conversation = _checked(turns, key)
    if isinstance(prompt, str):
        holds_prompt = {"role": "user", "content": prompt} in conversation
    else:
        holds_prompt = prompt is None or conversation[: len(prompt)] == prompt
    if not holds_prompt:
        raise DataError(f"{key}: got a whole conversation that does not hold the record's prompt")
    return conversation


def _rated_text(values: list[dict[str, Any]], origin: Origin, labels: _Labels) -> Rating:
    given = values[0]["label"]
    given = given if isinstance(given, list) else [given]
    if labels.attributes and len(given) != len(labels.attributes):
        raise DataError(
            f"label: got {len(given)} numbers, wanted {len(labels.attributes)}, one for each of "
            f"{', '.join(labels.attributes)}"
        )
    names = labels.attributes and [f"label of {name}" for name in labels.attributes]
    numbers = tuple(_label(value, name, labels) for name, value in zip(names, given, strict=False))
    return Rating(_checked_text(values[0]["text"], "text"), numbers, origin)


def _rated_chat(values: list[dict[str, Any]], origin: Origin, labels: _Labels) -> Rating:
    value = values[0]
    missing = [name for name in labels.attributes if name not in value]
    if missing:
        raise DataError(
            f"missing key {missing[0]!r}, an attribute of model.regression.attributes; this record "
            f"has {', '.join(map(repr, value))} (a label that is not known is null)"
        )
    numbers = tuple(_label(value[name], name, labels) for name in labels.attributes)
    conversation = _conversation(value["prompt"], value["response"], "response")
    return Rating(conversation, numbers, origin)


def _label(value: object, name: str, labels: _Labels) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise DataError(f"{name}: got {value!r:.60}, wanted a number, or null where it is missing")
    return None if value == labels.loss_mask_val else float(value)


def _string(value: dict[str, Any], key: str) -> str:
    text = value[key]
    if not isinstance(text, str):
        raise DataError(f"{key}: got {text!r:.60}, wanted a string")
    _checked_text(text, key)
    return text


def _checked_text(text: Any, key: str) -> Text:
    try:
        check_text(text)
    except DataError as error:
        raise DataError(f"{key}: {error}") from error
    return text


def _checked(conversation: Any, key: str) -> Conversation:
    _checked_text(conversation, key)
    return conversation


def _has(*keys: str, without: str | None = None) -> Callable[[dict[str, Any]], bool]:
    return lambda value: set(keys) <= set(value) and without not in value


def _is_chat_pair(value: dict[str, Any]) -> bool:
    return (
        {"chosen", "rejected"} <= set(value)
        and not _is_hh(value)
        and ("prompt" in value or not isinstance(value["chosen"], str))
    )


FORMATS: dict[str, Format] = {
    known.name: known
    for known in (
        Format(
            "comparison_text", "comparison", _has("text", without="label"),
            "'text', without 'label', on two lines: chosen, then rejected", _comparison_text, 2,
        ),
        Format(
            "hh", "comparison", _is_hh,
            "'chosen' and 'rejected', texts that begin with '\\n\\nHuman:'", _hh,
        ),
        Format(
            "chat_pairs", "comparison", _is_chat_pair,
            "'prompt', 'chosen' and 'rejected', strings or lists of messages", _chat_pair,
        ),
        Format("rated_text", "rating", _has("text", "label"), "'text' and 'label'", _rated_text),
        Format(
            "rated_chat", "rating", _has("prompt", "response"),
            "'prompt', 'response' and a number for every attribute", _rated_chat,
        ),
    )
}  # fmt: skip
