"""PandaLM's test set: two responses to an instruction, judged by three people.

Wang et al. 2023, arXiv:2306.05087. An annotator's label is 1 or 2, the response that is better, or
0 where they are alike (WeOpenML/PandaLM, README, "Test data"). What two of the three say counts; it
is a tie if they say three different things. The input stands below the instruction.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.formats.base import Format, WantedLabels, has
from nemo_aligner.data.formats.fields import read_conversation, read_pair_labels, read_string
from nemo_aligner.data.formats.ranking import ranked
from nemo_aligner.data.records import Comparison, Origin
from nemo_aligner.errors import DataError

_RESPONSES = ("response1", "response2")
_ANNOTATORS = ("annotator1", "annotator2", "annotator3")
# A label -> whether the second response is better (1), or the first (-1).
_VOTES = {0: 0, 1: -1, 2: 1}


def _parse(values: list[dict[str, Any]], origin: Origin, wanted: WantedLabels) -> Comparison:
    value = values[0]
    parts = [read_string(value, key) for key in ("instruction", "input") if key in value]
    prompt = "\n\n".join(part for part in parts if part.strip())
    texts = [read_conversation(prompt, read_string(value, key), key) for key in _RESPONSES]
    # Of three votes the one in the middle is that of any two that agree.
    vote = median(_vote(value, key) for key in _ANNOTATORS)
    return ranked(texts, (vote, -vote), origin, read_pair_labels(value, wanted))


def _vote(value: dict[str, Any], key: str) -> int:
    label = value[key]
    if isinstance(label, bool) or not isinstance(label, int) or label not in _VOTES:
        raise DataError(f"{key}: got {label!r:.60}, wanted 1 or 2, the better response, or 0")
    return _VOTES[label]


PANDALM = Format(
    name="pandalm",
    kind=RecordKind.comparison,
    matches=has("instruction", *_RESPONSES, *_ANNOTATORS),
    wanted="'instruction', 'response1', 'response2', and 0, 1 or 2 of "
    f"{', '.join(map(repr, _ANNOTATORS))}",
    parse=_parse,
    sample=(
        {
            "instruction": "Add the numbers.",
            "input": "2, 2",
            "response1": "5",
            "response2": "4",
            "annotator1": 2,
            "annotator2": 2,
            "annotator3": 0,
        },
    ),
)
