"""Auto-J's pairs (Li et al. 2023, arXiv 2310.05470): two responses in one of 58 scenarios.

Where people found none better (label 2) there is no verdict to get right: such pairs are left out.
"""

from __future__ import annotations

from typing import Any

from nemo_aligner.errors import DataError
from nemo_aligner.evaluation.tasks.base import Task, TaskItem, asked, first_is_above, pair_rows

_ORDERS = {0: ("response 1", "response 2"), 1: ("response 2", "response 1")}
_TIE = 2


def _read(value: dict[str, Any]) -> TaskItem | None:
    label = value["label"]
    if label == _TIE:
        return None
    if label not in _ORDERS:
        raise DataError(f"label: got {label!r:.60}, wanted 0, 1 or 2")
    texts = tuple(asked(value["prompt"], value[side], side) for side in _ORDERS[label])
    return TaskItem("", str(value["scenario"]), texts)


TASK = Task(
    name="autoj",
    file="GAIR-NLP/auto-j, testdata_pairwise.jsonl (autoj_pairwise.json of prometheus-eval)",
    read=_read,
    judge=first_is_above,
    summarise=pair_rows,
    sample={
        "scenario": "math_reasoning",
        "prompt": "2+2?",
        "response 1": "4",
        "response 2": "5",
        "label": 0,
    },
)
