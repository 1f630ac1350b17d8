"""Formats of rated replies, and of replies with labels for each of their turns or steps.

A reply in steps is read as a message whose content is a list of text parts, one for each step. The
scoring contract (``contract/steps.py``) decides how the parts are joined and at which tokens the
steps are scored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.config.model import ScoredPosition
from nemo_aligner.contract.messages import Messages
from nemo_aligner.data.formats.base import (
    Format,
    WantedLabels,
    check_text,
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

# Prompt and response, and a field with a number or null for each attribute, as in HelpSteer and
# HelpSteer2 (Wang et al. 2023, arXiv:2311.09528, and 2024, arXiv:2406.08673).


def _parse_rated_chat(
    values: list[dict[str, Any]], origin: Origin, columns: WantedLabels
) -> Rating:
    value = values[0]
    purpose = "an attribute of the model or server (in training: of model.regression.attributes)"
    labels = read_labels(value, columns, purpose)
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


# Raw text with a number or null for each attribute, as in NeMo-Aligner.


def _parse_rated_text(
    values: list[dict[str, Any]], origin: Origin, columns: WantedLabels
) -> Rating:
    label = values[0]["label"]
    numbers = label if isinstance(label, list) else [label]
    if columns.names and len(numbers) != len(columns.names):
        raise DataError(
            f"label: got {len(numbers)} numbers, wanted {len(columns.names)}, one for each of "
            f"{', '.join(columns.names)}"
        )
    named = zip([f"label of {name}" for name in columns.names], numbers, strict=False)
    labels = tuple(read_label(value, name, columns) for name, value in named)
    return Rating(check_text(values[0]["text"], "text"), labels, origin)


RATED_TEXT = Format(
    name="rated_text",
    kind=RecordKind.rating,
    matches=has("text", "label"),
    wanted="'text' and 'label'",
    parse=_parse_rated_text,
    sample=({"text": "User: 2+2?\nAssistant: 4", "label": [4, 0]},),
)


# One reply and whether it is good: unpaired preferences of TRL (its documentation, "Dataset
# formats") and ms-swift, as used by KTO (Ethayarajh et al. 2024, arXiv:2402.01306). The label is
# that of the only attribute of the model, whatever its name is.


def _is_unpaired(value: dict[str, Any]) -> bool:
    return {"prompt", "completion", "label"} <= set(value) or (
        isinstance(value.get("messages"), list) and "label" in value and not _has_labels(value)
    )


def _parse_unpaired(values: list[dict[str, Any]], origin: Origin, columns: WantedLabels) -> Rating:
    value = values[0]
    labels = _read_step_labels(value["label"], "label", columns)
    if {"prompt", "completion"} <= set(value):
        conversation = read_conversation(value["prompt"], value["completion"], "completion")
        return Rating(conversation, labels, origin)
    return Rating(check_text(value["messages"], "messages"), labels, origin)


UNPAIRED = Format(
    name="unpaired",
    kind=RecordKind.rating,
    matches=_is_unpaired,
    wanted="'prompt', 'completion' and 'label', or 'messages' and 'label'",
    parse=_parse_unpaired,
    sample=({"prompt": "2+2?", "completion": "4", "label": True},),
)


# HelpSteer3-Principle: a response, a principle, and whether the response fulfils the principle.
#
# See Wang et al. 2025, "RLBFF", arXiv:2509.21319, and the card of nvidia/HelpSteer3, which spells
# the key ``fulfilment``. The parser below does not read ``principle``: ``with_record_columns`` adds
# that column to records of all formats. ``domain`` is a record's source.

_FULFILMENTS = {"Yes": 1.0, "No": 0.0}


def _parse_helpsteer3_principle(
    values: list[dict[str, Any]], origin: Origin, columns: WantedLabels
) -> Rating:
    value = values[0]
    fulfilment = value["fulfilment"]
    if not isinstance(fulfilment, str) or fulfilment not in _FULFILMENTS:
        raise DataError(f"fulfilment: got {shown(fulfilment)}, wanted Yes or No")
    labels = _read_step_labels(_FULFILMENTS[fulfilment], "fulfilment", columns)
    conversation = read_conversation(value["context"], value["response"], "response", "context")
    return Rating(conversation, labels, origin, read_source(value.get("domain")))


HELPSTEER3_PRINCIPLE = Format(
    name="helpsteer3_principle",
    kind=RecordKind.rating,
    matches=has("context", "response", "principle", "fulfilment"),
    wanted="'context', 'response', 'principle' and 'fulfilment', Yes or No",
    parse=_parse_helpsteer3_principle,
    sample=(
        {
            "domain": "stem",
            "context": [{"role": "user", "content": "2+2?"}],
            "response": "4",
            "principle": "correctness",
            "fulfilment": "Yes",
        },
    ),
)


# Labels of one step, in the order of the label columns; None where a label is missing.

Labels = tuple[float | None, ...]


def _read_step_labels(label: Any, location: str, columns: WantedLabels) -> Labels:
    """Read the labels of one step, one for each label column.

    ``label`` is a bool or a number, a list of these with one item per column, or an object with
    the names of the columns as keys. ``location`` names its place in the record, for errors.
    """
    names = columns.names
    if isinstance(label, Mapping):
        missing = [name for name in names if name not in label]
        if missing:
            raise DataError(f"{location}: got {shown(label)}, wanted a number for {missing[0]!r}")
        label = [label[name] for name in names]
    values = label if isinstance(label, list) else [label]
    if label is None:
        values = [None] * len(names)
    if names and len(values) != len(names):
        raise DataError(
            f"{location}: got {len(values)} labels, wanted {len(names)}, of {', '.join(names)}"
        )
    numbers = [float(value) if isinstance(value, bool) else value for value in values]
    named = zip(names, numbers, strict=False)
    return tuple(read_label(number, location, columns) for _, number in named)


def _build_rating(
    prompt: Any,
    steps: Sequence[Any],
    labels: Sequence[Labels],
    origin: Origin,
    key: str,
    source: str = "",
) -> Rating:
    for number, step in enumerate(steps):
        if not isinstance(step, str) or is_blank(step):
            raise DataError(
                f"{key}[{number}]: got {shown(step)}, wanted a string that is not blank"
            )
    parts = [{"type": "text", "text": step} for step in steps]
    conversation = read_conversation(prompt, [{"role": "assistant", "content": parts}], key)
    return Rating(conversation, (), origin, source, tuple(labels))


# Prompt, steps and their labels: the columns of TRL's stepwise supervision (its documentation,
# "Dataset formats"), also those of trl-lib/prm800k and trl-lib/math_shepherd.


def _parse_stepwise(values: list[dict[str, Any]], origin: Origin, columns: WantedLabels) -> Rating:
    value = values[0]
    steps, step_labels = value["completions"], value["labels"]
    for key in ("completions", "labels"):
        if not isinstance(value[key], list) or not value[key]:
            raise DataError(
                f"{key}: got {shown(value[key])}, wanted a list with an item for each step"
            )
    if len(steps) != len(step_labels):
        raise DataError(
            f"labels: got {len(step_labels)} labels, wanted {len(steps)}, one for each completion"
        )
    labels = [
        _read_step_labels(label, f"labels[{number}]", columns)
        for number, label in enumerate(step_labels)
    ]
    return _build_rating(value["prompt"], steps, labels, origin, "completions")


STEPWISE = Format(
    name="stepwise",
    kind=RecordKind.rating,
    reads=ScoredPosition.step_ends,
    matches=has("prompt", "completions", "labels"),
    wanted="'prompt', 'completions' and 'labels', one for each step",
    parse=_parse_stepwise,
    sample=({"prompt": "2+2+2?", "completions": ["2+2=4", "4+2=5"], "labels": [True, False]},),
)


# Math-Shepherd as published (Wang et al. 2023, arXiv:2312.08935): ``input`` has a mark after every
# step, and ``label`` is the same text with a sign instead of each mark. The first step begins
# inside the text of the prompt.

_MARK = "\u043a\u0438"
_SIGNS = {"+": 1.0, "-": 0.0}
_FIRST = re.compile(r"\s*(?=Step 1:)")


def _is_math_shepherd(value: dict[str, Any]) -> bool:
    texts = value.get("input"), value.get("label")
    return all(isinstance(text, str) for text in texts) and _MARK in value["input"]


def _parse_math_shepherd(
    values: list[dict[str, Any]], origin: Origin, columns: WantedLabels
) -> Rating:
    value = values[0]
    *pieces, tail = read_string(value, "input").split(_MARK)
    signs, position = read_string(value, "label"), 0
    labels: list[Labels] = []
    for piece in pieces:
        start, position = position, position + len(piece)
        if signs[start:position] != piece or signs[position : position + 1] not in _SIGNS:
            raise DataError(
                f"label: got {signs[position : position + 20]!r} after step {len(labels) + 1}, "
                f"wanted the text of input with + or - instead of every {_MARK}"
            )
        labels.append(_read_step_labels(_SIGNS[signs[position]], "label", columns))
        position += 1
    begin = _FIRST.search(pieces[0])
    if begin is None or tail.strip():
        raise DataError(
            f"input: got {shown(value['input'])}, wanted a question, 'Step 1:' and steps, each "
            f"followed by {_MARK}"
        )
    steps = [pieces[0][begin.end() :], *pieces[1:]]
    prompt = pieces[0][: begin.start()]
    task = value.get("task")
    source = read_source(task) if isinstance(task, str) else ""
    steps = [step.strip() for step in steps]
    return _build_rating(prompt, steps, labels, origin, "input", source)


MATH_SHEPHERD = Format(
    name="math_shepherd",
    kind=RecordKind.rating,
    reads=ScoredPosition.step_ends,
    matches=_is_math_shepherd,
    wanted=f"'input' and 'label', with {_MARK} and a sign after every step",
    parse=_parse_math_shepherd,
    sample=(
        {
            "input": f"2+2+2? Step 1: 2+2=4 {_MARK}\nStep 2: 4+2=5 {_MARK}",
            "label": "2+2+2? Step 1: 2+2=4 +\nStep 2: 4+2=5 -",
            "task": "GSM8K",
        },
    ),
)


# PRM800K as published (Lightman et al. 2023, arXiv:2305.20050): a path of chosen steps, and other
# completions of each step, all rated 1, 0 (neutral) or -1. The path becomes one record. Each other
# completion becomes a record, too: the path up to its step, followed by the completion. In this
# record only the completion has a label, because the record of the path has those of the path. A
# step that an annotator wrote counts as right.


def _parse_prm800k(
    values: list[dict[str, Any]], origin: Origin, columns: WantedLabels
) -> list[Rating]:
    value = values[0]
    problem, steps = value["question"].get("problem"), value["label"]["steps"]
    if not isinstance(problem, str) or not isinstance(steps, list):
        raise DataError(
            f"question: got {shown(value['question'])}, wanted a 'problem' that is a text, and in "
            "label a list of 'steps'"
        )
    path: list[tuple[Any, Labels]] = []
    ratings: list[Rating] = []

    def add(labelled_steps: Sequence[tuple[Any, Labels]]) -> None:
        texts, labels = zip(*labelled_steps, strict=True)
        ratings.append(_build_rating(problem, texts, labels, origin, "label.steps"))

    missing: Labels = (None,) * len(columns.names)
    for number, step in enumerate(steps):
        completions = _read_completions(step, f"label.steps[{number}]", columns)
        for text, labels, is_chosen in completions:
            if not is_chosen:
                add([*((previous, missing) for previous, _ in path), (text, labels)])
        chosen = [(text, labels) for text, labels, is_chosen in completions if is_chosen]
        if not chosen:
            break
        path.append(chosen[0])
    if path:
        add(path)
    if not ratings:
        raise DataError(f"label: got {shown(value['label'])}, wanted a step with a text")
    return ratings


def _read_completions(
    step: Any, location: str, columns: WantedLabels
) -> list[tuple[Any, Labels, bool]]:
    """List the completions of a step of PRM800K, including one that an annotator wrote.

    Returns:
        For each completion: its text, its labels, and True if the path of chosen steps continues
        with it.
    """
    if not isinstance(step, dict):
        raise DataError(f"{location}: got {shown(step)}, wanted an object with 'completions'")
    chosen, written = step.get("chosen_completion"), step.get("human_completion")
    completions = step.get("completions") or []
    if not isinstance(completions, list):
        raise DataError(f"{location}.completions: got {shown(completions)}, wanted a list")
    labelled = []
    for number, item in enumerate(completions):
        place = f"{location}.completions[{number}]"
        if not isinstance(item, dict) or item.get("rating") not in (-1, 0, 1, None):
            raise DataError(f"{place}: got {shown(item)}, wanted a string and a rating -1, 0 or 1")
        label = {-1: 0.0, 0: columns.neutral, 1: 1.0, None: None}[item.get("rating")]
        labels = _read_step_labels(label, place, columns)
        labelled.append((item.get("text"), labels, number == chosen))
    if chosen is None and written is not None:
        text = written.get("text") if isinstance(written, dict) else written
        labels = _read_step_labels(1.0, f"{location}.human_completion", columns)
        labelled.append((text, labels, True))
    return labelled


def _is_prm800k(value: dict[str, Any]) -> bool:
    question, label = value.get("question"), value.get("label")
    return isinstance(question, dict) and isinstance(label, dict) and "steps" in label


PRM800K = Format(
    name="prm800k",
    kind=RecordKind.rating,
    reads=ScoredPosition.step_ends,
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


# Messages whose assistant turns have a label, or an object with a label for each attribute.

_LABEL = "label"


def _has_labels(value: dict[str, Any]) -> bool:
    messages = value.get("messages")
    return isinstance(messages, list) and any(
        isinstance(message, dict) and _LABEL in message for message in messages
    )


def _parse_labelled_turns(
    values: list[dict[str, Any]], origin: Origin, columns: WantedLabels
) -> Rating:
    labels: list[Labels] = []
    unlabelled: Messages = []
    for number, message in enumerate(values[0]["messages"]):
        location = f"messages[{number}]"
        if not isinstance(message, dict):
            raise DataError(f"{location}: got {shown(message)}, wanted an object")
        label, is_turn = message.get(_LABEL), message.get("role") == "assistant"
        if label is not None and not is_turn:
            raise DataError(
                f"{location}.{_LABEL}: got {shown(label)} of role {shown(message.get('role'))}, "
                "but only assistant turns may have labels"
            )
        if is_turn:
            labels.append(_read_step_labels(label, f"{location}.{_LABEL}", columns))
        unlabelled.append({key: item for key, item in message.items() if key != _LABEL})
    return Rating(check_text(unlabelled, "messages"), (), origin, steps=tuple(labels))


LABELLED_TURNS = Format(
    name="labelled_turns",
    kind=RecordKind.rating,
    reads=ScoredPosition.turns,
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
