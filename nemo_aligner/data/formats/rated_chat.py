"""Prompt and response, and a field with a number or null for each attribute.

HelpSteer and HelpSteer2 are written so (Wang et al. 2023, arXiv:2311.09528, and 2024,
arXiv:2406.08673).
"""

from __future__ import annotations

from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.formats.base import Format, WantedLabels, has
from nemo_aligner.data.formats.fields import read_conversation, read_labels, split_turns
from nemo_aligner.data.records import Origin, Rating


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
