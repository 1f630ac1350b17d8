"""Benchmarks that judge every step of a solution: ProcessBench and PRMBench.

The model has a reward for each step. ``judge`` gets these rewards minus the threshold from which a
step counts as right.
"""

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
    build_share_row,
    group_by_subset,
    mean_of,
)
from nemo_aligner.metrics.regression import first_error, harmonic_mean
from nemo_aligner.utils.errors import DataError, shown

# ProcessBench (Zheng et al. 2024, arXiv 2412.06559): find the first wrong step of a solution.
#
# The model's answer is the first step with a reward below the threshold, or "none". As in the
# original (QwenLM/ProcessBench, code/run_eval.py), the figure of a set is the harmonic mean of two
# accuracies, on the solutions with an error and on those without. The overall figure is its mean
# over the four sets.

_SETS = ("gsm8k", "math", "olympiadbench", "omnimath")
# Label of a solution without a wrong step.
_NO_ERROR = -1


def _read_processbench(value: dict[str, Any]) -> Item:
    steps, label = value["steps"], value["label"]
    text = _read_solution(value, "problem", "steps")
    if type(label) is not int or not _NO_ERROR <= label < len(steps):
        raise DataError(
            f"label: got {shown(label)}, wanted the index of the first wrong step, from 0 to "
            f"{len(steps) - 1}, or {_NO_ERROR} for none"
        )
    name = str(value["id"])
    subset = value.get("subset") or name.rpartition("-")[0]
    return Item(name, str(subset), (text,), num_right=0, scores=(float(label),))


def _read_solution(value: dict[str, Any], question: str, key: str) -> Text:
    """Read a conversation whose reply has the steps under ``key`` as its parts.

    Args:
        value: object of the file.
        question: key of the question.
        key: key of the list of steps.

    Raises:
        DataError: the steps are not a list of strings, or the question is not valid.
    """
    steps = value[key]
    if not isinstance(steps, list) or not steps:
        raise DataError(f"{key}: got {shown(steps)}, wanted a list of steps")
    parts = [{"type": "text", "text": step} for step in steps]
    reply = [{"role": "assistant", "content": parts}]
    return read_conversation(value[question], reply, key, question)


def _read_set(name: str) -> dict[str, str]:
    """Read the set of ProcessBench from the name of its file, up to its first dot.

    An example is ``gsm8k``. The result is empty for another name.
    """
    return {"subset": name} if name in _SETS else {}


def _judge_first_error(item: Item, rewards: np.ndarray) -> float:
    """Return 1 if the model finds the first wrong step of a solution, else 0.

    The model's answer is the first step with a negative reward, because ``rewards [S]`` have the
    threshold subtracted. It must be the labelled step, or none if the solution has no error.
    """
    return float(first_error((rewards >= 0).tolist()) == item.scores[0])


