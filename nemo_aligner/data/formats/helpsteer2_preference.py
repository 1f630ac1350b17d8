"""HelpSteer2-Preference: two responses to a prompt, and which is better by how much.

Wang et al. 2024, arXiv:2410.01257. ``preference_strength`` is from -3 (response 1 is much better)
to 3 (response 2 is much better), by the card of the data set nvidia/HelpSteer2. A prompt may have
several turns (``split_turns``).
"""

from __future__ import annotations

from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.formats.base import Format, WantedLabels, has
from nemo_aligner.data.formats.fields import read_conversation, split_turns
from nemo_aligner.data.formats.ranking import ranked_by_strength
from nemo_aligner.data.records import Comparison, Origin


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
