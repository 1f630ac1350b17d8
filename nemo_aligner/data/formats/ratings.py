"""Rated replies, and replies with a label for each step or turn.

Which tokens of a text are read, and what stands between two steps, is the scoring contract's
business (``contract/steps.py``). A reply in steps comes from here as parts of text, one for each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.contract.messages import Messages
from nemo_aligner.data.formats.base import (
    Format,
    WantedLabels,
    checked,
    has,
    read_conversation,
    read_label,
    read_labels,
    read_source,
    read_string,
    split_turns,
)
from nemo_aligner.data.records import Origin, Rating, is_blank
from nemo_aligner.utils.errors import DataError, shown

# Prompt and response, and a field with a number or null for each attribute.
#
# HelpSteer and HelpSteer2 are written so (Wang et al. 2023, arXiv:2311.09528, and 2024,
# arXiv:2406.08673).


def _parse_rated_chat(values: list[dict[str, Any]], origin: Origin, wanted: WantedLabels) -> Rating:
    value = values[0]
    labels = read_labels(value, wanted, "an attribute of model.regression.attributes")
    conversation = read_conversation(split_turns(value["prompt"]), value["response"], "response")
    return Rating(conversation, labels, origin)


RATED_CHAT = Format(
    name="rated_chat",
    kind=RecordKind.rating,
    matches=has("prompt", "response"),
    wanted="'prompt', 'response' and a number for every attribute",
    parse=_parse_rated_chat,
    sample=({"prompt": "2+2?", "response": "4", "helpfulness": 4, "verbosity": None},),
)


# Raw text with a number or null for each attribute, as NeMo-Aligner has it.


def _parse_rated_text(values: list[dict[str, Any]], origin: Origin, wanted: WantedLabels) -> Rating:
    given = values[0]["label"]
    given = given if isinstance(given, list) else [given]
    if wanted.names and len(given) != len(wanted.names):
        raise DataError(
            f"label: got {len(given)} numbers, wanted {len(wanted.names)}, one for each of "
            f"{', '.join(wanted.names)}"
        )
    named = zip([f"label of {name}" for name in wanted.names], given, strict=False)
    labels = tuple(read_label(value, name, wanted) for name, value in named)
    return Rating(checked(values[0]["text"], "text"), labels, origin)


RATED_TEXT = Format(
    name="rated_text",
    kind=RecordKind.rating,
    matches=has("text", "label"),
    wanted="'text' and 'label'",
    parse=_parse_rated_text,
    sample=({"text": "User: 2+2?\nAssistant: 4", "label": [4, 0]},),
)


# One reply with whether it is a good one: TRL's unpaired preferences (its documentation, "Dataset
# formats") and ms-swift's, as KTO learns from them (Ethayarajh et al. 2024, arXiv:2402.01306). The
# attribute may have any name.


def _is_unpaired(value: dict[str, Any]) -> bool:
    return {"prompt", "completion", "label"} <= set(value) or (
        isinstance(value.get("messages"), list) and "label" in value and not _has_labels(value)
    )


def _parse_unpaired(values: list[dict[str, Any]], origin: Origin, wanted: WantedLabels) -> Rating:
    value = values[0]
    labels = _read_step_labels(value["label"], "label", wanted)
    if {"prompt", "completion"} <= set(value):
        conversation = read_conversation(value["prompt"], value["completion"], "completion")
        return Rating(conversation, labels, origin)
    return Rating(checked(value["messages"], "messages"), labels, origin)


UNPAIRED = Format(
    name="unpaired",
    kind=RecordKind.rating,
    matches=_is_unpaired,
    wanted="'prompt', 'completion' and 'label', or 'messages' and 'label'",
    parse=_parse_unpaired,
    sample=({"prompt": "2+2?", "completion": "4", "label": True},),
)


# Labels of steps.

Labels = tuple[float | None, ...]


def _read_step_labels(given: Any, where: str, wanted: WantedLabels) -> Labels:
    """The labels of one step: a bool or number, or several as a list or by their names."""
    names = wanted.names
    if isinstance(given, Mapping):
        missing = [name for name in names if name not in given]
        if missing:
            raise DataError(f"{where}: got {shown(given)}, wanted a number of {missing[0]!r}")
        given = [given[name] for name in names]
    values = given if isinstance(given, list) else [given]
    if given is None:
        values = [None] * len(names)
    if names and len(values) != len(names):
        raise DataError(
            f"{where}: got {len(values)} labels, wanted {len(names)}, of {', '.join(names)}"
        )
    plain = [float(value) if isinstance(value, bool) else value for value in values]
    return tuple(read_label(value, where, wanted) for _, value in zip(names, plain, strict=False))


def _rating(
    prompt: Any,
    steps: Sequence[Any],
    labels: Sequence[Labels],
    origin: Origin,
    key: str,
    source: str = "",
) -> Rating:
    for number, step in enumerate(steps):
        if not isinstance(step, str) or is_blank(step):
            raise DataError(f"{key}[{number}]: got {shown(step)}, wanted a text that is not blank")
    parts = [{"type": "text", "text": step} for step in steps]
    conversation = read_conversation(prompt, [{"role": "assistant", "content": parts}], key)
    return Rating(conversation, (), origin, source, tuple(labels))


# Prompt, steps and their labels: the columns of TRL's stepwise supervision (its documentation,
# "Dataset formats"), also those of trl-lib/prm800k and trl-lib/math_shepherd.


def _parse_stepwise(values: list[dict[str, Any]], origin: Origin, wanted: WantedLabels) -> Rating:
    value = values[0]
    steps, given = value["completions"], value["labels"]
    for key in ("completions", "labels"):
        if not isinstance(value[key], list) or not value[key]:
            raise DataError(f"{key}: got {shown(value[key])}, wanted a list, one for each step")
    if len(steps) != len(given):
        raise DataError(f"labels: got {len(given)} of them, wanted {len(steps)}, as completions")
    labels = [
        _read_step_labels(label, f"labels[{number}]", wanted) for number, label in enumerate(given)
    ]
    return _rating(value["prompt"], steps, labels, origin, "completions")


STEPWISE = Format(
    name="stepwise",
    kind=RecordKind.rating,
    matches=has("prompt", "completions", "labels"),
    wanted="'prompt', 'completions' and 'labels', one for each step",
    parse=_parse_stepwise,
    sample=({"prompt": "2+2+2?", "completions": ["2+2=4", "4+2=5"], "labels": [True, False]},),
)


# Math-Shepherd as it is published (Wang et al. 2023, arXiv:2312.08935): a mark behind every step,
# in whose place ``label`` has a sign. The first step begins within the text of the prompt.

_MARK = "\u043a\u0438"
_SIGNS = {"+": 1.0, "-": 0.0}
_FIRST = re.compile(r"\s*(?=Step 1:)")


def _is_math_shepherd(value: dict[str, Any]) -> bool:
    texts = value.get("input"), value.get("label")
    return all(isinstance(text, str) for text in texts) and _MARK in value["input"]


def _parse_math_shepherd(
    values: list[dict[str, Any]], origin: Origin, wanted: WantedLabels
) -> Rating:
    value = values[0]
    *pieces, behind = read_string(value, "input").split(_MARK)
    signs, at = read_string(value, "label"), 0
    labels: list[Labels] = []
    for piece in pieces:
        at += len(piece)
        if signs[at - len(piece) : at] != piece or signs[at : at + 1] not in _SIGNS:
            raise DataError(
                f"label: got {signs[at : at + 20]!r} behind step {len(labels) + 1}, wanted + or - "
                f"in the place of every {_MARK} of input, and else the same text"
            )
        labels.append(_read_step_labels(_SIGNS[signs[at]], "label", wanted))
        at += 1
    begin = _FIRST.search(pieces[0])
    if begin is None or behind.strip():
        raise DataError(
            f"input: got {shown(value['input'])}, wanted a question, 'Step 1:' and steps, each "
            f"with {_MARK} behind it"
        )
    steps = [pieces[0][begin.end() :], *pieces[1:]]
    prompt = pieces[0][: begin.start()]
    task = value.get("task")
    source = read_source(task) if isinstance(task, str) else ""
    steps = [step.strip() for step in steps]
    return _rating(prompt, steps, labels, origin, "input", source)


MATH_SHEPHERD = Format(
    name="math_shepherd",
    kind=RecordKind.rating,
    matches=_is_math_shepherd,
    wanted=f"'input' and 'label', with {_MARK} and a sign behind every step",
    parse=_parse_math_shepherd,
    sample=(
        {
            "input": f"2+2+2? Step 1: 2+2=4 {_MARK}\nStep 2: 4+2=5 {_MARK}",
            "label": "2+2+2? Step 1: 2+2=4 +\nStep 2: 4+2=5 -",
            "task": "GSM8K",
        },
    ),
)


# PRM800K as it is published (Lightman et al. 2023, arXiv:2305.20050): a path of chosen steps, with
# other steps beside them, each rated 1, 0 (neutral) or -1. The path is one record, and every other
# step one more, behind the path up to there, whose ratings are not learned a second time. A step
# that a person has written is right.


def _parse_prm800k(
    values: list[dict[str, Any]], origin: Origin, wanted: WantedLabels
) -> list[Rating]:
    value = values[0]
    problem, steps = value["question"].get("problem"), value["label"]["steps"]
    if not isinstance(problem, str) or not isinstance(steps, list):
        raise DataError(f"question: got {shown(value['question'])}, wanted a 'problem'")
    path: list[tuple[Any, Labels]] = []
    found: list[Rating] = []

    def add(taken: Sequence[tuple[Any, Labels]]) -> None:
        texts, labels = zip(*taken, strict=True)
        found.append(_rating(problem, texts, labels, origin, "label.steps"))

    none: Labels = (None,) * len(wanted.names)
    for number, step in enumerate(steps):
        where = f"label.steps[{number}]"
        chosen = _rated(step, where, wanted)
        add_beside = [(text, labels) for text, labels, is_chosen in chosen if not is_chosen]
        for beside in add_beside:
            add([*((text, none) for text, _ in path), beside])
        taken = [(text, labels) for text, labels, is_chosen in chosen if is_chosen]
        if not taken:
            break
        path.append(taken[0])
    if path:
        add(path)
    if not found:
        raise DataError(f"label: got {shown(value['label'])}, wanted a step with a text")
    return found


def _rated(step: Any, where: str, wanted: WantedLabels) -> list[tuple[Any, Labels, bool]]:
    """Text and labels of all completions of a step, and whether the path goes on with each."""
    if not isinstance(step, dict):
        raise DataError(f"{where}: got {shown(step)}, wanted an object with 'completions'")
    chosen, written = step.get("chosen_completion"), step.get("human_completion")
    completions = step.get("completions") or []
    if not isinstance(completions, list):
        raise DataError(f"{where}.completions: got {shown(completions)}, wanted a list")
    found = []
    for number, each in enumerate(completions):
        place = f"{where}.completions[{number}]"
        if not isinstance(each, dict) or each.get("rating") not in (-1, 0, 1, None):
            raise DataError(f"{place}: got {shown(each)}, wanted a text and a rating -1, 0 or 1")
        label = {-1: 0.0, 0: wanted.neutral, 1: 1.0, None: None}[each.get("rating")]
        labels = _read_step_labels(label, place, wanted)
        found.append((each.get("text"), labels, number == chosen))
    if chosen is None and written is not None:
        text = written.get("text") if isinstance(written, dict) else written
        labels = _read_step_labels(1.0, f"{where}.human_completion", wanted)
        found.append((text, labels, True))
    return found


def _is_prm800k(value: dict[str, Any]) -> bool:
    question, label = value.get("question"), value.get("label")
    return isinstance(question, dict) and isinstance(label, dict) and "steps" in label


PRM800K = Format(
    name="prm800k",
    kind=RecordKind.rating,
    matches=_is_prm800k,
    wanted="'question' with 'problem', and 'label' with 'steps'",
    parse=_parse_prm800k,
    sample=(
        {
            "question": {"problem": "2+2+2?"},
            "label": {
                "steps": [
                    {
                        "completions": [
                            {"text": "2+2=4", "rating": 1},
                            {"text": "2+2=5", "rating": -1},
                        ],
                        "human_completion": None,
                        "chosen_completion": 0,
                    }
                ]
            },
        },
    ),
)


# Messages, of which assistant turns have a label, or several by the names of attributes.

_LABEL = "label"


def _has_labels(value: dict[str, Any]) -> bool:
    messages = value.get("messages")
    return isinstance(messages, list) and any(
        isinstance(message, dict) and _LABEL in message for message in messages
    )


def _parse_labelled_turns(
    values: list[dict[str, Any]], origin: Origin, wanted: WantedLabels
) -> Rating:
    given = values[0]["messages"]
    labels: list[Labels] = []
    bare: Messages = []
    for number, message in enumerate(given):
        where = f"messages[{number}]"
        if not isinstance(message, dict):
            raise DataError(f"{where}: got {shown(message)}, wanted an object")
        label, is_turn = message.get(_LABEL), message.get("role") == "assistant"
        if label is not None and not is_turn:
            raise DataError(
                f"{where}.{_LABEL}: got {shown(label)} of role {shown(message.get('role'))}, "
                "wanted labels of assistant turns alone"
            )
        if is_turn:
            labels.append(_read_step_labels(label, f"{where}.{_LABEL}", wanted))
        bare.append({key: each for key, each in message.items() if key != _LABEL})
    return Rating(checked(bare, "messages"), (), origin, steps=tuple(labels))


LABELLED_TURNS = Format(
    name="labelled_turns",
    kind=RecordKind.rating,
    matches=_has_labels,
    wanted="'messages', with a 'label' in assistant turns",
    parse=_parse_labelled_turns,
    sample=(
        {
            "messages": [
                {"role": "user", "content": "2+2?"},
                {"role": "assistant", "content": "4", "label": 1},
                {"role": "user", "content": "and 2?"},
                {"role": "assistant", "content": "7", "label": 0},
            ]
        },
    ),
)
