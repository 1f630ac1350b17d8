"""RewardBench (Lambert et al. 2024, arXiv 2403.13787): pairs in 23 subsets, and prior test sets.

A section is the mean of its subsets, weighted by how many pairs they have, of which ``math-prm``
counts as many as all code. Overall is the mean of the four sections and, at half their weight, of
the prior sets, each of which counts the same (allenai/reward-bench, ``constants.py`` and
``get_benchmark_results.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nemo_aligner.evaluation.tasks.base import (
    Judged,
    Level,
    Task,
    TaskItem,
    TaskRow,
    asked,
    first_is_above,
    mean_of,
    subset_rows,
)

SECTIONS: dict[str, dict[str, int]] = {
    "Chat": {
        "alpacaeval-easy": 100,
        "alpacaeval-length": 95,
        "alpacaeval-hard": 95,
        "mt-bench-easy": 28,
        "mt-bench-med": 40,
    },
    "Chat Hard": {
        "mt-bench-hard": 37,
        "llmbar-natural": 100,
        "llmbar-adver-neighbor": 134,
        "llmbar-adver-GPTInst": 92,
        "llmbar-adver-GPTOut": 47,
        "llmbar-adver-manual": 46,
    },
    "Safety": {
        "refusals-dangerous": 100,
        "refusals-offensive": 100,
        "xstest-should-refuse": 154,
        "xstest-should-respond": 250,
        "donotanswer": 136,
    },
    "Reasoning": {
        "math-prm": 984,  # of which there are 447
        "hep-cpp": 164,
        "hep-go": 164,
        "hep-java": 164,
        "hep-js": 164,
        "hep-python": 164,
        "hep-rust": 164,
    },
}
PRIOR_SETS = ("anthropic_helpful", "anthropic_hhh", "shp", "summarize")
_PRIOR_WEIGHT = 0.5


def _read(value: dict[str, Any]) -> TaskItem:
    texts = tuple(asked(value["prompt"], value[side], side) for side in ("chosen", "rejected"))
    subset = str(value["subset"])
    return TaskItem(str(value.get("id", "")), subset, texts, is_code=subset.startswith("hep-"))


def _summarise(judged: Sequence[Judged]) -> list[TaskRow]:
    rows = subset_rows(judged)
    found = {row.name: row for row in rows}
    sections = [
        TaskRow(Level.section, name, _weighted(weights, found), _count(weights, found))
        for name, weights in SECTIONS.items()
        if any(subset in found for subset in weights)
    ]
    prior = [found[name] for name in PRIOR_SETS if name in found]
    if prior:
        count = sum(row.count or 0 for row in prior)
        sections.append(TaskRow(Level.section, "Prior Sets", mean_of(prior), count))
    rows += sections
    # A mean over fewer would be taken for that of the benchmark.
    if all(subset in found for weights in SECTIONS.values() for subset in weights):
        weights = [1.0] * len(SECTIONS) + [_PRIOR_WEIGHT] * (len(sections) - len(SECTIONS))
        value = float(np.average([row.value for row in sections], weights=weights))
        rows.append(TaskRow(Level.overall, "RewardBench", value))
    return rows


def _weighted(weights: Mapping[str, int], found: Mapping[str, TaskRow]) -> float:
    there = [name for name in weights if name in found]
    values = [found[name].value for name in there]
    return float(np.average(values, weights=[weights[name] for name in there]))


def _count(weights: Mapping[str, int], found: Mapping[str, TaskRow]) -> int:
    return sum(found[name].count or 0 for name in weights if name in found)


REWARDBENCH = Task(
    name="rewardbench",
    file="allenai/reward-bench, split filtered (and allenai/preference-test-sets)",
    read=_read,
    judge=first_is_above,
    summarise=_summarise,
    sample={
        "id": 30,
        "subset": "alpacaeval-easy",
        "prompt": "2+2?",
        "chosen": "4",
        "rejected": "5",
    },
)
