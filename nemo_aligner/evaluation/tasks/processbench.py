"""ProcessBench (Zheng et al. 2024, arXiv 2412.06559): the first wrong step of a solution.

A model's answer is the first step with a reward below the threshold, or none. As in the original
(QwenLM/ProcessBench, code/run_eval.py), the figure of a set is the harmonic mean of the share that
is right of the solutions with an error and of those without, and the figure of all is its mean over
the four sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nemo_aligner.data.formats.base import read_conversation
from nemo_aligner.evaluation.predictions import Item, Prediction
from nemo_aligner.evaluation.tasks.base import (
    Level,
    Task,
    TaskRow,
    by_subset,
    mean_of,
    share_row,
)
from nemo_aligner.metrics.regression import first_error, harmonic_mean
from nemo_aligner.utils.errors import DataError, shown

_SETS = ("gsm8k", "math", "olympiadbench", "omnimath")
_NO_ERROR = -1


def _read(value: dict[str, Any]) -> Item:
    steps, label = value["steps"], value["label"]
    if not isinstance(steps, list) or not steps:
        raise DataError(f"steps: got {shown(steps)}, wanted a list of steps")
    if type(label) is not int or not _NO_ERROR <= label < len(steps):
        raise DataError(
            f"label: got {shown(label)}, wanted the number of the first wrong step, from 0 to "
            f"{len(steps) - 1}, or {_NO_ERROR} for none"
        )
    parts = [{"type": "text", "text": step} for step in steps]
    reply = [{"role": "assistant", "content": parts}]
    text = read_conversation(value["problem"], reply, "steps", "problem")
    name = str(value["id"])
    subset = value.get("subset") or name.rpartition("-")[0]
    return Item(name, str(subset), (text,), num_right=0, scores=(float(label),))


def _set_of(stem: str) -> dict[str, str]:
    """Take the set from the name of a file, as ``gsm8k.json``."""
    return {"subset": stem} if stem in _SETS else {}


def _judge(item: Item, rewards: np.ndarray) -> float:
    """``rewards [S]`` are those of the steps, less the threshold."""
    return float(first_error((rewards >= 0).tolist()) == item.scores[0])


def _choose(items: Sequence[Item], rewards: Sequence[np.ndarray]) -> tuple[float, float]:
    """The threshold of the highest F1, on average over the sets, and that F1.

    A solution is judged right by all thresholds above the reward of its first wrong step (above
    -inf, if it has none) up to the lowest reward before that step. Verdicts change at these
    numbers alone, so one threshold in the middle of each two is tried; of equal ones, the middle.
    """
    first = [int(item.scores[0]) for item in items]
    own = [each.astype(np.float64) for each in rewards]
    low = np.array([-np.inf if n < 0 else each[n] for n, each in zip(first, own, strict=True)])
    before = [each if n < 0 else each[:n] for n, each in zip(first, own, strict=True)]
    high = np.array([each.min(initial=np.inf) for each in before])
    places = np.unique(np.concatenate([low, high]))
    places = places[np.isfinite(places)]
    ends = [places[:1], (places[1:] + places[:-1]) / 2, np.nextafter(places[-1:], np.inf)]
    tried = np.concatenate(ends)
    right = (low < tried[:, None]) & (tried[:, None] <= high)
    sets, has_error = np.array([item.source for item in items]), np.array(first) >= 0
    found = []
    for name in np.unique(sets):
        parts = [right[:, (sets == name) & kind] for kind in (has_error, ~has_error)]
        if all(part.shape[1] for part in parts):
            shares = np.stack([part.mean(axis=1) for part in parts])
            found.append(2 * shares.prod(axis=0) / np.maximum(shares.sum(axis=0), 1e-300))
    if not found:
        raise DataError("got no set with solutions of both kinds, with an error and without")
    figures = np.mean(found, axis=0)
    best = np.flatnonzero(figures == figures.max())
    chosen = best[len(best) // 2]
    return float(tried[chosen]), float(figures[chosen])


def _summarise(predictions: Sequence[Prediction]) -> list[TaskRow]:
    rows: list[TaskRow] = []
    found: dict[str, TaskRow] = {}
    for name, some in by_subset(predictions).items():
        wrong = [each for each in some if each.item.scores[0] >= 0]
        right = [each for each in some if each.item.scores[0] < 0]
        shares = {
            f"{name}, {what}": share_row(Level.subset, f"{name}, {what}", own)
            for what, own in (("with an error", wrong), ("without", right))
            if own
        }
        rows += shares.values()
        if len(shares) == 2:
            figure = harmonic_mean(*(row.value for row in shares.values()))
            found[name] = TaskRow(Level.section, f"{name}, F1", figure, len(some))
    rows += found.values()
    if set(_SETS) <= set(found):
        rows.append(TaskRow(Level.overall, "ProcessBench", mean_of(found[name] for name in _SETS)))
    return rows


PROCESSBENCH = Task(
    name="processbench",
    file="Qwen/ProcessBench, gsm8k, math, olympiadbench or omnimath",
    read=_read,
    judge=_judge,
    summarise=_summarise,
    of_name=_set_of,
    reads_steps=True,
    choose=_choose,
    sample={
        "id": "gsm8k-0",
        "generator": "a model",
        "problem": "2+2+2?",
        "steps": ["2+2=4", "4+2=7"],
        "final_answer_correct": False,
        "label": 1,
    },
)
