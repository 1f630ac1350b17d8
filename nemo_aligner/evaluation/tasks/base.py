"""``Task``, the definition of a benchmark, and functions that several benchmarks share.

A benchmark reads items from its file, judges the rewards of each item, and summarises the verdicts
as the figures of its table. ``run_task`` runs these three parts in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np

from nemo_aligner.contract.messages import Text
from nemo_aligner.data.formats.base import Fields, read_conversation
from nemo_aligner.data.formats.prompts import with_record_columns
from nemo_aligner.data.records import Comparison, Origin
from nemo_aligner.evaluation.predictions import Item, Prediction
from nemo_aligner.metrics.ranking import wilson_interval
from nemo_aligner.utils.errors import DataError, shown


class Level(str, Enum):
    """Scope of a figure of a benchmark: a subset, a section of subsets, or all items."""

    subset = "subset"
    section = "section"
    overall = "overall"


@dataclass(frozen=True)
class TaskRow:
    """A figure (a numeric result) of a benchmark: one row of its table.

    Attributes:
        level: what the figure covers.
        name: name of the row.
        value: the figure.
        count: number of items that the figure is computed from; None for a mean of other figures.
        low, high: 95% interval of the figure; None if there is none.
    """

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
        name: value of the setting ``task``.
        file: where the file is published, for error messages.
        read: converts one object of the file to an item or several; None for an object without a
            verdict, such as a human tie.
        judge: computes from its rewards how far an item is right, 0 to 1, by the benchmark's rule.
        summarise: computes the figures of the benchmark, in the order of its table.
        sample: an example object of the file.
        keys_from_name: returns keys that the objects lack, from the file's name up to its first
            dot, such as the subset of ``gsm8k.json``.
        reads_steps: True if the benchmark judges steps. An item then has one sample, its rewards
            ``[S]`` are those of the sample's steps, and ``judge`` gets them minus the threshold
            from which a step is right.
        choose: chooses the best threshold for steps from items and their rewards ``[S]``; returns
            the threshold and the figure that it maximises. None if the benchmark has no such rule.
    """

    name: str
    file: str
    read: Callable[[dict[str, Any]], Item | tuple[Item, ...] | None]
    judge: Callable[[Item, np.ndarray], float]
    summarise: Callable[[Sequence[Prediction]], list[TaskRow]]
    sample: dict[str, Any]
    keys_from_name: Callable[[str], dict[str, Any]] = lambda name: {}
    reads_steps: bool = False
    choose: Callable[[Sequence[Item], Sequence[np.ndarray]], tuple[float, float]] | None = None


# Columns that every benchmark reads next to its own keys. Whatever its benchmark, a record's
# samples must have the whole prompt.
_PROMPT_COLUMNS = ("system", "system_prompt", "history", "tools", "documents", "principle")


def read_items(task: Task, value: dict[str, Any]) -> tuple[Item, ...]:
    """Read the items of a record, and add its system prompt, tools and so on to their samples.

    Args:
        value: object of the benchmark's file.

    Returns:
        The items; none for a record without a verdict.

    Raises:
        DataError, KeyError: the record is not one of this benchmark, or has a prompt column that
            cannot be added to its samples.
    """
    fields = Fields(value)
    read = task.read(fields) or ()
    by_task = fields.names_read.copy()
    items = []
    for item in (read,) if isinstance(read, Item) else read:
        fields.names_read = by_task.copy()
        ranking = Comparison(item.texts, tuple(range(len(item.texts))), Origin("", 0))
        record = with_record_columns(ranking, fields, labels=())
        items.append(replace(item, texts=tuple(record.texts)))
    ignored = [name for name in fields.unread() if name in _PROMPT_COLUMNS]
    if items and ignored:
        raise DataError(
            f"{ignored[0]}: got {shown(fields[ignored[0]])}, which cannot be added to the prompt. "
            "Correct it (docs/formats.md says what it may be), or remove the column"
        )
    return tuple(items)


def build_conversation(prompt: Any, reply: Any, key: str) -> Text:
    """Build a conversation of a prompt (a string or messages) and a reply.

    Args:
        key: key of the reply in the file, for error messages.

    Raises:
        DataError: the prompt or the reply is not valid.
    """
    if not isinstance(reply, str):
        raise DataError(f"{key}: got {reply!r:.60} as the reply to {prompt!r:.60}, wanted a string")
    return read_conversation(prompt, reply, key)


