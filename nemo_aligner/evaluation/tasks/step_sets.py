"""Benchmarks that judge the steps of solutions: ProcessBench and PRMBench."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nemo_aligner.contract.messages import Text
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

# ProcessBench (Zheng et al. 2024, arXiv 2412.06559): the first wrong step of a solution.
#
# A model's answer is the first step with a reward below the threshold, or none. As in the original
# (QwenLM/ProcessBench, code/run_eval.py), the figure of a set is the harmonic mean of the share
# that is right of the solutions with an error and of those without, and the figure of all is its
# mean over the four sets.

_SETS = ("gsm8k", "math", "olympiadbench", "omnimath")
_NO_ERROR = -1


def _read_processbench(value: dict[str, Any]) -> Item:
    steps, label = value["steps"], value["label"]
    text = _solution(value, "problem", "steps")
    if type(label) is not int or not _NO_ERROR <= label < len(steps):
        raise DataError(
            f"label: got {shown(label)}, wanted the number of the first wrong step, from 0 to "
            f"{len(steps) - 1}, or {_NO_ERROR} for none"
        )
    name = str(value["id"])
    subset = value.get("subset") or name.rpartition("-")[0]
    return Item(name, str(subset), (text,), num_right=0, scores=(float(label),))


def _solution(value: dict[str, Any], question: str, key: str) -> Text:
    """The steps under ``key`` as the reply to the question of a record.

    Raises:
        DataError: they do not make one.
    """
    steps = value[key]
    if not isinstance(steps, list) or not steps:
        raise DataError(f"{key}: got {shown(steps)}, wanted a list of steps")
    parts = [{"type": "text", "text": step} for step in steps]
    reply = [{"role": "assistant", "content": parts}]
    return read_conversation(value[question], reply, key, question)


def _set_of(stem: str) -> dict[str, str]:
    """Take the set from the name of a file, as ``gsm8k.json``."""
    return {"subset": stem} if stem in _SETS else {}


def _judge_first_error(item: Item, rewards: np.ndarray) -> float:
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


def _summarise_processbench(predictions: Sequence[Prediction]) -> list[TaskRow]:
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
    read=_read_processbench,
    judge=_judge_first_error,
    summarise=_summarise_processbench,
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


# PRMBench (Song et al. 2025, arXiv 2501.03124): right and wrong steps of changed solutions.
#
# A step is judged right if its reward is above the threshold. The figures are those of the original
# (ssmisya/PRMBench, ``mr_eval/tasks/prmtest_classified/task.py``, and for PRMScore the notebook
# ``mr_visualize/eval_res_view/draw_tabs/form_latex_strs.ipynb``): they are over all steps of a
# class, or of all classes, and not means over solutions or classes. Right steps are the positive
# ones of F1, wrong ones those of negative F1. A ratio of nothing counts as -1 in either, as there.
#
# The solutions before the change, which come once for each question from the records of one class,
# are in no total: an item's similarity is how far the share of its steps that are judged right is
# from that share of the solution that it was made of. An item with an unchanged solution of which
# no step is judged right has none. Models that also judge redundancy are not asked for it.

# Names as the benchmark has them, redundency among them.
_GROUPS = {
    "simplicity": ("redundency", "circular"),
    "soundness": ("counterfactual", "step_contradiction", "domain_inconsistency", "confidence"),
    "sensitivity": ("missing_condition", "deception", "multi_solutions"),
}
_CLASSES = tuple(name for names in _GROUPS.values() for name in names)
# Its records also give the solutions before the change.
_WITH_ORIGINAL = "redundency"
_ORIGINAL = "correct"
# Solutions without wrong steps, whose PRMScore is F1 alone.
_WITHOUT_ERRORS = "multi_solutions"


def _read_prmbench(value: dict[str, Any]) -> tuple[Item, ...]:
    kind, name, wrong = str(value["classification"]), str(value["idx"]), value["error_steps"]
    if not isinstance(wrong, list) or not all(type(each) is int and each > 0 for each in wrong):
        raise DataError(f"error_steps: got {shown(wrong)}, wanted numbers of steps, from 1")
    text = _solution(value, "modified_question", "modified_process")
    # A few records name steps that they do not have; the original passes them over.
    numbers = range(1, len(value["modified_process"]) + 1)
    labels = tuple(float(number not in wrong) for number in numbers)
    found = (Item(name, kind, (text,), num_right=0, scores=labels),)
    if kind != _WITH_ORIGINAL:
        return found
    text = _solution(value, "original_question", "original_process")
    labels = (1.0,) * len(value["original_process"])
    return *found, Item(name, _ORIGINAL, (text,), num_right=0, scores=labels)


def _labels(item: Item) -> np.ndarray:
    return np.array(item.scores) == 1


def _judge_all(item: Item, rewards: np.ndarray) -> float:
    """Share of steps judged as they are labelled; ``rewards [S]`` are less the threshold."""
    return float(((rewards > 0) == _labels(item)).mean())


def _judged(prediction: Prediction) -> np.ndarray:
    """``[S]`` bool, judged right."""
    assert prediction.above is not None
    judged: np.ndarray = prediction.above > 0
    return judged


def _summarise_prmbench(predictions: Sequence[Prediction]) -> list[TaskRow]:
    # The first of records that come twice.
    once: dict[tuple[str, str], Prediction] = {}
    for each in predictions:
        once.setdefault((each.item.source, each.item.id), each)
    parts = by_subset([*once.values()])
    originals = parts.pop(_ORIGINAL, [])
    before = {each.item.id: float(_judged(each).mean()) for each in originals}
    rows: list[TaskRow] = []
    scores: dict[str, float] = {}
    for name, some in parts.items():
        figures = _figures(some, before)
        scores[name] = _score(figures, name)
        rows.append(TaskRow(Level.subset, f"{name}, PRMScore", scores[name], len(some)))
        rows += [TaskRow(Level.subset, f"{name}, {what}", own) for what, own in figures.items()]
    if originals:
        share = float(np.concatenate([*map(_judged, originals)]).mean())
        rows.append(TaskRow(Level.subset, "unchanged, steps judged right", share, len(originals)))
    for group, names in _GROUPS.items():
        if scores.keys() >= set(names):
            mean = float(np.mean([scores[name] for name in names]))
            rows.append(TaskRow(Level.section, f"{group}, PRMScore", mean))
    changed = [each for some in parts.values() for each in some]
    if changed:
        figures = _figures(changed, before)
        rows += [TaskRow(Level.section, f"all, {what}", own) for what, own in figures.items()]
        level = Level.overall if scores.keys() >= set(_CLASSES) else Level.section
        name = "PRMBench" if level is Level.overall else "all, PRMScore"
        rows.append(TaskRow(level, name, _score(figures), len(changed)))
    return rows


def _score(figures: dict[str, float], name: str = "") -> float:
    """PRMScore of a class, or of all."""
    right, wrong = figures["F1"], figures["negative F1"]
    return max(0.0, right if name == _WITHOUT_ERRORS else 0.5 * right + 0.5 * wrong)


def _figures(predictions: Sequence[Prediction], before: dict[str, float]) -> dict[str, float]:
    """Figures over all steps; those that are means of nothing are not there.

    ``before`` has the share judged right of the solutions before the change, by item.
    """
    judged = np.concatenate([*map(_judged, predictions)])
    right = np.concatenate([_labels(each.item) for each in predictions])
    firsts, shifts = [], []
    for each in predictions:
        own, wrong = _judged(each), np.flatnonzero(~_labels(each.item))
        firsts += [not own[number] for number in wrong[:1]]
        if before.get(each.item.id):
            shifts.append(abs(float(own.mean()) - before[each.item.id]))
    means = {
        "step accuracy": judged == right,
        "right steps judged right": judged[right],
        "wrong steps judged wrong": ~judged[~right],
        "first error judged wrong": firsts,
        "similarity": shifts,
    }
    return {
        "F1": _f1(judged, right),
        "negative F1": _f1(~judged, ~right),
        **{name: float(np.mean(values)) for name, values in means.items() if len(values)},
    }


def _f1(found: np.ndarray, wanted: np.ndarray) -> float:
    """F1 of the steps ``[S]`` bool; -1 for each ratio of nothing."""
    hits = int((found & wanted).sum())
    precision, recall = (_ratio(hits, int(each.sum())) for each in (found, wanted))
    return _ratio(2 * precision * recall, precision + recall)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else -1.0


PRMBENCH = Task(
    name="prmbench",
    file="PRMBench, or one of the files of ssmisya/PRMBench",
    read=_read_prmbench,
    judge=_judge_all,
    summarise=_summarise_prmbench,
    reads_steps=True,
    sample={
        "original_question": "2+2+2?",
        "modified_question": "2+2+2?",
        "original_process": ["2+2=4", "4+2=6"],
        "modified_process": ["2+2=4", "4+2=7"],
        "modified_steps": [2],
        "error_steps": [2],
        "reason": "a wrong sum",
        "idx": "prm_test_p1_0",
        "question": "2+2+2?",
        "classification": "counterfactual",
    },
)
