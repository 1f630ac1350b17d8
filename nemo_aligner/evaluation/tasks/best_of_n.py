"""Benchmarks of several replies to a prompt: best of n, PPE's correctness, RMB, IF-RewardBench."""

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
    build_conversation,
    build_share_row,
    group_by_subset,
    mean_of,
)
from nemo_aligner.metrics.ranking import bootstrap_interval
from nemo_aligner.utils.errors import DataError

# Best of n: the human score of the reply that the model prefers among n replies to a prompt.
#
# The expectation over random choices of n of a prompt's K replies is exact, not sampled: the k-th
# best reply by reward wins in ``C(K - k, n - 1)`` of the ``C(K, n)`` choices (the unbiased
# estimator of Nakano et al. 2021, arXiv 2112.09332, appendix I). Intervals are bootstrapped over
# prompts, because the replies to one prompt are not independent.
#
# The table also has the reward and the length of the preferred reply. If these grow with n but the
# score does not, the reward is over-optimised (Gao et al. 2022, arXiv 2210.10760).

_LARGEST = sys.float_info.max


def _read_best_of_n(value: dict[str, Any]) -> Item:
    replies, scores = value["responses"], value["scores"]
    are_lists = isinstance(replies, list) and isinstance(scores, list)
    if not are_lists or len(replies) != len(scores) or len(replies) < 2:
        raise DataError(
            f"responses, scores: got {replies!r:.60} and {scores!r:.40}, wanted two or more "
            "replies and one number for each"
        )
    # Not math.isfinite, which raises for an integer that is too large for a float.
    if not all(isinstance(score, int | float) and abs(score) <= _LARGEST for score in scores):
        raise DataError(f"scores: got {scores!r:.60}, wanted finite numbers")
    texts = tuple(build_conversation(value["prompt"], reply, "responses") for reply in replies)
    return Item(str(value.get("id", "")), "", texts, 0, tuple(map(float, scores)))


def best_of(n: int, rewards: np.ndarray, scores: np.ndarray) -> float:
    """Compute the expected score of the best of n replies, drawn at random from K, by reward.

    Args:
        n: number of replies to choose from.
        rewards: rewards of the K replies, ``[K]``.
        scores: the values to average, such as human scores, ``[K]``.
    """
    order = np.argsort(-rewards, kind="stable")
    count = len(rewards)
    # Divide exact integers, because a single binomial exceeds the range of a double from 1,030
    # replies on.
    choices = math.comb(count, n)
    chances = np.array([math.comb(count - 1 - rank, n - 1) / choices for rank in range(count)])
    # Replies with equal rewards are equally likely to be picked, so each gets their mean chance.
    _, groups = np.unique(-rewards[order], return_inverse=True)
    mean_chances = np.bincount(groups, weights=chances) / np.bincount(groups)
    return float(mean_chances[groups] @ scores[order])


def _judge_best_of_n(item: Item, rewards: np.ndarray) -> float:
    return best_of(len(rewards), rewards, np.array(item.scores))


def _summarise_best_of_n(predictions: Sequence[Prediction]) -> list[TaskRow]:
    fewest = min(len(prediction.rewards) for prediction in predictions)
    counts = [2**power for power in range(20) if 2**power <= fewest]
    scores = [(prediction.rewards, np.array(prediction.item.scores)) for prediction in predictions]
    rewards = [(prediction.rewards, prediction.rewards) for prediction in predictions]
    lengths = [
        (
            prediction.rewards,
            np.array([len(reply_of(text)) for text in prediction.item.texts], float),
        )
        for prediction in predictions
    ]
    highest = float(np.mean([max(prediction.item.scores) for prediction in predictions]))
    return [
        *(_best_of_row(Level.subset, f"best of {n}", n, scores) for n in counts),
        TaskRow(Level.section, "the highest score of every prompt", highest, len(predictions)),
        *(_best_of_row(Level.section, f"best of {n}, its reward", n, rewards) for n in counts),
        *(_best_of_row(Level.section, f"best of {n}, its characters", n, lengths) for n in counts),
    ]


def _best_of_row(
    level: Level, name: str, n: int, prompts: Sequence[tuple[np.ndarray, np.ndarray]]
) -> TaskRow:
    """Build the row whose figure is the mean of ``best_of`` over prompts.

    ``prompts`` has the rewards ``[K]`` of each prompt's replies and the values to average, ``[K]``.
    The interval of the figure is bootstrapped over prompts.
    """
    expected_values = np.array([best_of(n, rewards, values) for rewards, values in prompts])
    interval = _interval_over_prompts(expected_values)
    return TaskRow(level, name, float(expected_values.mean()), len(prompts), *interval)


