"""Two raw texts, prompt included: TRL's standard format with an implicit prompt."""

from __future__ import annotations

from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.formats.base import Format, WantedLabels
from nemo_aligner.data.formats.fields import read_string
from nemo_aligner.data.formats.hh import is_hh
from nemo_aligner.data.formats.scored_pairs import read_margin_labels
from nemo_aligner.data.records import Comparison, Origin

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
