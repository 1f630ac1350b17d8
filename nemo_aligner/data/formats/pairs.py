"""Pairs by plain field names: chat_pairs, text_pairs and NeMo-Aligner's comparison_text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.formats.base import (
    Format,
    PairKeys,
    WantedLabels,
    read_conversation,
    read_margin_labels,
    read_pair_labels,
    read_string,
)
from nemo_aligner.data.formats.hh import is_hh
from nemo_aligner.data.records import Comparison, Origin

# Prompt, chosen and rejected reply, each a string or a list of messages.
#
# TRL's conversational pairs, UltraFeedback as binarized, Tulu 3's and Skywork's preferences are so,
# and under other names what NeMo RL's ``BinaryPreferenceDataset`` reads (NVIDIA-NeMo/RL,
# docs/guides/rm.md, "Datasets").

_CHAT_PAIRS = "chat_pairs"
_CHAT_SAMPLE = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}


def pairs_by(keys: PairKeys) -> Format:
    """Pairs whose fields are called by ``keys``."""

    def matches(value: dict[str, Any]) -> bool:
        return {keys.chosen, keys.rejected} <= set(value) and (
            keys.prompt in value or not isinstance(value[keys.chosen], str)
        )

    def parse(values: list[dict[str, Any]], origin: Origin, wanted: WantedLabels) -> Comparison:
        prompt = values[0].get(keys.prompt)
        chosen, rejected = (
            read_conversation(prompt, values[0][key], key, keys.prompt)
            for key in (keys.chosen, keys.rejected)
        )
        labels = read_margin_labels(values[0], wanted)
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


_WITH_USUAL_KEYS = pairs_by(PairKeys())
CHAT_PAIRS = replace(
    _WITH_USUAL_KEYS, matches=lambda value: _WITH_USUAL_KEYS.matches(value) and not is_hh(value)
)


# Two raw texts, prompt included: TRL's standard format with an implicit prompt.

# Names that prompts have elsewhere: whether such a field is one, only its owner knows.
MAYBE_PROMPTS = (
    "question", "instruction", "input", "query", "context", "messages", "conversations",
)  # fmt: skip


def _are_texts(value: dict[str, Any]) -> bool:
    return (
        {"chosen", "rejected"} <= set(value)
        and "prompt" not in value
        and not any(value.get(key) for key in MAYBE_PROMPTS)
        and isinstance(value["chosen"], str)
        and not is_hh(value)
    )


def _parse_text_pairs(
    values: list[dict[str, Any]], origin: Origin, wanted: WantedLabels
) -> Comparison:
    chosen, rejected = (read_string(values[0], key) for key in ("chosen", "rejected"))
    labels = read_margin_labels(values[0], wanted)
    return Comparison.of_pair(chosen, rejected, origin, labels=labels)


TEXT_PAIRS = Format(
    name="text_pairs",
    kind=RecordKind.comparison,
    matches=_are_texts,
    wanted="'chosen' and 'rejected', raw texts, without a field for the prompt",
    parse=_parse_text_pairs,
    sample=({"chosen": "The sky is blue.", "rejected": "The sky is green."},),
)


# Two adjacent lines of raw text, as NeMo-Aligner has them.


def _parse_comparison_text(
    values: list[dict[str, Any]], origin: Origin, wanted: WantedLabels
) -> Comparison:
    chosen, rejected = (read_string(value, "text") for value in values)
    return Comparison.of_pair(chosen, rejected, origin, labels=read_pair_labels(values[0], wanted))


# Other formats' keys: their records may have a whole text beside, as dumps of a template do.
_OTHERS = {"label", "prompt", "chosen", "rejected", "response", "completions", "messages"}


def _is_text(value: dict[str, Any]) -> bool:
    return "text" in value and _OTHERS.isdisjoint(value)


COMPARISON_TEXT = Format(
    name="comparison_text",
    kind=RecordKind.comparison,
    matches=_is_text,
    wanted="'text', without 'label', on two lines: chosen, then rejected",
    parse=_parse_comparison_text,
    sample=({"text": "User: 2+2?\nAssistant: 4"}, {"text": "User: 2+2?\nAssistant: 5"}),
    lines_per_record=2,
)