def _interval_over_prompts(values: np.ndarray) -> tuple[float, float] | tuple[None, None]:
    """Bootstrap the 95% interval of the mean over prompts of ``values [N]``.

    There is none if all values are equal: a resample of them says nothing about other prompts.
    """
    return bootstrap_interval(values) if np.ptp(values) > 0 else (None, None)


BEST_OF_N = Task(
    name="best_of_n",
    file="a custom JSON lines file with prompt, responses and the human scores of these",
    read=_read_best_of_n,
    judge=_judge_best_of_n,
    summarise=_summarise_best_of_n,
    sample={"prompt": "2+2?", "responses": ["4", "5", "Four."], "scores": [5, 1, 4]},
)


# PPE's correctness sets (Frick et al. 2024, arXiv 2410.14872): replies that are right or wrong.
#
# Each prompt of MMLU-Pro, MATH, GPQA, MBPP-Plus or IFEval has 32 replies of one model. The file
# also lists sampled pairs of a right and a wrong reply. Over all choices of k replies, let f(k) be
# the probability that the one with the highest reward is right, and g(k) the probability that any
# of them is right. The area under the curve is the mean of f over k = 1 to 32, and the loss is the
# mean of g - f.


def _read_ppe(value: dict[str, Any]) -> Item | None:
    scores, pairs = value["scores"], value["sampled_conflict_pairs"]
    if not isinstance(scores, list) or not all(score in (True, False) for score in scores):
        raise DataError(f"scores: got {scores!r:.60}, wanted a list of true and false")
    texts = [
        build_conversation(value["prompt"], value[f"response_{number}"], f"response_{number}")
        for number in range(1, len(scores) + 1)
    ]
    # An item lists its right replies first, but the pairs in the file are indices in the order of
    # the file.
    order = sorted(range(len(scores)), key=lambda index: not scores[index])
    return Item(
        id=str(value["question_id"]),
        source=str(value.get("category") or value.get("type") or ""),
        texts=tuple(texts[index] for index in order),
        num_right=sum(map(bool, scores)),
        scores=tuple(float(scores[index]) for index in order),
        pairs=tuple(_translate_pair(pair, scores, order) for pair in _check_pairs(pairs)),
    )


def _check_pairs(pairs: Any) -> list[Any]:
    if not isinstance(pairs, list) or not pairs:
        raise DataError(f"sampled_conflict_pairs: got {pairs!r:.60}, wanted a list of pairs")
    return pairs


def _translate_pair(pair: Any, scores: Sequence[Any], order: Sequence[int]) -> tuple[int, int]:
    """Translate a pair from indices in the file to indices in the item.

    Args:
        pair: indices of two replies in the order of the file.
        scores: score of each reply, in the order of the file; true for a right reply.
        order: the index in the file of each sample of the item.

    Returns:
        Indices of the two samples in the item, the right one first.

    Raises:
        DataError: the pair is not one of a right and a wrong reply.
    """
    valid = range(len(scores))
    # Check the type, too, because 1.0 is in the range but is not an index.
    are_indices = isinstance(pair, list) and all(
        type(index) is int and index in valid for index in pair
    )
    is_pair = are_indices and len(pair) == 2
    if not is_pair or bool(scores[pair[0]]) == bool(scores[pair[1]]):
        raise DataError(
            f"sampled_conflict_pairs: got {pair!r:.60}, wanted the indices, from 0 to "
            f"{len(scores) - 1}, of a right and a wrong reply"
        )
    right, wrong = sorted(pair, key=lambda index: not scores[index])
    return order.index(right), order.index(wrong)


def _judge_pairs(item: Item, rewards: np.ndarray) -> np.ndarray:
    """Judge each of the P pairs that the benchmark lists for an item.

    Returns:
        ``[P]`` bool, True if the right reply has the higher reward; a tie counts as wrong.
    """
    right, wrong = np.array(item.pairs).T
    return rewards[right] > rewards[wrong]


def _judge_ppe(item: Item, rewards: np.ndarray) -> float:
    return float(_judge_pairs(item, rewards).mean())


def _summarise_ppe(predictions: Sequence[Prediction]) -> list[TaskRow]:
    subsets = group_by_subset(predictions)
    rows = [
        _pairs_row(Level.subset, name, members)
        for name, members in subsets.items()
        if len(subsets) > 1
    ]
    fewest = min(len(prediction.rewards) for prediction in predictions)
    picked, possible = (_best_of_k_curves(predictions, fewest, oracle) for oracle in (False, True))
    counts = [2**power for power in range(20) if 2**power <= fewest]
    rows += [_mean_row(f"best of {k}", picked[:, k - 1]) for k in counts]
    rows += [
        _mean_row("area under best of k", picked.mean(axis=1)),
        _mean_row("loss of best of k", (possible - picked).mean(axis=1)),
    ]
    return [*rows, _pairs_row(Level.overall, "pairs", predictions)]


