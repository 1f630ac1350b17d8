"""PRMBench (Song et al. 2025, arXiv 2501.03124): right and wrong steps of changed solutions.

A step is judged right if its reward is above the threshold. The figures are those of the original
(ssmisya/PRMBench, ``mr_eval/tasks/prmtest_classified/task.py``, and for PRMScore the notebook
``mr_visualize/eval_res_view/draw_tabs/form_latex_strs.ipynb``): they are over all steps of a class,
or of all classes, and not means over solutions or classes. Right steps are the positive ones of F1,
wrong ones those of negative F1. A ratio of nothing counts as -1 in either, as there.

The solutions before the change, which come once for each question from the records of one class,
are in no total: an item's similarity is how far the share of its steps that are judged right is
from that share of the solution that it was made of. An item with an unchanged solution of which no
step is judged right has none. Models that also judge redundancy are not asked for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nemo_aligner.contract.messages import Messages
from nemo_aligner.data.formats.base import read_conversation
from nemo_aligner.evaluation.predictions import Item, Prediction
from nemo_aligner.evaluation.tasks.base import Level, Task, TaskRow, by_subset
from nemo_aligner.utils.errors import DataError, shown

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


def _read(value: dict[str, Any]) -> tuple[Item, ...]:
    kind, name, wrong = str(value["classification"]), str(value["idx"]), value["error_steps"]
    if not isinstance(wrong, list) or not all(type(each) is int and each > 0 for each in wrong):
        raise DataError(f"error_steps: got {shown(wrong)}, wanted numbers of steps, from 1")
    text, count = _solution(value, "modified")
    # A few records name steps that they do not have; the original passes them over.
    labels = tuple(float(number not in wrong) for number in range(1, count + 1))
    found = (Item(name, kind, (text,), num_right=0, scores=labels),)
    if kind != _WITH_ORIGINAL:
        return found
    text, count = _solution(value, "original")
    return *found, Item(name, _ORIGINAL, (text,), num_right=0, scores=(1.0,) * count)


def _solution(value: dict[str, Any], which: str) -> tuple[Messages, int]:
    """The solution of a record, ``modified`` or ``original``, and its number of steps."""
    key = f"{which}_process"
    steps = value[key]
    if not isinstance(steps, list) or not steps:
        raise DataError(f"{key}: got {shown(steps)}, wanted a list of steps")
    parts = [{"type": "text", "text": step} for step in steps]
    reply = [{"role": "assistant", "content": parts}]
    question = f"{which}_question"
    return read_conversation(value[question], reply, key, question), len(steps)


def _labels(item: Item) -> np.ndarray:
    return np.array(item.scores) == 1


def _judge(item: Item, rewards: np.ndarray) -> float:
    """Share of steps judged as they are labelled; ``rewards [S]`` are less the threshold."""
    return float(((rewards > 0) == _labels(item)).mean())


def _judged(prediction: Prediction) -> np.ndarray:
    """``[S]`` bool, judged right."""
    assert prediction.above is not None
    judged: np.ndarray = prediction.above > 0
    return judged


def _summarise(predictions: Sequence[Prediction]) -> list[TaskRow]:
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
    read=_read,
    judge=_judge,
    summarise=_summarise,
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
