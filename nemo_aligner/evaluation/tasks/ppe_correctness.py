"""PPE's correctness sets (Frick et al. 2024, arXiv 2410.14872): replies that are right or wrong.

A prompt of MMLU-Pro, MATH, GPQA, MBPP-Plus or IFEval has 32 replies of one model. The benchmark
has drawn pairs of a right one and a wrong one; and the best by reward of k of them may be right.
With f(k) for how often that is, over every choice of k of a prompt's replies, and g(k) for how
often any of the k is right, the area under the curve is the mean of f over k = 1 to 32, and the
loss the mean of g - f.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nemo_aligner.errors import DataError
from nemo_aligner.evaluation.tasks.base import (
    Judged,
    Level,
    Task,
    TaskItem,
    TaskRow,
    asked,
    by_subset,
)
from nemo_aligner.evaluation.tasks.best_of_n import best_of
from nemo_aligner.metrics.paired import bootstrap_interval


def _read(value: dict[str, Any]) -> TaskItem | None:
    scores, pairs = value["scores"], value["sampled_conflict_pairs"]
    if not isinstance(scores, list) or not all(score in (True, False) for score in scores):
        raise DataError(f"scores: got {scores!r:.60}, wanted a list of true and false")
    texts = [
        asked(value["prompt"], value[f"response_{number}"], f"response_{number}")
        for number in range(1, len(scores) + 1)
    ]
    # Those that are right come first; the pairs are told by where they stood.
    order = sorted(range(len(scores)), key=lambda index: not scores[index])
    return TaskItem(
        id=str(value["question_id"]),
        subset=str(value.get("category") or value.get("type") or ""),
        texts=tuple(texts[index] for index in order),
        num_right=sum(map(bool, scores)),
        scores=tuple(float(scores[index]) for index in order),
        pairs=tuple(_ordered(pair, scores, order) for pair in _listed(pairs)),
    )


def _listed(pairs: Any) -> list[Any]:
    if not isinstance(pairs, list) or not pairs:
        raise DataError(f"sampled_conflict_pairs: got {pairs!r:.60}, wanted a list of pairs")
    return pairs


def _ordered(pair: Any, scores: Sequence[Any], order: Sequence[int]) -> tuple[int, int]:
    """Where the right reply and the wrong one of a pair stand in ``order``."""
    known = range(len(scores))
    fits = isinstance(pair, list) and len(pair) == 2 and all(each in known for each in pair)
    if not fits or bool(scores[pair[0]]) == bool(scores[pair[1]]):
        raise DataError(
            f"sampled_conflict_pairs: got {pair!r:.60}, wanted the numbers, from 0 to "
            f"{len(scores) - 1}, of a right reply and a wrong one"
        )
    right, wrong = sorted(pair, key=lambda index: not scores[index])
    return order.index(right), order.index(wrong)


def _rights(item: TaskItem, rewards: np.ndarray) -> np.ndarray:
    """Of each pair, whether the right reply has the higher reward; a tie is wrong."""
    right, wrong = np.array(item.pairs).T
    return rewards[right] > rewards[wrong]


def _judge(item: TaskItem, rewards: np.ndarray) -> float:
    return float(_rights(item, rewards).mean())


def _summarise(judged: Sequence[Judged]) -> list[TaskRow]:
    parts = by_subset(judged)
    rows = [_pairs_row(Level.subset, name, some) for name, some in parts.items() if len(parts) > 1]
    most = min(len(each.rewards) for each in judged)
    picked, possible = (_curve(judged, most, is_oracle) for is_oracle in (False, True))
    counts = [2**power for power in range(20) if 2**power <= most]
    rows += [_mean_row(f"best of {k}", picked[:, k - 1]) for k in counts]
    rows += [
        _mean_row("area under best of k", picked.mean(axis=1)),
        _mean_row("loss of best of k", (possible - picked).mean(axis=1)),
    ]
    return [*rows, _pairs_row(Level.overall, "pairs", judged)]


def _pairs_row(level: Level, name: str, judged: Sequence[Judged]) -> TaskRow:
    """The share of all pairs that are right, with its interval by bootstrap over prompts.

    As prompts may have several pairs, what is drawn is by how much each has more right ones than
    the share says, over the mean number of pairs.
    """
    rights = [_rights(each.item, each.rewards) for each in judged]
    counts = np.array([len(each) for each in rights])
    right = np.array([each.sum() for each in rights])
    share = float(right.sum() / counts.sum())
    low, high = bootstrap_interval((right - share * counts) / counts.mean())
    low, high = max(0.0, share + low), min(1.0, share + high)
    return TaskRow(level, name, share, int(counts.sum()), low, high)


def _curve(judged: Sequence[Judged], most: int, is_oracle: bool) -> np.ndarray:
    """``[prompts, most]``: how often the best of k is right, by reward or by what is right."""
    rows = []
    for each in judged:
        scores = np.array(each.item.scores)
        rewards = scores if is_oracle else each.rewards
        rows.append([best_of(k, rewards, scores) for k in range(1, most + 1)])
    return np.array(rows)


def _mean_row(name: str, values: np.ndarray) -> TaskRow:
    low, high = bootstrap_interval(values)
    return TaskRow(Level.section, name, float(values.mean()), len(values), low, high)


PPE_CORRECTNESS = Task(
    name="ppe_correctness",
    file="lmarena-ai/PPE-MMLU-Pro-Best-of-K, or -MATH-, -GPQA-, -MBPP-Plus-, -IFEval-",
    read=_read,
    judge=_judge,
    summarise=_summarise,
    sample={
        "question_id": "1",
        "prompt": "2+2?",
        "category": "math",
        "scores": [False, True, True, False],
        "response_1": "5",
        "response_2": "4",
        "response_3": "Four.",
        "response_4": "Six.",
        "sampled_conflict_pairs": [[0, 1], [2, 3]],
    },
)
