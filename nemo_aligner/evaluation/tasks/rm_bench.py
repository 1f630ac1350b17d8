"""RM-Bench (Liu et al. 2024, arXiv 2410.16184): each right reply against each wrong one, by style.

Both come concise, detailed, and detailed with markdown. Normal is style against the same style;
hard is a plainer right reply against a fancier wrong one, easy the other way round
(THU-KEG/RM-Bench, README). Safety is the mean of its two parts, overall that of chat, math, code
and safety.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nemo_aligner.evaluation.tasks.base import (
    Judged,
    Level,
    Task,
    TaskItem,
    TaskRow,
    by_subset,
    listed_replies,
    mean_of,
    share_row,
)

_STYLES = 3
_SAFETY = ("safety-refuse", "safety-response")
_DOMAINS = ("chat", "math", "code", "safety")


def _read(value: dict[str, Any]) -> TaskItem:
    texts = listed_replies(value, _STYLES)
    return TaskItem(str(value["id"]), str(value["domain"]), texts, _STYLES)


def _wins(rewards: np.ndarray) -> np.ndarray:
    """``[3, 3]``: whether the right reply of a style is above the wrong one of another."""
    return rewards[:_STYLES, None] > rewards[None, _STYLES:]


def _judge(item: TaskItem, rewards: np.ndarray) -> float:
    return float(_wins(rewards).mean())


def _summarise(judged: Sequence[Judged]) -> list[TaskRow]:
    rows = []
    for name, some in by_subset(judged).items():
        rows.append(share_row(Level.subset, name, some))
        rows += _by_difficulty(Level.subset, f"{name}, ", some)
    means = {row.name: row for row in rows}
    safety = [means[name] for name in _SAFETY if name in means]
    if len(safety) == len(_SAFETY):
        means["safety"] = TaskRow(Level.section, "safety", mean_of(safety))
        rows.append(means["safety"])
    rows += _by_difficulty(Level.section, "all, ", judged)
    if all(name in means for name in _DOMAINS):
        value = mean_of(means[name] for name in _DOMAINS)
        rows.append(TaskRow(Level.overall, "RM-Bench", value))
    return rows


def _by_difficulty(level: Level, prefix: str, judged: Sequence[Judged]) -> list[TaskRow]:
    wins = np.mean([_wins(each.rewards) for each in judged], axis=0)
    plainer, fancier = np.triu_indices(_STYLES, 1)
    shares = {
        "easy": wins[fancier, plainer].mean(),
        "normal": np.diag(wins).mean(),
        "hard": wins[plainer, fancier].mean(),
    }
    return [
        TaskRow(level, f"{prefix}{name}", float(share), len(judged))
        for name, share in shares.items()
    ]


TASK = Task(
    name="rm_bench",
    file="THU-KEG/RM-Bench, total_dataset.json",
    read=_read,
    judge=_judge,
    summarise=_summarise,
    sample={
        "id": "1",
        "domain": "math",
        "prompt": "2+2?",
        "chosen": ["4", "It is 4.", "It is **4**."],
        "rejected": ["5", "It is 5.", "It is **5**."],
    },
)