def _choose_threshold(items: Sequence[Item], rewards: Sequence[np.ndarray]) -> tuple[float, float]:
    """Choose the threshold with the highest F1, averaged over the sets.

    A threshold judges a solution correctly if it is above the reward of the first wrong step (above
    -inf if there is none), and not above the lowest reward before that step. Verdicts change only
    at these bounds. So it is enough to try the lowest bound, the middle between each two adjacent
    bounds, and a value above the highest bound. If several thresholds are equally good, the middle
    one is chosen.

    Returns:
        The threshold and its mean F1.

    Raises:
        DataError: no set has solutions with an error as well as solutions without one.
    """
    first = [int(item.scores[0]) for item in items]
    step_rewards = [solution.astype(np.float64) for solution in rewards]
    solutions = list(zip(first, step_rewards, strict=True))
    low = np.array([-np.inf if error < 0 else steps[error] for error, steps in solutions])
    right_steps = [steps if error < 0 else steps[:error] for error, steps in solutions]
    high = np.array([steps.min(initial=np.inf) for steps in right_steps])
    bounds = np.unique(np.concatenate([low, high]))
    bounds = bounds[np.isfinite(bounds)]
    middles = (bounds[1:] + bounds[:-1]) / 2
    candidates = np.concatenate([bounds[:1], middles, np.nextafter(bounds[-1:], np.inf)])
    right = (low < candidates[:, None]) & (candidates[:, None] <= high)
    sets, has_error = np.array([item.source for item in items]), np.array(first) >= 0
    f1_by_set = []
    for name in np.unique(sets):
        parts = [right[:, (sets == name) & kind] for kind in (has_error, ~has_error)]
        if all(part.shape[1] for part in parts):
            shares = np.stack([part.mean(axis=1) for part in parts])
            f1_by_set.append(2 * shares.prod(axis=0) / np.maximum(shares.sum(axis=0), 1e-300))
    if not f1_by_set:
        raise DataError(
            "no set has both solutions with an error and solutions without one, which are needed "
            "to choose a threshold"
        )
    mean_f1 = np.mean(f1_by_set, axis=0)
    best = np.flatnonzero(mean_f1 == mean_f1.max())
    chosen = best[len(best) // 2]
    return float(candidates[chosen]), float(mean_f1[chosen])


def _summarise_processbench(predictions: Sequence[Prediction]) -> list[TaskRow]:
    rows: list[TaskRow] = []
    f1_rows: dict[str, TaskRow] = {}
    for name, members in group_by_subset(predictions).items():
        with_error = [prediction for prediction in members if prediction.item.scores[0] >= 0]
        without_error = [prediction for prediction in members if prediction.item.scores[0] < 0]
        shares = [
            build_share_row(Level.subset, f"{name}, {kind}", solutions)
            for kind, solutions in (("with an error", with_error), ("without", without_error))
            if solutions
        ]
        rows += shares
        if len(shares) == 2:
            figure = harmonic_mean(*(row.value for row in shares))
            f1_rows[name] = TaskRow(Level.section, f"{name}, F1", figure, len(members))
    rows += f1_rows.values()
    if set(_SETS) <= set(f1_rows):
        overall = mean_of(f1_rows[name] for name in _SETS)
        rows.append(TaskRow(Level.overall, "ProcessBench", overall))
    return rows


PROCESSBENCH = Task(
    name="processbench",
    file="Qwen/ProcessBench, gsm8k, math, olympiadbench or omnimath",
    read=_read_processbench,
    judge=_judge_first_error,
    summarise=_summarise_processbench,
    keys_from_name=_read_set,
    reads_steps=True,
    choose=_choose_threshold,
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
# ``mr_visualize/eval_res_view/draw_tabs/form_latex_strs.ipynb``). They are computed over all steps
# of a class, or of all classes; they are not means over solutions or classes. F1 treats right steps
# as positive, and negative F1 treats wrong steps as positive. As in the original, a ratio with a
# denominator of 0 counts as -1.
#
# Every changed solution was made from an original one. The originals, which the file repeats for
# every class, are read from the records of one class only, and no total includes them. They serve
# for the similarity: the absolute difference between the fraction of steps judged right in a
# changed solution and that fraction in its original. It is undefined if no step of the original is
# judged right. The original benchmark also has a verdict on redundancy for models that give one;
# this package does not request it.

# Class names as the benchmark spells them, including "redundency".
_GROUPS = {
    "simplicity": ("redundency", "circular"),
    "soundness": ("counterfactual", "step_contradiction", "domain_inconsistency", "confidence"),
    "sensitivity": ("missing_condition", "deception", "multi_solutions"),
}
_CLASSES = tuple(name for names in _GROUPS.values() for name in names)
# The original solutions are read from the records of this class.
_CLASS_WITH_ORIGINALS = "redundency"
# Subset of the items with an original solution.
_ORIGINAL = "correct"
# The solutions of this class have no wrong steps, so its PRMScore is F1 only.
_CLASS_WITHOUT_ERRORS = "multi_solutions"


def _read_prmbench(value: dict[str, Any]) -> tuple[Item, ...]:
    kind, name, wrong = str(value["classification"]), str(value["idx"]), value["error_steps"]
    if not isinstance(wrong, list) or not all(type(step) is int and step > 0 for step in wrong):
        raise DataError(
            f"error_steps: got {shown(wrong)}, wanted a list of step numbers, counted from 1"
        )
    text = _read_solution(value, "modified_question", "modified_process")
    # A few records list step numbers that they do not have. The original code ignores these, too.
    numbers = range(1, len(value["modified_process"]) + 1)
    labels = tuple(float(number not in wrong) for number in numbers)
    items = (Item(name, kind, (text,), num_right=0, scores=labels),)
    if kind != _CLASS_WITH_ORIGINALS:
        return items
    text = _read_solution(value, "original_question", "original_process")
    labels = (1.0,) * len(value["original_process"])
    return *items, Item(name, _ORIGINAL, (text,), num_right=0, scores=labels)


def _get_labels(item: Item) -> np.ndarray:
    """Return the labels of a solution's steps, ``[S]`` bool, True for a right step."""
    return np.array(item.scores) == 1


def _judge_all_steps(item: Item, rewards: np.ndarray) -> float:
    """Return the fraction of a solution's steps that the model judges correctly.

    ``rewards [S]`` have the threshold subtracted, so a positive reward means a right step.
    """
    return float(((rewards > 0) == _get_labels(item)).mean())


def _get_verdicts(prediction: Prediction) -> np.ndarray:
    """Return the model's verdicts on a solution's steps, ``[S]`` bool, True for a right step."""
    assert prediction.above is not None
    verdicts: np.ndarray = prediction.above > 0
    return verdicts


def _summarise_prmbench(predictions: Sequence[Prediction]) -> list[TaskRow]:
    # Some records occur twice in the file; only the first one counts.
    unique: dict[tuple[str, str], Prediction] = {}
    for prediction in predictions:
        unique.setdefault((prediction.item.source, prediction.item.id), prediction)
    classes = group_by_subset([*unique.values()])
    originals = classes.pop(_ORIGINAL, [])
    original_shares = {
        original.item.id: float(_get_verdicts(original).mean()) for original in originals
    }
    rows: list[TaskRow] = []
    scores: dict[str, float] = {}
    for name, members in classes.items():
        figures = _compute_figures(members, original_shares)
        scores[name] = _compute_prm_score(figures, name)
        rows.append(TaskRow(Level.subset, f"{name}, PRMScore", scores[name], len(members)))
        rows += [TaskRow(Level.subset, f"{name}, {key}", value) for key, value in figures.items()]
    if originals:
        share = float(np.concatenate([*map(_get_verdicts, originals)]).mean())
        rows.append(TaskRow(Level.subset, "unchanged, steps judged right", share, len(originals)))
    for group, names in _GROUPS.items():
        if scores.keys() >= set(names):
            mean = float(np.mean([scores[name] for name in names]))
            rows.append(TaskRow(Level.section, f"{group}, PRMScore", mean))
    changed = [prediction for members in classes.values() for prediction in members]
    if changed:
        figures = _compute_figures(changed, original_shares)
        rows += [TaskRow(Level.section, f"all, {key}", value) for key, value in figures.items()]
        level = Level.overall if scores.keys() >= set(_CLASSES) else Level.section
        name = "PRMBench" if level is Level.overall else "all, PRMScore"
        rows.append(TaskRow(level, name, _compute_prm_score(figures), len(changed)))
    return rows


def _compute_prm_score(figures: dict[str, float], class_name: str = "") -> float:
    """Compute the PRMScore of a class, or of all classes if ``class_name`` is "".

    It is the mean of ``F1`` and ``negative F1`` in ``figures``; for the class without errors it is
    F1.
    """
    right, wrong = figures["F1"], figures["negative F1"]
    return max(0.0, right if class_name == _CLASS_WITHOUT_ERRORS else 0.5 * right + 0.5 * wrong)


def _compute_figures(
    predictions: Sequence[Prediction], original_shares: dict[str, float]
) -> dict[str, float]:
    """Compute the figures of PRMBench over all steps of some items, by name.

    A mean over no values, such as a similarity that is undefined for all items, is left out.

    Args:
        predictions: the items with changed solutions.
        original_shares: fraction of steps that the model judges right in each original solution, by
            the identifier of the item.
    """
    judged = np.concatenate([*map(_get_verdicts, predictions)])
    right = np.concatenate([_get_labels(prediction.item) for prediction in predictions])
    is_first_error_found, share_differences = [], []
    for prediction in predictions:
        verdicts = _get_verdicts(prediction)
        wrong_steps = np.flatnonzero(~_get_labels(prediction.item))
        is_first_error_found += [not verdicts[step] for step in wrong_steps[:1]]
        if original_share := original_shares.get(prediction.item.id):
            share_differences.append(abs(float(verdicts.mean()) - original_share))
    means = {
        "step accuracy": judged == right,
        "right steps judged right": judged[right],
        "wrong steps judged wrong": ~judged[~right],
        "first error judged wrong": is_first_error_found,
        "similarity": share_differences,
    }
    return {
        "F1": _compute_f1(judged, right),
        "negative F1": _compute_f1(~judged, ~right),
        **{name: float(np.mean(values)) for name, values in means.items() if len(values)},
    }


def _compute_f1(predicted: np.ndarray, labelled: np.ndarray) -> float:
    """Compute the F1 of verdicts, treating True as positive.

    ``predicted`` and ``labelled`` are verdicts and labels of all steps, ``[S]`` bool. As in the
    original, precision, recall and F1 are -1 if their denominator is 0.
    """
    hits = int((predicted & labelled).sum())
    precision = _divide(hits, int(predicted.sum()))
    recall = _divide(hits, int(labelled.sum()))
    return _divide(2 * precision * recall, precision + recall)


def _divide(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else -1.0


PRMBENCH = Task(
    name="prmbench",
    file="PRMBench, or one of the files of ssmisya/PRMBench",
    read=_read_prmbench,
    judge=_judge_all_steps,
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
