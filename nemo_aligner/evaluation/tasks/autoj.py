"""Auto-J's pairs (Li et al. 2023, arXiv 2310.05470): two responses in one of 58 scenarios.

Where people found none better (label 2) there is no verdict to get right: such pairs are left out.
"""

from __future__ import annotations

from typing import Any

from nemo_aligner.evaluation.tasks.base import (
    Task,
    TaskItem,
    first_is_above,
    labelled_item,
    pair_rows,
)

_AUTOJ_ORDERS = {0: ("response 1", "response 2"), 1: ("response 2", "response 1"), 2: None}


def _read_autoj(value: dict[str, Any]) -> TaskItem | None:
    return labelled_item(value, "prompt", _AUTOJ_ORDERS, subset=str(value["scenario"]))


AUTOJ = Task(
    name="autoj",
    file="GAIR-NLP/auto-j, testdata_pairwise.jsonl (autoj_pairwise.json of prometheus-eval)",
    read=_read_autoj,
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
