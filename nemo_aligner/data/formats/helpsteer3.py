"""HelpSteer3-Preference: two responses to a context, and which is better by how much.

Wang et al. 2025, arXiv:2505.11475. ``overall_preference`` is from -3 (response 1 is much better) to
3 (response 2 is much better), by the card of the data set nvidia/HelpSteer3; NeMo RL reads the sign
so, too. Its ``domain`` is the source.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.formats.base import Format, WantedLabels, has
from nemo_aligner.data.formats.fields import read_conversation, read_source
from nemo_aligner.data.formats.ranking import ranked_by_strength
from nemo_aligner.data.records import Comparison, Origin


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
