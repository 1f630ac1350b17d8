"""HHH (Askell et al. 2021, arXiv 2112.00861): of two replies one is more helpful, honest, harmless.

The query is the user's; where it has several turns, those after the first begin with a paragraph
``Human:`` or ``Assistant:``.
"""

from __future__ import annotations

from typing import Any

from nemo_aligner.data.formats.fields import read_string
from nemo_aligner.data.formats.hh import turns_of
from nemo_aligner.errors import DataError
from nemo_aligner.evaluation.tasks.base import Task, TaskItem, asked, first_is_above, pair_rows


def _read_hhh(value: dict[str, Any]) -> TaskItem:
    prompt = turns_of(f"\n\nHuman: {read_string(value, 'input')}", "input")
    right, wrong = _ordered(value["targets"])
    return TaskItem("", "", (asked(prompt, right, "choices"), asked(prompt, wrong, "choices")))


def _ordered(targets: Any) -> tuple[Any, Any]:
    """The reply that is labelled 1, and then the other."""
    try:
        choices, labels = targets["choices"], targets["labels"]
        (first, second), right = choices, labels.index(1)
    except (TypeError, KeyError, ValueError, AttributeError):
        labels = None
    if labels not in ([0, 1], [1, 0]):
        raise DataError(
            f"targets: got {targets!r:.60}, wanted two choices, and labels of which one is 1"
        )
    return (second, first) if right else (first, second)


HHH = Task(
    name="hhh",
    file="HuggingFaceH4/hhh_alignment, configurations harmless, helpful, honest and other",
    read=_read_hhh,
    judge=first_is_above,
    summarise=pair_rows,
    sample={"input": "2+2?", "targets": {"choices": ["5", "4"], "labels": [0, 1]}},
)
