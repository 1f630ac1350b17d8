"""UltraFeedback: an instruction, and completions with scores.

Cui et al. 2023, arXiv:2310.01377. The order is that of ``fine-grained_score``, the mean of four
aspects' ratings, where every completion has one, and otherwise that of ``overall_score``, which was
10 instead of 1 for many completions of the data's first version (OpenBMB/UltraFeedback, "Update").
Equal scores are a tie.
"""

from __future__ import annotations

from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.formats.base import Format, WantedLabels, has
from nemo_aligner.data.formats.fields import (
    LABEL_MARGIN,
    read_conversation,
    read_label,
    read_objects,
    read_pair_labels,
)
from nemo_aligner.data.formats.ranking import ranked
from nemo_aligner.data.records import Comparison, Origin
from nemo_aligner.errors import DataError

_SCORES = ("fine-grained_score", "overall_score")


def _parse(values: list[dict[str, Any]], origin: Origin, wanted: WantedLabels) -> Comparison:
    value = values[0]
    completions = read_objects(value, "completions", "response")
    texts = [
        read_conversation(value["instruction"], one["response"], f"completion {n}", "instruction")
        for n, one in enumerate(completions, start=1)
    ]
    scores = _scores(completions)
    # More than two completions differ by more than one number.
    margin = {LABEL_MARGIN: abs(scores[0] - scores[1])} if len(scores) == 2 else {}
    labels = read_pair_labels({**margin, **value}, wanted)
    return ranked(texts, [-score for score in scores], origin, labels)


def _scores(completions: list[dict[str, Any]]) -> list[float]:
    for key in _SCORES:
        given = [
            read_label(one.get(key), f"completion {number}, {key}", WantedLabels())
            for number, one in enumerate(completions, start=1)
        ]
        scores = [score for score in given if score is not None]
        if len(scores) == len(given):
            return scores
    raise DataError(f"completions: wanted a number in all of them, {' or '.join(_SCORES)}")


ULTRAFEEDBACK = Format(
    name="ultrafeedback",
    kind=RecordKind.comparison,
    matches=has("instruction", "completions"),
    wanted="'instruction' and 'completions', two or more objects with 'response' and a score, "
    "'fine-grained_score' or 'overall_score'",
    parse=_parse,
    sample=(
        {
            "instruction": "2+2?",
            "completions": [
                {"response": "5", "fine-grained_score": 1.5, "overall_score": 2.0},
                {"response": "4", "fine-grained_score": 4.75, "overall_score": 8.5},
                {"response": "Four.", "fine-grained_score": 4.75, "overall_score": 8.0},
            ],
        },
    ),
)