def _pairs_row(level: Level, name: str, predictions: Sequence[Prediction]) -> TaskRow:
    """Build the row of the fraction of listed pairs that the model orders correctly.

    The bootstrap resamples prompts, which may have several pairs. The fraction
    (``share``) is a ratio of two sums over prompts. Therefore the bootstrap resamples its
    linearised residuals: right pairs minus ``share * pairs`` of each prompt, divided by the mean
    number of pairs.
    """
    verdicts = [_judge_pairs(prediction.item, prediction.rewards) for prediction in predictions]
    counts = np.array([len(pair_verdicts) for pair_verdicts in verdicts])
    right = np.array([pair_verdicts.sum() for pair_verdicts in verdicts])
    share = float(right.sum() / counts.sum())
    low, high = _interval_over_prompts((right - share * counts) / counts.mean())
    if low is not None and high is not None:
        low, high = max(0.0, share + low), min(1.0, share + high)
    return TaskRow(level, name, share, int(counts.sum()), low, high)


def _best_of_k_curves(predictions: Sequence[Prediction], max_k: int, is_oracle: bool) -> np.ndarray:
    """Compute the probability that the best of k replies is right, for every prompt and k.

    The result is ``[N, max_k]`` for N prompts. With ``is_oracle`` the best reply is the one with
    the highest score instead of the highest reward.
    """
    rows = []
    for prediction in predictions:
        scores = np.array(prediction.item.scores)
        rewards = scores if is_oracle else prediction.rewards
        rows.append([best_of(k, rewards, scores) for k in range(1, max_k + 1)])
    return np.array(rows)


def _mean_row(name: str, values: np.ndarray) -> TaskRow:
    interval = _interval_over_prompts(values)
    return TaskRow(Level.section, name, float(values.mean()), len(values), *interval)


