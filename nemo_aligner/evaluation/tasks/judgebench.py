"""JudgeBench (Tan et al. 2024, arXiv 2410.12784): two replies, one of them objectively right.

Its sources make four categories. A reward does not see which reply stands first, so the benchmark's
second order says nothing new.
"""

from __future__ import annotations

from typing import Any

from nemo_aligner.errors import DataError
from nemo_aligner.evaluation.tasks.base import Task, TaskItem, asked, first_is_above, pair_rows

_CATEGORIES = {
    "mmlu-pro": "knowledge",
    "livebench-reasoning": "reasoning",
    "livebench-math": "math",
    "livecodebench": "coding",
}
_ORDERS = {"A>B": ("response_A", "response_B"), "B>A": ("response_B", "response_A")}


def _read(value: dict[str, Any]) -> TaskItem:
    label, source = value["label"], str(value["source"])
    if label not in _ORDERS:
        raise DataError(f"label: got {label!r:.60}, wanted {' or '.join(_ORDERS)}")
    category = next((name for key, name in _CATEGORIES.items() if source.startswith(key)), source)
    texts = tuple(asked(value["question"], value[side], side) for side in _ORDERS[label])
    return TaskItem(str(value["pair_id"]), category, texts)


TASK = Task(
    name="judgebench",
    file="ScalerLab/JudgeBench, splits gpt and claude",
    read=_read,
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
