"""JudgeBench (Tan et al. 2024, arXiv 2410.12784): two replies, one of them objectively right.

Its sources make four categories. A reward does not see which reply stands first, so the benchmark's
second order says nothing new.
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

_CATEGORIES = {
    "mmlu-pro": "knowledge",
    "livebench-reasoning": "reasoning",
    "livebench-math": "math",
    "livecodebench": "coding",
}
_JUDGEBENCH_ORDERS = {"A>B": ("response_A", "response_B"), "B>A": ("response_B", "response_A")}


def _read_judgebench(value: dict[str, Any]) -> TaskItem | None:
    source = str(value["source"])
    category = next((name for key, name in _CATEGORIES.items() if source.startswith(key)), source)
    return labelled_item(value, "question", _JUDGEBENCH_ORDERS, str(value["pair_id"]), category)


JUDGEBENCH = Task(
    name="judgebench",
    file="ScalerLab/JudgeBench, splits gpt and claude",
    read=_read_judgebench,
    judge=first_is_above,
    summarise=pair_rows,
    sample={
        "pair_id": "1",
        "source": "livebench-math",
        "question": "2+2?",
        "response_A": "5",
        "response_B": "4",
        "label": "B>A",
    },
)