PPE_CORRECTNESS = Task(
    name="ppe_correctness",
    file="lmarena-ai/PPE-MMLU-Pro-Best-of-K, or -MATH-, -GPQA-, -MBPP-Plus-, -IFEval-",
    read=_read_ppe,
    judge=_judge_ppe,
    summarise=_summarise_ppe,
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


# RMB (Zhou et al. 2024, arXiv 2410.09893): pairs, and best-of-n lists of a winner and its losers.
#
# A list counts as right if the winner has a higher reward than every loser. The figure of each of
# the four sets is the share over all its items, and the overall figure is the mean of the four
# (Zhou-Zoey/RMB-Reward-Model-Benchmark, eval/scripts/my_run_rm.py; RM-R1-UIUC/RM-R1,
# run_rm_bestofn.py and process_final_result.py, for the lists).

_RMB_SETS = tuple(
    f"{kind}_set/{goal}" for kind in ("BoN", "Pairwise") for goal in ("Helpfulness", "Harmlessness")
)


def _read_rmb(value: dict[str, Any]) -> Item:
    is_pair = "pair_uid" in value
    best, losers = ("chosen", [value["reject"]]) if is_pair else ("bon_best", value["loser_list"])
    if not isinstance(losers, list) or not losers:
        raise DataError(f"loser_list: got {losers!r:.60}, wanted a list of replies")
    prompt = _select_turns(value["conversation_input"])
    texts = tuple(
        build_conversation(prompt, _read_answer(reply), "answer")
        for reply in (value[best], *losers)
    )
    name = value["pair_uid"] if is_pair else value["bon_uid"]
    return Item(str(name), str(value["category_path"]), texts)


def _select_turns(turns: Any) -> list[dict[str, Any]]:
    """Select role and content of the messages of a prompt, which also name their language."""
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise DataError(f"conversation_input: got {turns!r:.60}, wanted a list of messages")
    return [{key: turn[key] for key in ("role", "content")} for turn in turns]


def _read_answer(reply: Any) -> Any:
    if not isinstance(reply, dict) or "answer" not in reply:
        raise DataError(f"got the reply {reply!r:.60}, wanted an object with 'answer'")
    return reply["answer"]


def _judge_rmb(item: Item, rewards: np.ndarray) -> float:
    return float(rewards[0] > rewards[1:].max())


def _summarise_rmb(predictions: Sequence[Prediction]) -> list[TaskRow]:
    subsets = group_by_subset(predictions)
    rows = [build_share_row(Level.subset, name, members) for name, members in subsets.items()]
    sections = []
    for name in _RMB_SETS:
        members = [
            prediction
            for prediction in predictions
            if prediction.item.source.startswith(f"{name}/")
        ]
        if members:
            sections.append(build_share_row(Level.section, name, members))
    rows += sections
    if len(sections) == len(_RMB_SETS):
        rows.append(TaskRow(Level.overall, "RMB", mean_of(sections)))
    return rows


RMB = Task(
    name="rmb",
    file="Zhou-Zoey/RMB-Reward-Model-Benchmark, the files of RMB_dataset in one",
    read=_read_rmb,
    judge=_judge_rmb,
    summarise=_summarise_rmb,
    sample={
        "bon_uid": "1",
        "category_path": "BoN_set/Helpfulness/Chat/Discussion",
        "conversation_input": [{"role": "user", "content": "2+2?", "language": "English"}],
        "bon_best": {"llm_name": "a", "answer": "4"},
        "loser_list": [{"llm_name": "b", "answer": "3"}, {"llm_name": "c", "answer": "2"}],
    },
)


# IF-RewardBench (Wen et al. 2026, arXiv 2603.04738): replies with a graph of preferences.
#
# Kendall's tau-b of an item compares its rewards with the preferences of the graph, in which there
# are no ties: (C - D) / sqrt((C + D) (C + D + T)) for C pairs in order, D in the wrong order, and T
# with equal rewards. The figure of each type of instruction is the mean over its items; the overall
# figure is the mean over the three types (thu-coai/IF-RewardBench, metrics/
# analysis_constraint_assessment.py, ``calculate_pairwise_metrics``).

_INSTRUCTION_TYPES = ("Single_Turn", "Multi_Turn", "System_Prompt")


def _read_if_rewardbench(value: dict[str, Any]) -> Item:
    replies, graph = value["responses"], value["preference_graph"]
    if not isinstance(replies, list) or not all(isinstance(reply, dict) for reply in replies):
        raise DataError(f"responses: got {replies!r:.60}, wanted a list of objects")
    texts = tuple(
        build_conversation(value["messages"], reply["response"], "responses") for reply in replies
    )
    try:
        places = {reply.get("response_id", place): place for place, reply in enumerate(replies)}
        pairs = {
            (places[edge["chosen"]["response_id"]], places[edge["rejected"]["response_id"]]): None
            for edge in graph
        }
    except (TypeError, KeyError) as error:
        raise DataError(
            f"preference_graph: got {graph!r:.60}, wanted a list of objects whose 'chosen' and "
            "'rejected' have the 'response_id' of a reply"
        ) from error
    if not pairs:
        raise DataError("preference_graph: it is empty, wanted one or more pairs of replies")
    name, kind = str(value["id"]), str(value["instruction_type"])
    return Item(name, kind, texts, num_right=0, pairs=tuple(pairs))


def kendall_tau(item: Item, rewards: np.ndarray) -> float:
    """Compute Kendall's tau-b of ``rewards [K]`` and the preferences between an item's samples."""
    better, worse = np.array(item.pairs).T
    signs = np.sign(rewards[better] - rewards[worse])
    ordered = np.count_nonzero(signs)
    return float(signs.sum() / max(1.0, math.sqrt(ordered * len(signs))))


def _summarise_if_rewardbench(predictions: Sequence[Prediction]) -> list[TaskRow]:
    taus: list[TaskRow] = []
    accuracies: list[TaskRow] = []
    for name, members in group_by_subset(predictions).items():
        values = [kendall_tau(member.item, member.rewards) for member in members]
        taus.append(_mean_row(f"{name}, Kendall's tau", np.array(values)))
        shares = [member.right for member in members]
        accuracies.append(_mean_row(f"{name}, accuracy", np.array(shares)))
    rows = [*taus, *accuracies]
    if {prediction.item.source for prediction in predictions} == {*_INSTRUCTION_TYPES}:
        rows.append(TaskRow(Level.section, "accuracy", mean_of(accuracies)))
        rows.append(TaskRow(Level.overall, "Kendall's tau", mean_of(taus)))
    return rows


IF_REWARDBENCH = Task(
    name="if_rewardbench",
    file="thu-coai/IF-RewardBench, data/if_rewardbench.json",
    read=_read_if_rewardbench,
    judge=_judge_ppe,
    summarise=_summarise_if_rewardbench,
    sample={
        "id": 1,
        "instruction_type": "Single_Turn",
        "messages": [{"role": "user", "content": "Two digits, no 5."}],
        "responses": [
            {"response_id": 0, "response": "15"},
            {"response_id": 1, "response": "44"},
            {"response_id": 2, "response": "5"},
        ],
        "preference_graph": [
            {"chosen": {"response_id": 1}, "rejected": {"response_id": 0}},
            {"chosen": {"response_id": 0}, "rejected": {"response_id": 2}},
        ],
    },
)
