"""Formats of a chosen and a rejected reply: TRL, LLaMA-Factory, ms-swift, OpenAI, HH-RLHF."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.contract.messages import Messages, with_tools
from nemo_aligner.data.formats.base import (
    LABEL_MARGIN,
    Format,
    PairKeys,
    WantedLabels,
    check_text,
    has,
    is_assistant,
    read_conversation,
    read_label,
    read_pair_labels,
    read_string,
)
from nemo_aligner.data.formats.prompts import advise_prompt, find_prompt_messages, prompt_like
from nemo_aligner.data.formats.teacher import TEACHER_FIELDS
from nemo_aligner.data.records import Comparison, Origin
from nemo_aligner.utils.errors import DataError

# HH-RLHF (Bai et al. 2022, arXiv:2204.05862): texts ``"\n\nHuman: ... \n\nAssistant: ..."``.

_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}


def is_hh(value: dict[str, Any]) -> bool:
    """True if a pair has the form of HH-RLHF: its first text begins with a turn of ``Human:``."""
    if not {"chosen", "rejected"} <= set(value):
        return False
    start = value.get("prompt", value["chosen"])
    return isinstance(start, str) and start.startswith("\n\nHuman:")


def _parse_hh(values: list[dict[str, Any]], origin: Origin, columns: WantedLabels) -> Comparison:
    prompt = read_string(values[0], "prompt") if "prompt" in values[0] else ""
    chosen, rejected = (
        check_text(turns_of(_prepend_prompt(prompt, read_string(values[0], key), key), key), key)
        for key in ("chosen", "rejected")
    )
    return Comparison.of_pair(chosen, rejected, origin, labels=read_pair_labels(values[0], columns))


def _prepend_prompt(prompt: str, text: str, key: str) -> str:
    """Return prompt and ``text`` together; ``text`` may already begin with the prompt.

    Raises DataError if ``text``, the field ``key``, is a conversation with another prompt.
    """
    if text.startswith(prompt):
        return text
    if text.startswith("\n\nHuman:"):
        raise DataError(
            f"{key}: got {text[:40]!r}, a conversation that does not begin with the prompt; "
            "wanted a reply, or the whole conversation"
        )
    return prompt + text


def turns_of(text: str, key: str) -> Messages:
    """Split a text in the form of HH-RLHF into messages, which may end with either role.

    Raises:
        DataError: the text has another form; the error names its field, ``key``.
    """
    head, *parts = _TURN.split(text)
    if head.strip() or not parts:
        raise DataError(
            f"{key}: got {text[:40]!r}, wanted a string that begins with '\\n\\nHuman:'"
        )
    return [
        {"role": _ROLES[speaker], "content": content.strip()}
        for speaker, content in zip(parts[::2], parts[1::2], strict=True)
    ]


HH = Format(
    name="hh",
    kind=RecordKind.comparison,
    matches=is_hh,
    wanted="'chosen' and 'rejected', texts that begin with '\\n\\nHuman:'",
    parse=_parse_hh,
    sample=(
        {
            "chosen": "\n\nHuman: 2+2?\n\nAssistant: 4",
            "rejected": "\n\nHuman: 2+2?\n\nAssistant: 5",
        },
    ),
)


# Prompt, chosen and rejected reply, each a string or a list of messages.
#
# TRL's conversational pairs, binarized UltraFeedback, and the preferences of Tulu 3 and Skywork
# have this form; with other keys, so has the data of NeMo RL's ``BinaryPreferenceDataset``
# (NVIDIA-NeMo/RL, docs/guides/rm.md, "Datasets").

_CHAT_PAIRS = "chat_pairs"
_CHAT_SAMPLE = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}


def pairs_by(keys: PairKeys) -> Format:
    """Return the format of pairs whose fields have the names ``keys``."""

    def matches(value: dict[str, Any]) -> bool:
        return {keys.chosen, keys.rejected} <= set(value) and (
            keys.prompt in value or not isinstance(value[keys.chosen], str)
        )

    def parse(values: list[dict[str, Any]], origin: Origin, columns: WantedLabels) -> Comparison:
        prompt = _read_prompt(values[0], keys.prompt)
        if prompt is None and _begins_with_reply(values[0][keys.chosen]):
            names = prompt_like(values[0], (keys.chosen, keys.rejected))
            advice = [advise_prompt(values[0], name) for name in names]
            problem = f"missing key {keys.prompt!r}: {keys.chosen} begins with the reply"
            raise DataError(". ".join([problem, *advice[:1]]))
        chosen, rejected = (
            read_conversation(prompt, values[0][key], key, keys.prompt)
            for key in (keys.chosen, keys.rejected)
        )
        labels = read_margin_labels(values[0], columns)
        return Comparison.of_pair(chosen, rejected, origin, labels=labels)

    return Format(
        name=_CHAT_PAIRS,
        kind=RecordKind.comparison,
        matches=matches,
        wanted=f"{keys.prompt!r}, {keys.chosen!r} and {keys.rejected!r}, "
        "strings or lists of messages",
        parse=parse,
        sample=({getattr(keys, key): text for key, text in _CHAT_SAMPLE.items()},),
    )


_INSTRUCTION, _INPUT = "instruction", "input"


def _read_prompt(value: dict[str, Any], key: str) -> Any:
    """Return the prompt of a pair from the field ``key``; None if there is no such field.

    Alpaca's ``input`` is appended to its ``instruction``.
    """
    prompt = value.get(key)
    if key != _INSTRUCTION or not isinstance(prompt, str) or not value.get(_INPUT):
        return prompt
    task_input = read_string(value, _INPUT)
    return "\n".join(part for part in (prompt, task_input) if part)


def _are_alpaca(value: dict[str, Any]) -> bool:
    return (
        {_INSTRUCTION, "chosen", "rejected"} <= set(value)
        and "prompt" not in value
        and isinstance(value[_INSTRUCTION], str)
        and _begins_with_reply(value["chosen"])
        and not is_hh(value)
    )


def _begins_with_reply(reply: Any) -> bool:
    """True if ``reply`` begins with the assistant's reply and not with a prompt.

    It may be a text, a message or a list of messages. A text is taken to be only a reply.
    """
    first = reply[0] if isinstance(reply, list) and reply else reply
    if isinstance(first, dict):
        return is_assistant(first)
    return isinstance(reply, str)


def _key_of_conversation(value: dict[str, Any]) -> str | None:
    """Return the name of the field with the prompt's messages in LLaMA-Factory's ShareGPT pairs.

    Without LLaMA-Factory's fields, it is the only column that may hold the prompt, if it holds
    messages (UltraInteract's ``trajectory``). None if the record is not such a pair.
    """
    if not {"chosen", "rejected"} <= set(value) or "prompt" in value:
        return None
    if not _begins_with_reply(value["chosen"]):
        return None
    for key in ("conversations", "messages"):
        turns = value.get(key)
        last = turns[-1] if isinstance(turns, list) and turns else None
        if isinstance(last, dict) and not _begins_with_reply(last):
            return key
    return find_prompt_messages(value)


_DEFAULT_PAIRS = pairs_by(PairKeys())
CHAT_PAIRS = replace(
    _DEFAULT_PAIRS,
    matches=lambda value: (
        _DEFAULT_PAIRS.matches(value)
        and not is_hh(value)
        and not _are_alpaca(value)
        and _key_of_conversation(value) is None
    ),
)


# LLaMA-Factory's pairs (its data/README.md, "Preference Dataset"): with Alpaca's columns, the
# prompt is the instruction, followed by the input on the next lines; in ShareGPT's form, the
# conversation is followed by two messages. Both may have ``system`` and ``history`` columns
# (``prompts.py``).

ALPACA_PAIRS = replace(
    pairs_by(PairKeys(prompt=_INSTRUCTION)),
    name="alpaca_pairs",
    matches=_are_alpaca,
    wanted="'instruction', 'input', 'chosen' and 'rejected'",
    sample=({"instruction": "Add the numbers.", "input": "2, 2", "chosen": "4", "rejected": "5"},),
)


def _parse_sharegpt(
    values: list[dict[str, Any]], origin: Origin, columns: WantedLabels
) -> Comparison:
    key = _key_of_conversation(values[0])
    assert key is not None  # the format's ``matches`` requires this field
    return pairs_by(PairKeys(prompt=key)).parse(values, origin, columns)  # type: ignore[return-value]


SHAREGPT_PAIRS = Format(
    name="sharegpt_pairs",
    kind=RecordKind.comparison,
    matches=lambda value: _key_of_conversation(value) is not None,
    wanted="'conversations', 'messages' or another column of messages up to the prompt, and "
    "'chosen' and 'rejected', messages or texts",
    parse=_parse_sharegpt,
    sample=(
        {
            "conversations": [{"from": "human", "value": "2+2?"}],
            "chosen": {"from": "gpt", "value": "4"},
            "rejected": {"from": "gpt", "value": "5"},
        },
    ),
)


# ms-swift's pairs (its documentation, "Custom dataset", RLHF): messages that end with the chosen
# reply, and either a rejected reply or a whole rejected conversation.

_REJECTED_RESPONSE, _REJECTED_MESSAGES = "rejected_response", "rejected_messages"


def _are_swift(value: dict[str, Any]) -> bool:
    return isinstance(value.get("messages"), list) and (
        _REJECTED_RESPONSE in value or _REJECTED_MESSAGES in value
    )


def _parse_swift(values: list[dict[str, Any]], origin: Origin, columns: WantedLabels) -> Comparison:
    value = values[0]
    chosen = check_text(value["messages"], "messages")
    if value.get(_REJECTED_MESSAGES):
        rejected = check_text(value[_REJECTED_MESSAGES], _REJECTED_MESSAGES)
    else:
        roles = [turn["role"] for turn in chosen]
        if "user" not in roles:
            raise DataError(f"messages: got turns of {', '.join(roles)}, wanted a user turn")
        # ``rejected_response`` replaces all messages after the last one of the user, including tool
        # calls and their results.
        end = len(roles) - roles[::-1].index("user")
        # In tables and data sets of the hub, a column that a row does not have is null.
        reply = value.get(_REJECTED_RESPONSE)
        if reply is None:
            raise DataError(
                f"{_REJECTED_RESPONSE}: got None, and no {_REJECTED_MESSAGES!r}; wanted one of them"
            )
        rejected = read_conversation(chosen[:end], reply, _REJECTED_RESPONSE)
    return Comparison.of_pair(chosen, rejected, origin, labels=read_margin_labels(value, columns))


MS_SWIFT_PAIRS = Format(
    name="ms_swift_pairs",
    kind=RecordKind.comparison,
    matches=_are_swift,
    wanted="'messages' that end with the chosen reply, and 'rejected_response' or "
    "'rejected_messages'",
    parse=_parse_swift,
    sample=(
        {
            "messages": [
                {"role": "user", "content": "2+2?"},
                {"role": "assistant", "content": "4"},
            ],
            "rejected_response": "5",
        },
    ),
)


# Two raw texts that include the prompt: TRL's standard format with an implicit prompt.


def _are_texts(value: dict[str, Any]) -> bool:
    return (
        {"chosen", "rejected"} <= set(value)
        and "prompt" not in value
        and isinstance(value["chosen"], str)
        and not is_hh(value)
    )


def _are_whole_texts(value: dict[str, Any]) -> bool:
    """True if chosen and rejected are texts, and no other column may hold their prompt.

    The texts are then taken to include the prompt.
    """
    return _are_texts(value) and not prompt_like(value)


def _parse_text_pairs(
    values: list[dict[str, Any]], origin: Origin, columns: WantedLabels
) -> Comparison:
    chosen, rejected = (read_string(values[0], key) for key in ("chosen", "rejected"))
    labels = read_margin_labels(values[0], columns)
    return Comparison.of_pair(chosen, rejected, origin, labels=labels)


TEXT_PAIRS = Format(
    name="text_pairs",
    kind=RecordKind.comparison,
    matches=_are_texts,
    recognizes=_are_whole_texts,
    wanted="'chosen' and 'rejected', raw texts, without a field for the prompt",
    parse=_parse_text_pairs,
    sample=({"chosen": "The sky is blue.", "rejected": "The sky is green."},),
)


# Two adjacent lines of raw text, as in NeMo-Aligner.


def _parse_comparison_text(
    values: list[dict[str, Any]], origin: Origin, columns: WantedLabels
) -> Comparison:
    chosen, rejected = (read_string(value, "text") for value in values)
    return Comparison.of_pair(chosen, rejected, origin, labels=read_pair_labels(values[0], columns))


# Keys of other formats. A line with one of them is not raw text, even if it has a ``text`` field.
_FOREIGN_KEYS = {"label", "prompt", "chosen", "rejected", "response", "completions", "messages"}
# ``auto`` chooses this format only if a line has no other keys than these. Other keys may be those
# of a corpus or of another kind of data, where two adjacent lines are not a pair.
_TEXT_KEYS = {"text", "source", "subset", "kind", LABEL_MARGIN, *TEACHER_FIELDS}


def _is_text(value: dict[str, Any]) -> bool:
    return "text" in value and _FOREIGN_KEYS.isdisjoint(value)


def _is_text_alone(value: dict[str, Any]) -> bool:
    return "text" in value and set(value) <= _TEXT_KEYS


COMPARISON_TEXT = Format(
    name="comparison_text",
    kind=RecordKind.comparison,
    matches=_is_text,
    recognizes=_is_text_alone,
    wanted="'text', without 'label', on two lines: chosen, then rejected",
    parse=_parse_comparison_text,
    sample=({"text": "User: 2+2?\nAssistant: 4"}, {"text": "User: 2+2?\nAssistant: 5"}),
    lines_per_record=2,
)


# The margin of a pair, from the scores of public data sets.

# Names of the scores of the chosen and the rejected reply: in UltraFeedback as binarized for Zephyr
# and by TRL, in argilla's editions of it, and in RLHFlow's data.
_SCORES = (
    ("score_chosen", "score_rejected"),
    ("chosen-rating", "rejected-rating"),
    ("chosen_rating", "rejected_rating"),
    ("chosen_score", "rejected_score"),
)
MARGIN = "margin"  # TRL's name of a pair's margin


def read_margin_labels(value: dict[str, Any], columns: WantedLabels) -> tuple[float | None, ...]:
    """Read the labels of a pair; ``label_margin`` may also come from ``margin`` (TRL) or scores.

    Scores are fields of the record or of its ``metadata``. From scores, the margin is the score of
    the chosen reply minus that of the rejected one, and may be negative.
    """
    if LABEL_MARGIN in columns.names and LABEL_MARGIN not in value:
        return read_pair_labels({**_read_margin(value, columns), **value}, columns)
    return read_pair_labels(value, columns)


def has_margin(value: dict[str, Any]) -> bool:
    """True if ``read_margin_labels`` finds a field to read the margin of a pair from."""
    return LABEL_MARGIN in value or MARGIN in value or bool(_find_scores(value))


def _read_margin(value: dict[str, Any], columns: WantedLabels) -> dict[str, float | None]:
    if MARGIN in value:
        return {LABEL_MARGIN: read_label(value[MARGIN], MARGIN, columns)}
    scores = [read_label(score, key, columns) for key, score in _find_scores(value).items()]
    if not scores:
        return {}
    chosen, rejected = scores
    if chosen is None or rejected is None:
        return {LABEL_MARGIN: None}
    return {LABEL_MARGIN: chosen - rejected}


def _find_scores(value: dict[str, Any]) -> dict[str, Any]:
    """Return the scores of the chosen and the rejected reply by their fields; empty if none."""
    metadata = value.get("metadata")
    for scored in (value, metadata if isinstance(metadata, dict) else {}):
        for keys in _SCORES:
            if set(keys) <= set(scored):
                return {key: scored[key] for key in keys}
    return {}


# OpenAI's preference fine-tuning: a request to the chat API, a preferred output and a worse one.
#
# ``input`` has ``messages`` and may have ``tools``; both outputs are messages that continue it
# (OpenAI, "Direct preference optimization", preparing the data).

_OUTPUTS = ("preferred_output", "non_preferred_output")
_PROMPT = "input.messages"


def _parse_openai_preference(
    values: list[dict[str, Any]], origin: Origin, columns: WantedLabels
) -> Comparison:
    value = values[0]
    request = value["input"]
    if not isinstance(request, dict) or not isinstance(request.get("messages"), list):
        raise DataError(f"input: got {request!r:.60}, wanted an object with messages, a list")
    better, worse = (
        with_tools(
            read_conversation(request["messages"], value[key], key, _PROMPT), request.get("tools")
        )
        for key in _OUTPUTS
    )
    return Comparison.of_pair(better, worse, origin, labels=read_pair_labels(value, columns))


OPENAI_PREFERENCE = Format(
    name="openai_preference",
    kind=RecordKind.comparison,
    matches=has("input", *_OUTPUTS),
    wanted="'input' with 'messages', 'preferred_output' and 'non_preferred_output'",
    parse=_parse_openai_preference,
    sample=(
        {
            "input": {"messages": [{"role": "user", "content": "2+2?"}], "tools": []},
            "preferred_output": [{"role": "assistant", "content": "4"}],
            "non_preferred_output": [{"role": "assistant", "content": "5"}],
        },
    ),
)
