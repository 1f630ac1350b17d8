"""Best of n: what people gave the reply that the model likes best among n of a prompt's.

For n of 1, 2, 4, ... up to all, the mean over every choice of n replies of a prompt, which is
exact: the k-th best of K by reward is the best of ``C(K - k, n - 1)`` of the ``C(K, n)`` choices.
Replies of equal reward are equally likely to be taken. Intervals are by bootstrap over prompts.

Its reward and its length stand beside it: where they grow with n and the score does not, the model
is optimised past what it knows (Gao et al. 2022, arXiv 2210.10760).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from nemo_aligner.errors import DataError
from nemo_aligner.evaluation.tasks.base import Judged, Level, Task, TaskItem, TaskRow, asked
from nemo_aligner.metrics.paired import bootstrap_interval
from nemo_aligner.text.messages import reply_of


def _read_best_of_n(value: dict[str, Any]) -> TaskItem:
    replies, scores = value["responses"], value["scores"]
    fits = isinstance(replies, list) and isinstance(scores, list) and len(replies) == len(scores)
    if not fits or len(replies) < 2:
        raise DataError(
            f"responses, scores: got {replies!r:.60} and {scores!r:.40}, wanted two or more "
            "replies and as many numbers"
        )
    if not all(isinstance(score, int | float) and math.isfinite(score) for score in scores):
        raise DataError(f"scores: got {scores!r:.60}, wanted finite numbers")
    texts = tuple(asked(value["prompt"], reply, "responses") for reply in replies)
    return TaskItem(str(value.get("id", "")), "", texts, 0, tuple(map(float, scores)))


def best_of(n: int, rewards: np.ndarray, scores: np.ndarray) -> float:
    """The mean score of the best by reward of n, over all choices of n of ``[K]``."""
    order = np.argsort(-rewards, kind="stable")
    count = len(rewards)
    # Shares of all choices: these numbers themselves leave a double's range from 1,030 replies on.
    choices = math.comb(count, n)
    chances = np.array([math.comb(count - 1 - place, n - 1) / choices for place in range(count)])
    # Of equal rewards none comes before another.
    _, groups = np.unique(-rewards[order], return_inverse=True)
    even = np.bincount(groups, weights=chances) / np.bincount(groups)
    return float(even[groups] @ scores[order])


def _judge_best_of_n(item: TaskItem, rewards: np.ndarray) -> float:
    return best_of(len(rewards), rewards, np.array(item.scores))


def _summarise_best_of_n(judged: Sequence[Judged]) -> list[TaskRow]:
    fewest = min(len(each.rewards) for each in judged)
    counts = [2**power for power in range(20) if 2**power <= fewest]
    scores = [(each.rewards, np.array(each.item.scores)) for each in judged]
    rewards = [(each.rewards, each.rewards) for each in judged]
    lengths = [
        (each.rewards, np.array([len(reply_of(text)) for text in each.item.texts], float))
        for each in judged
    ]
    most = float(np.mean([max(each.item.scores) for each in judged]))
    return [
        *(_row(Level.subset, f"best of {n}", n, scores) for n in counts),
        TaskRow(Level.section, "the highest score of every prompt", most, len(judged)),
        *(_row(Level.section, f"best of {n}, its reward", n, rewards) for n in counts),
        *(_row(Level.section, f"best of {n}, its characters", n, lengths) for n in counts),
    ]


def _row(
    level: Level, name: str, n: int, prompts: Sequence[tuple[np.ndarray, np.ndarray]]
) -> TaskRow:
    """The mean over prompts, each with its ``[K]`` rewards and the ``[K]`` numbers to average."""
    found = np.array([best_of(n, rewards, values) for rewards, values in prompts])
    low, high = bootstrap_interval(found)
    return TaskRow(level, name, float(found.mean()), len(prompts), low, high)


BEST_OF_N = Task(
    name="best_of_n",
    file="JSON lines of your own: prompt, responses, and scores that people gave them",
    read=_read_best_of_n,
    judge=_judge_best_of_n,
    summarise=_summarise_best_of_n,
    sample={"prompt": "2+2?", "responses": ["4", "5", "Four."], "scores": [5, 1, 4]},
)