def read_labelled_item(
    value: dict[str, Any],
    prompt_key: str,
    orders: Mapping[Any, tuple[str, str] | None],
    name: str = "",
    subset: str = "",
    label_key: str = "label",
) -> Item | None:
    """Read an item of two replies and a label that says which of them is right.

    Args:
        value: object of the file, with the key ``label_key``.
        prompt_key: key of the prompt.
        orders: maps each label to the keys of the two replies, the right one's first; or to None if
            humans judged them a tie, so that no reply is right.
        name: identifier of the item.
        subset: subset of the benchmark.

    Returns:
        The item; None for a human tie.

    Raises:
        DataError: the label is not one of ``orders``, or a reply is not valid.
    """
    label = value[label_key]
    # Search a list, because the label may be any JSON value, even one that cannot be hashed.
    if label not in [*orders]:
        *first_labels, last_label = map(str, orders)
        raise DataError(
            f"{label_key}: got {label!r:.60}, wanted {', '.join(first_labels)} or {last_label}"
        )
    sides = orders[label]
    if sides is None:
        return None
    prompt = value[prompt_key]
    samples = tuple(build_conversation(prompt, value[side], side) for side in sides)
    return Item(name, subset, samples)


def read_listed_replies(value: dict[str, Any], count: int | None = None) -> tuple[Text, ...]:
    """Read the samples of the lists of replies ``chosen`` and then ``rejected``.

    Args:
        value: object of the file, with the key ``prompt``.
        count: length that each list must have; None for any length but 0.

    Raises:
        DataError: ``chosen`` or ``rejected`` is not a list of this length.
    """
    texts: list[Text] = []
    for key in ("chosen", "rejected"):
        replies = value[key]
        if not isinstance(replies, list) or not replies or len(replies) != (count or len(replies)):
            expected = "replies" if count is None else f"{count} replies"
            raise DataError(f"{key}: got {replies!r:.60}, wanted a list of {expected}")
        texts += [build_conversation(value["prompt"], reply, key) for reply in replies]
    return tuple(texts)


def first_is_above(item: Item, rewards: np.ndarray) -> float:
    """Return 1 if the first reply of a pair, the right one, has the higher reward, else 0.

    ``rewards`` are ``[2]``.

    A tie counts 0, as in RewardBench. Elsewhere in this package a tie counts one half.
    """
    return float(rewards[0] > rewards[1])


def build_share_row(level: Level, name: str, predictions: Sequence[Prediction]) -> TaskRow:
    """Build the row whose figure is the mean of ``Prediction.right`` over ``predictions``.

    Its interval is the 95% Wilson interval of a fraction.
    """
    right = sum(prediction.right for prediction in predictions)
    low, high = wilson_interval(right, len(predictions))
    return TaskRow(level, name, right / len(predictions), len(predictions), low, high)


def build_subset_rows(predictions: Sequence[Prediction]) -> list[TaskRow]:
    """Build a row for each subset, with its mean ``Prediction.right``, in the order of names."""
    return [
        build_share_row(Level.subset, name, members)
        for name, members in group_by_subset(predictions).items()
    ]


def group_by_subset(predictions: Sequence[Prediction]) -> dict[str, list[Prediction]]:
    """Group predictions by subset, in the order of the subsets' names."""
    subsets: dict[str, list[Prediction]] = {}
    for prediction in sorted(predictions, key=lambda prediction: prediction.item.source):
        subsets.setdefault(prediction.item.source, []).append(prediction)
    return subsets


def build_pair_rows(predictions: Sequence[Prediction]) -> list[TaskRow]:
    """Build the rows of a benchmark of pairs without sections: its subsets, and all pairs.

    If there is only one subset, it has no row.
    """
    rows = build_subset_rows(predictions)
    return [*(rows if len(rows) > 1 else []), build_share_row(Level.overall, "all", predictions)]


def mean_of(rows: Iterable[TaskRow]) -> float:
    """Compute the unweighted mean of the figures of ``rows``."""
    return float(np.mean([row.value for row in rows]))
