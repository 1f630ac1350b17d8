"""Benchmark protocol: how a file is read, what a right verdict is, and how they add up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from nemo_aligner.contract.messages import Text
from nemo_aligner.data.formats.base import read_conversation
from nemo_aligner.evaluation.predictions import Item, Prediction
from nemo_aligner.metrics.ranking import wilson_interval
from nemo_aligner.utils.errors import DataError


class Level(str, Enum):
    subset = "subset"
    section = "section"
    overall = "overall"


@dataclass(frozen=True)
class TaskRow:
    """Figure of a benchmark; with its 95% interval if it is a mean over ``count`` items."""

    level: Level
    name: str
    value: float
    count: int | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Task:
    """A benchmark.

    Attributes:
        name: value of ``task=``.
        file: where the file is published, for error messages.
        read: makes an item, or several, of one object of the file; None for one without a verdict.
        judge: credit for the rewards of an item, by the benchmark's rule.
        summarise: the benchmark's figures, in the order of its table.
        sample: an object of the file.
        of_name: keys that objects lack and the file's name (without its ending) has.
        reads_steps: the rewards of an item, which has one text, are those of its steps, and
            ``judge`` gets them less the threshold from which on a step is right.
        choose: of steps, the threshold that is best for items and their rewards ``[S]``, and the
            figure that it is best by.
    """

    name: str
    file: str
    read: Callable[[dict[str, Any]], Item | tuple[Item, ...] | None]
    judge: Callable[[Item, np.ndarray], float]
    summarise: Callable[[Sequence[Prediction]], list[TaskRow]]
    sample: dict[str, Any]
    of_name: Callable[[str], dict[str, Any]] = lambda stem: {}
    reads_steps: bool = False
    choose: Callable[[Sequence[Item], Sequence[np.ndarray]], tuple[float, float]] | None = None


def asked(prompt: Any, reply: Any, key: str) -> Text:
    """Conversation of a prompt (a string or messages) and a reply.

    Raises:
        DataError: they do not make one.
    """
    if not isinstance(reply, str):
        raise DataError(f"{key}: got {reply!r:.60} to {prompt!r:.60}, wanted a reply to a prompt")
    return read_conversation(prompt, reply, key)


def labelled_item(
    value: dict[str, Any],
    prompt_key: str,
    orders: Mapping[Any, tuple[str, str] | None],
    name: str = "",
    subset: str = "",
) -> Item | None:
    """Item of two replies; ``orders`` maps a label to their fields, the right one's first.

    None if it maps the label to None: a human tie has no verdict to get right.

    Raises:
        DataError: ``orders`` does not have the label.
    """
    label = value["label"]
    if label not in [*orders]:  # a list: the label may be any JSON value, also an unhashable one
        *others, last = map(str, orders)
        raise DataError(f"label: got {label!r:.60}, wanted {', '.join(others)} or {last}")
    sides = orders[label]
    if sides is None:
        return None
    return Item(name, subset, tuple(asked(value[prompt_key], value[side], side) for side in sides))


def listed_replies(value: dict[str, Any], count: int | None = None) -> tuple[Text, ...]:
    """Texts of the lists ``chosen`` and then ``rejected``, each of ``count`` replies.

    Raises:
        DataError: one of them is not such a list.
    """
    texts: list[Text] = []
    for key in ("chosen", "rejected"):
        replies = value[key]
        if not isinstance(replies, list) or not replies or len(replies) != (count or len(replies)):
            wanted = "replies" if count is None else f"{count} replies"
            raise DataError(f"{key}: got {replies!r:.60}, wanted a list of {wanted}")
        texts += [asked(value["prompt"], reply, key) for reply in replies]
    return tuple(texts)


def first_is_above(item: Item, rewards: np.ndarray) -> float:
    """1 if the right one of two replies has the higher reward.

    A tie is wrong, as in RewardBench; elsewhere in this package it is half right.
    """
    return float(rewards[0] > rewards[1])


def share_row(level: Level, name: str, predictions: Sequence[Prediction]) -> TaskRow:
    """Share that is right, with its 95% Wilson interval."""
    right = sum(each.right for each in predictions)
    low, high = wilson_interval(right, len(predictions))
    return TaskRow(level, name, right / len(predictions), len(predictions), low, high)


def subset_rows(predictions: Sequence[Prediction]) -> list[TaskRow]:
    """Share of every subset, by name."""
    return [share_row(Level.subset, name, some) for name, some in by_subset(predictions).items()]


def by_subset(predictions: Sequence[Prediction]) -> dict[str, list[Prediction]]:
    """Predictions of every subset, by name."""
    found: dict[str, list[Prediction]] = {}
    for each in sorted(predictions, key=lambda one: one.item.source):
        found.setdefault(each.item.source, []).append(each)
    return found


def pair_rows(predictions: Sequence[Prediction]) -> list[TaskRow]:
    """Rows of a benchmark of pairs without sections: its subsets, if several, and all pairs."""
    rows = subset_rows(predictions)
    return [*(rows if len(rows) > 1 else []), share_row(Level.overall, "all", predictions)]


def mean_of(rows: Iterable[TaskRow]) -> float:
    return float(np.mean([row.value for row in rows]))
