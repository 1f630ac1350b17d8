"""HelpSteer2-Preference and HelpSteer3-Preference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.formats.base import (
    Format,
    WantedLabels,
    has,
    ranked_by_strength,
    read_conversation,
    read_source,
    split_turns,
)
from nemo_aligner.data.records import Comparison, Origin

# HelpSteer2-Preference: two responses to a prompt, and which is better by how much.
#
# Wang et al. 2024, arXiv:2410.01257. ``preference_strength`` is from -3 (response 1 is much better)
# to 3 (response 2 is much better), by the card of the data set nvidia/HelpSteer2. A prompt may have
# several turns (``split_turns``).


def _parse_helpsteer2_preference(
    values: list[dict[str, Any]], origin: Origin, wanted: WantedLabels
) -> Comparison:
    value = values[0]
    prompt = split_turns(value["prompt"])
    texts = [read_conversation(prompt, value[key], key) for key in ("response_1", "response_2")]
    return ranked_by_strength(texts, "preference_strength", value, origin, wanted)


HELPSTEER2_PREFERENCE = Format(
    name="helpsteer2_preference",
    kind=RecordKind.comparison,
    matches=has("prompt", "response_1", "response_2", "preference_strength"),
    wanted="'prompt', 'response_1', 'response_2' and 'preference_strength', from -3 to 3",
    parse=_parse_helpsteer2_preference,
    sample=({"prompt": "2+2?", "response_1": "5", "response_2": "4", "preference_strength": 3},),
)


# HelpSteer3-Preference: two responses to a context, and which is better by how much.
#
# Wang et al. 2025, arXiv:2505.11475. ``overall_preference`` is from -3 (response 1 is much better)
# to 3 (response 2 is much better), by the card of the data set nvidia/HelpSteer3; NeMo RL reads the
# sign so, too. Its ``domain`` is the source.


def _parse_helpsteer3(
    values: list[dict[str, Any]], origin: Origin, wanted: WantedLabels
) -> Comparison:
    value = values[0]
    texts = [
        read_conversation(value["context"], value[key], key, "context")
        for key in ("response1", "response2")
    ]
    record = ranked_by_strength(texts, "overall_preference", value, origin, wanted)
    return replace(record, source=read_source(value.get("domain")))


HELPSTEER3 = Format(
    name="helpsteer3",
    kind=RecordKind.comparison,
    matches=has("context", "response1", "response2", "overall_preference"),
    wanted="'context', 'response1', 'response2' and 'overall_preference', from -3 to 3",
    parse=_parse_helpsteer3,
    sample=(
        {
            "domain": "stem",
            "context": [{"role": "user", "content": "2+2?"}],
            "response1": "4",
            "response2": "5",
            "overall_preference": -2,
        },
    ),
)
