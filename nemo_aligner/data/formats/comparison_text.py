"""Two adjacent lines of raw text, as NeMo-Aligner has them."""

from __future__ import annotations

from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.formats.base import Format, WantedLabels
from nemo_aligner.data.formats.fields import read_pair_labels, read_string
from nemo_aligner.data.records import Comparison, Origin


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
