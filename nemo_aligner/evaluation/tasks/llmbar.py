"""LLMBar (Zeng et al. 2023, arXiv 2310.07641): of two outputs one follows the instruction."""

from __future__ import annotations

from typing import Any

from nemo_aligner.evaluation.tasks.base import (
    Task,
    TaskItem,
    first_is_above,
    labelled_item,
    pair_rows,
)

_LLMBAR_ORDERS = {1: ("output_1", "output_2"), 2: ("output_2", "output_1")}


def _read_llmbar(value: dict[str, Any]) -> TaskItem | None:
    return labelled_item(value, "input", _LLMBAR_ORDERS)


LLMBAR = Task(
    name="llmbar",
    file="princeton-nlp/LLMBar, a dataset.json of Dataset/",
    read=_read_llmbar,
    judge=first_is_above,
    summarise=pair_rows,
    sample={"input": "2+2?", "output_1": "5", "output_2": "4", "label": 2},
)
