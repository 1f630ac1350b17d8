"""Rated replies: rated_chat and NeMo-Aligner's rated_text."""

from __future__ import annotations

from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.formats.base import (
    Format,
    WantedLabels,
    checked,
    has,
    read_conversation,
    read_label,
    read_labels,
    split_turns,
)
from nemo_aligner.data.records import Origin, Rating
from nemo_aligner.utils.errors import DataError

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
