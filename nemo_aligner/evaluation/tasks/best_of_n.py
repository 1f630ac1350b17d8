"""Benchmarks of several replies to a prompt: best of n, and PPE's correctness sets."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from nemo_aligner.contract.messages import reply_of
from nemo_aligner.evaluation.predictions import Item, Prediction
from nemo_aligner.evaluation.tasks.base import (
    Level,
    Task,
    TaskRow,
    asked,
    by_subset,
)
from nemo_aligner.metrics.ranking import bootstrap_interval
from nemo_aligner.utils.errors import DataError

# Best of n: human score of the reply that the model prefers among n replies to a prompt.
#
# The expectation over a random choice of n of a prompt's K replies is exact, not sampled: the k-th
# best by reward is the best of ``C(K - k, n - 1)`` of the ``C(K, n)`` choices (the unbiased
# estimator of Nakano et al. 2021, arXiv 2112.09332, appendix I). Intervals are bootstrapped over
# prompts, because replies to one prompt are not independent.
#
# The table also has its reward and its length. If they grow with n and the score does not, the
# reward is over-optimised (Gao et al. 2022, arXiv 2210.10760).

_LARGEST = sys.float_info.max


def _read_best_of_n(value: dict[str, Any]) -> Item:
    replies, scores = value["responses"], value["scores"]
    fits = isinstance(replies, list) and isinstance(scores, list) and len(replies) == len(scores)
    if not fits or len(replies) < 2:
        raise DataError(
            f"responses, scores: got {replies!r:.60} and {scores!r:.40}, wanted two or more "
            "replies and as many numbers"
        )
    # Not math.isfinite, which fails on an integer that no float holds.
    if not all(isinstance(score, int | float) and abs(score) <= _LARGEST for score in scores):
        raise DataError(f"scores: got {scores!r:.60}, wanted finite numbers")
    texts = tuple(asked(value["prompt"], reply, "responses") for reply in replies)
    return Item(str(value.get("id", "")), "", texts, 0, tuple(map(float, scores)))


def best_of(n: int, rewards: np.ndarray, scores: np.ndarray) -> float:
    """Expected score of the best by reward among n of K replies; both arrays are ``[K]``."""
    order = np.argsort(-rewards, kind="stable")
    count = len(rewards)
    # Ratios of exact integers: the binomials alone exceed a double's range from 1,030 replies on.
    choices = math.comb(count, n)
    chances = np.array([math.comb(count - 1 - place, n - 1) / choices for place in range(count)])
    # Replies of equal reward are equally likely to be picked: they share their chances evenly.
    _, groups = np.unique(-rewards[order], return_inverse=True)
    even = np.bincount(groups, weights=chances) / np.bincount(groups)
    return float(even[groups] @ scores[order])


def _judge_best_of_n(item: Item, rewards: np.ndarray) -> float:
    return best_of(len(rewards), rewards, np.array(item.scores))


def _summarise_best_of_n(predictions: Sequence[Prediction]) -> list[TaskRow]:
    fewest = min(len(each.rewards) for each in predictions)
    counts = [2**power for power in range(20) if 2**power <= fewest]
    scores = [(each.rewards, np.array(each.item.scores)) for each in predictions]
    rewards = [(each.rewards, each.rewards) for each in predictions]
    lengths = [
        (each.rewards, np.array([len(reply_of(text)) for text in each.item.texts], float))
        for each in predictions
    ]
    most = float(np.mean([max(each.item.scores) for each in predictions]))
    return [
        *(_row(Level.subset, f"best of {n}", n, scores) for n in counts),
        TaskRow(Level.section, "the highest score of every prompt", most, len(predictions)),
        *(_row(Level.section, f"best of {n}, its reward", n, rewards) for n in counts),
        *(_row(Level.section, f"best of {n}, its characters", n, lengths) for n in counts),
    ]


def _row(
    level: Level, name: str, n: int, prompts: Sequence[tuple[np.ndarray, np.ndarray]]
) -> TaskRow:
    """Mean over prompts, each given as its ``[K]`` rewards and the ``[K]`` values to average."""
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


# PPE's correctness sets (Frick et al. 2024, arXiv 2410.14872): replies that are right or wrong.
#
# Each prompt of MMLU-Pro, MATH, GPQA, MBPP-Plus or IFEval has 32 replies of one model, and pairs of
# a right and a wrong one that the benchmark has sampled. Let f(k) be the probability that the best
# of k replies by reward is right, over all choices of k, and g(k) that any of the k is right. The
# area under the curve is the mean of f over k = 1 to 32, and the loss the mean of g - f.


def _read(value: dict[str, Any]) -> Item | None:
    scores, pairs = value["scores"], value["sampled_conflict_pairs"]
    if not isinstance(scores, list) or not all(score in (True, False) for score in scores):
        raise DataError(f"scores: got {scores!r:.60}, wanted a list of true and false")
    texts = [
        asked(value["prompt"], value[f"response_{number}"], f"response_{number}")
        for number in range(1, len(scores) + 1)
    ]
    # An item has its right replies first, but the file's pairs are indices in the original order.
    order = sorted(range(len(scores)), key=lambda index: not scores[index])
    return Item(
        id=str(value["question_id"]),
        source=str(value.get("category") or value.get("type") or ""),
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
    """Translate a pair of the file to indices of the item, the right reply first."""
    known = range(len(scores))
    # By type, too: 1.0 is in the range, and no index.
    are_known = isinstance(pair, list) and all(type(one) is int and one in known for one in pair)
    fits = are_known and len(pair) == 2
    if not fits or bool(scores[pair[0]]) == bool(scores[pair[1]]):
        raise DataError(
            f"sampled_conflict_pairs: got {pair!r:.60}, wanted the numbers, from 0 to "
            f"{len(scores) - 1}, of a right reply and a wrong one"
        )
    right, wrong = sorted(pair, key=lambda index: not scores[index])
    return order.index(right), order.index(wrong)


def _rights(item: Item, rewards: np.ndarray) -> np.ndarray:
    """``[pairs]`` bool: the right reply has the higher reward; a tie is wrong."""
    right, wrong = np.array(item.pairs).T
    return rewards[right] > rewards[wrong]


def _judge(item: Item, rewards: np.ndarray) -> float:
    return float(_rights(item, rewards).mean())


def _summarise(predictions: Sequence[Prediction]) -> list[TaskRow]:
    parts = by_subset(predictions)
    rows = [_pairs_row(Level.subset, name, some) for name, some in parts.items() if len(parts) > 1]
    most = min(len(each.rewards) for each in predictions)
    picked, possible = (_curve(predictions, most, is_oracle) for is_oracle in (False, True))
    counts = [2**power for power in range(20) if 2**power <= most]
    rows += [_mean_row(f"best of {k}", picked[:, k - 1]) for k in counts]
    rows += [
        _mean_row("area under best of k", picked.mean(axis=1)),
        _mean_row("loss of best of k", (possible - picked).mean(axis=1)),
    ]
    return [*rows, _pairs_row(Level.overall, "pairs", predictions)]


def _pairs_row(level: Level, name: str, predictions: Sequence[Prediction]) -> TaskRow:
    """The share of all pairs that are right, with its interval by bootstrap over prompts.

    As prompts may have several pairs, what is drawn is by how much each has more right ones than
    the share says, over the mean number of pairs.
    """
    rights = [_rights(each.item, each.rewards) for each in predictions]
    counts = np.array([len(each) for each in rights])
    right = np.array([each.sum() for each in rights])
    share = float(right.sum() / counts.sum())
    low, high = bootstrap_interval((right - share * counts) / counts.mean())
    low, high = max(0.0, share + low), min(1.0, share + high)
    return TaskRow(level, name, share, int(counts.sum()), low, high)


def _curve(predictions: Sequence[Prediction], most: int, is_oracle: bool) -> np.ndarray:
    """``[prompts, most]``: probability that the best of k is right, by reward or by an oracle."""
    rows = []
    for each in predictions:
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
