"""Table of predictions: the rewards of pairs, rated replies and benchmark items.

``compare``, the robustness check, benchmarks and reports all read this table. On disk it is a file
with one JSON object a line: what ``output_rewards`` of ``nemo-aligner evaluate`` writes, and what a
training run keeps of its held-out records.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nemo_aligner.config.common import RecordKind
from nemo_aligner.contract.messages import Text, as_json, read_text, reply_of
from nemo_aligner.data.files import AnyLine, BadLine, Line, read_lines
from nemo_aligner.data.records import PAIR_COLUMNS, RATED_COLUMN, reward_row, row_lines
from nemo_aligner.metrics.ranking import PairRewards
from nemo_aligner.utils.errors import DataError
from nemo_aligner.utils.finite import finite_or_none
from nemo_aligner.utils.writing import write_lines

ALL = "all"
_BENCHMARK_SIDES = ("right", "wrong")


@dataclass(frozen=True)
class Item:
    """Samples that are scored together: a pair, a rated reply, or a benchmark's K replies.

    Attributes:
        id: identifier in the benchmark's file; "" for other records.
        source: the record's source, or the subset of a benchmark; "" if the record names none.
        texts: the K samples, each a prompt with its reply; samples with a right reply come first.
        num_right: number of samples with a right reply.
        scores: human or programmatic score of each sample, or the labels of a solution's steps;
            empty for benchmarks without scores.
        pairs: pairs of samples to compare, each as two indices, the better sample first; empty
            unless the benchmark lists them.
        is_code: True if the replies are code without markdown fences.
    """

    id: str
    source: str
    texts: tuple[Text, ...]
    num_right: int = 1
    scores: tuple[float, ...] = ()
    pairs: tuple[tuple[int, int], ...] = ()
    is_code: bool = False


@dataclass(frozen=True)
class Prediction:
    """The rewards of one item, and the verdict on it.

    Attributes:
        rewards: rewards of the K samples, ``[K]``. A rated reply has one for each attribute,
            ``[A]``; a benchmark that judges steps has one for each step, ``[S]``.
        right: how far the rewards are right, 0 to 1. For a pair it is 1 if the chosen reply has the
            higher reward, 0.5 for a tie, else 0; a benchmark computes it by its own rule. NaN for a
            rated reply.
        record: file and line of the record.
        labels: labels of a rated reply, ``[A]``, NaN where one is missing; else None.
        spread: uncertainty of each reward of a rated reply, ``[A]``; None if unknown.
        above: rewards of a benchmark's steps minus the threshold from which a step is right,
            ``[S]``; else None.
    """

    item: Item
    rewards: np.ndarray
    right: float = nan
    record: str = ""
    labels: np.ndarray | None = None
    spread: np.ndarray | None = None
    above: np.ndarray | None = None

    @classmethod
    def of_pair(
        cls, record: str, source: str, texts: tuple[Text, ...], rewards: np.ndarray
    ) -> Prediction:
        """Build the prediction for a pair, and judge from its rewards whether it is right.

        Args:
            record: file and line of the pair.
            source: source of the pair.
            texts: the chosen sample, then the rejected one.
            rewards: their rewards, ``[2]``.
        """
        prediction = cls(Item("", source, texts), rewards, record=record)
        return replace(prediction, right=(float(np.sign(prediction.margin)) + 1) / 2)

    @classmethod
    def of_rating(
        cls,
        record: str,
        source: str,
        text: Text,
        rewards: np.ndarray,
        labels: np.ndarray,
        spread: np.ndarray | None = None,
    ) -> Prediction:
        """Build the prediction for a rated reply; the arrays are ``[A]``, by attribute."""
        item = Item("", source, (text,), num_right=0)
        return cls(item, rewards, record=record, labels=labels, spread=spread)

    @property
    def closest(self) -> tuple[int, int]:
        """Indices of the right reply with the lowest reward and the wrong reply with the highest.

        If this pair is ordered correctly, so is every pair of a right and a wrong reply.
        """
        num_right = self.item.num_right
        lowest, highest = self.rewards[:num_right].argmin(), self.rewards[num_right:].argmax()
        return int(lowest), num_right + int(highest)

    @property
    def margin(self) -> float:
        """Lowest reward of a right reply minus highest reward of a wrong one.

        For a pair, this is the reward of the chosen reply minus that of the rejected one.
        """
        right, wrong = self.closest
        return float(self.rewards[right]) - float(self.rewards[wrong])

    @property
    def sides(self) -> tuple[tuple[Text, ...], tuple[Text, ...]]:
        """The samples with right replies, then those with wrong replies; a pair has one of each."""
        return self.item.texts[: self.item.num_right], self.item.texts[self.item.num_right :]


@dataclass(frozen=True)
class Predictions:
    """Table of N predictions of one kind: all pairs, all rated replies, or all benchmark items.

    ``lengths`` counts the characters of replies, not tokens, so that models with different
    tokenizers can be compared.

    Attributes:
        rows: the N predictions.
        attributes: names of the A attributes of rated replies; empty for pairs and benchmarks.
        is_benchmark: True for benchmark items. In an ``output_rewards`` file such a row has a list
            of right and a list of wrong replies, where a pair has one of each.
    """

    rows: Sequence[Prediction]
    attributes: tuple[str, ...] = ()
    is_benchmark: bool = False

    @property
    def is_rated(self) -> bool:
        """True if the rows are rated replies, which have labels but no verdicts."""
        return bool(self.attributes)

    @property
    def has_sides(self) -> bool:
        """True if every row has right and wrong replies, so that it has a margin.

        It is False for rated replies, and for benchmarks such as best of n.
        """
        return all(0 < row.item.num_right < len(row.rewards) for row in self.rows)

    @cached_property
    def rewards(self) -> np.ndarray:
        """Rewards as float64.

        They are ``[N, A]`` for rated replies. Otherwise they are ``[N, 2]``: the rewards of the
        right and the wrong reply that ``Prediction.closest`` selects.
        """
        rewards = [
            row.rewards if self.is_rated else row.rewards[[*row.closest]] for row in self.rows
        ]
        return np.array(rewards, dtype=float).reshape(-1, len(self.attributes) or 2)

    @cached_property
    def labels(self) -> np.ndarray:
        """Labels of rated replies, ``[N, A]`` float64, NaN where one is missing."""
        return np.array([row.labels for row in self.rows], dtype=float)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Length in characters, int64, of each reply whose reward is in ``rewards``.

        They are ``[N, 1]`` for rated replies, otherwise ``[N, 2]``.
        """
        columns = [(0,) if self.is_rated else row.closest for row in self.rows]
        lengths = [
            [len(reply_of(row.item.texts[index])) for index in indices]
            for row, indices in zip(self.rows, columns, strict=True)
        ]
        return np.array(lengths, dtype=np.int64).reshape(len(self.rows), -1)

    @cached_property
    def right(self) -> np.ndarray:
        """How far each of the N rows is right, ``[N]`` float64.

        For a pair it is 1 if the chosen reply has the higher reward, 0.5 for a tie, else 0. A
        benchmark computes it by its own rule, from 0 to 1. It is NaN for a rated reply.
        """
        return np.array([row.right for row in self.rows], dtype=float)

    @cached_property
    def names(self) -> list[str]:
        """Name of each row, ``file:line``.

        A record with several rows has several pairs, so its second row is ``file:line, pair 2``.
        """
        counters: dict[str, Iterator[int]] = {}
        names = []
        for row in self.rows:
            # A record of three or more ranked completions has a row for each pair of them.
            number = next(counters.setdefault(row.record, count(1)))
            names.append(f"{row.record}, pair {number}" if number > 1 else row.record)
        return names

    def as_metrics(self) -> PairRewards:
        """Convert rows with verdicts to the input of the functions in ``nemo_aligner.metrics``.

        Each row becomes a pair of the two replies in ``Prediction.closest``, with lengths in
        characters.
        """
        return PairRewards.of(torch.from_numpy(self.rewards), torch.from_numpy(self.lengths))

    def by_source(self) -> list[tuple[str, np.ndarray]]:
        """Group the rows by their source, to compute figures for each source.

        Returns:
            (name, indices of rows ``[n]``): all rows as ``all`` and then, if there are several
            sources, the rows of each source.
        """
        sources = np.array([row.item.source for row in self.rows])
        names = sorted(set(sources.tolist()))
        groups = [(name or "none", np.flatnonzero(sources == name)) for name in names]
        return [(ALL, np.arange(len(sources))), *(groups if len(names) > 1 else [])]

    def draw(self, count: int) -> Predictions:
        """Return a random sample of at most ``count`` rows, in the order of the table.

        Every call with the same ``count`` draws the same rows.
        """
        if count >= len(self.rows):
            return self
        drawn = sorted(random.Random(0).sample(range(len(self.rows)), count))
        return replace(self, rows=[self.rows[index] for index in drawn])

    def to_rows(self) -> list[dict[str, Any]]:
        """Convert every row to a dict that JSON can hold, as in an ``output_rewards`` file."""
        convert = _benchmark_row_to_dict if self.is_benchmark else self._row_to_dict
        return [convert(row) for row in self.rows]

    def write(self, path: Path) -> str:
        """Write an ``output_rewards`` file: one JSON object a line for each row.

        Returns:
            The path, and whether another file was replaced, for a message.
        """
        return write_lines(path, row_lines(self.to_rows()), "output_rewards")

    def _row_to_dict(self, row: Prediction) -> dict[str, Any]:
        kind = RecordKind.rating if self.is_rated else RecordKind.comparison

        def name_values(values: np.ndarray | None) -> dict[str, float]:
            names = self.attributes or PAIR_COLUMNS
            return {} if values is None else dict(zip(names, values.tolist(), strict=True))

        item, rewards = row.item, name_values(row.rewards)
        columns = {"labels": name_values(row.labels), "spread": name_values(row.spread)}
        return reward_row(kind, row.record, item.source, rewards, item.texts, **columns)


def _benchmark_row_to_dict(row: Prediction) -> dict[str, Any]:
    rewards = row.rewards.astype(float).tolist()
    rewards_by_side = rewards[: row.item.num_right], rewards[row.item.num_right :]
    return {
        "record": row.record,
        "id": row.item.id,
        "source": row.item.source,
        "right": finite_or_none(row.right),
        "rewards": finite_or_none(dict(zip(_BENCHMARK_SIDES, rewards_by_side, strict=True))),
        "texts": {
            name: [text if isinstance(text, str) else as_json(text) for text in side]
            for name, side in zip(_BENCHMARK_SIDES, row.sides, strict=True)
        },
    }


def read_predictions(path: Path) -> Predictions:
    """Read an ``output_rewards`` file of pairs, rated replies or benchmark items.

    Raises:
        DataError: the file cannot be read, or evaluate did not write it.
    """
    lines = _read_output(path)
    first = lines[0] if lines else None
    if not isinstance(first, Line) or not _is_rated(first.value):
        return _parse_pairs(path, lines)
    try:
        names = tuple(_get_object(first.value, "rewards"))
    except DataError as error:
        raise DataError(f"{path}:{first.number}: {error}") from error
    return Predictions(list(_parse_rows(path, lines, partial(_parse_rated, names=names))), names)


def read_pairs(path: Path) -> Predictions:
    """Read an ``output_rewards`` file of pairs or benchmark items with right and wrong replies.

    Raises:
        DataError: the file cannot be read, holds rated replies or items without right or wrong
            replies, or evaluate did not write it.
    """
    predictions = _parse_pairs(path, _read_output(path))
    if not predictions.has_sides:
        raise DataError(
            f"{path}: got items of a benchmark without right and wrong replies, such as best_of_n "
            "or processbench, which have no margins to compare. Draw the two evaluations into one "
            "page with `nemo-aligner report`"
        )
    return predictions


def _read_output(path: Path) -> list[AnyLine]:
    """Read the lines of an ``output_rewards`` file; DataError if it cannot be read."""
    if path.is_dir():
        raise DataError(
            f"{path}: is a folder. Pass a file that `nemo-aligner evaluate` wrote as "
            "output_rewards, such as rewards.jsonl"
        )
    return read_lines(path)


def _parse_pairs(path: Path, lines: Sequence[Line | BadLine]) -> Predictions:
    if not lines:
        raise DataError(
            f"{path}: the file is empty. Pass a file that `nemo-aligner evaluate` wrote as "
            "output_rewards."
        )
    for line in lines:
        if isinstance(line, Line) and _is_rated(line.value):
            raise DataError(
                f"{path}:{line.number}: got a rated reply, which has no verdict to compare. Write "
                "both files by evaluating the two models on pairs or on a benchmark; or draw the "
                "two evaluations of ratings into one page with `nemo-aligner report`"
            )
    return Predictions(list(_parse_rows(path, lines, _parse_pair)))


def _parse_rows(
    path: Path,
    lines: Sequence[Line | BadLine],
    parse_row: Callable[[Mapping[str, Any]], Prediction],
) -> Iterator[Prediction]:
    for line in lines:
        if isinstance(line, BadLine):
            raise DataError(f"{path}:{line.number}: {line.reason}")
        try:
            yield parse_row(line.value)
        except DataError as error:
            raise DataError(
                f"{path}:{line.number}: {error}. Pass a file that `nemo-aligner evaluate` wrote as "
                "output_rewards."
            ) from error


def _is_rated(value: Mapping[str, Any]) -> bool:
    texts = value.get("texts")
    return isinstance(texts, Mapping) and RATED_COLUMN in texts


def _parse_pair(value: Mapping[str, Any]) -> Prediction:
    names = _BENCHMARK_SIDES if "right" in value else PAIR_COLUMNS
    right, wrong = (_get_numbers(value, "rewards", name) for name in names)
    rewards = np.concatenate([right, wrong])
    if not rewards.size or not np.isfinite(np.ptp(rewards)):
        raise DataError(f"rewards: got {value['rewards']!r:.60}, wanted only finite numbers")
    record, source = str(value.get("record", "")), str(value.get("source", ""))
    sides = [_get_field(value, "texts", name) for name in names]
    if names is PAIR_COLUMNS:
        texts = _parse_sample(sides[0]), _parse_sample(sides[1])
        return Prediction.of_pair(record, source, texts, rewards)
    for name, side in zip(names, sides, strict=True):
        if not isinstance(side, list):
            raise DataError(f"texts.{name}: got {side!r:.60}, wanted a list of samples")
    samples = tuple(_parse_sample(sample) for side in sides for sample in side)
    item = Item(str(value.get("id", "")), source, samples, len(right))
    # Without both sides, ``right`` may be another figure, such as the score of the best of n.
    credit = _parse_credit(value["right"]) if right.size and wrong.size else nan
    return Prediction(item, rewards, credit, record)


def _parse_credit(value: Any) -> float:
    if isinstance(value, int | float) and 0 <= value <= 1:
        return float(value)
    raise DataError(f"right: got {value!r:.60}, wanted a number from 0 to 1")


def _parse_rated(value: Mapping[str, Any], names: Sequence[str]) -> Prediction:
    rewards, labels = (
        np.concatenate([_get_numbers(value, key, name) for name in names])
        for key in ("rewards", "labels")
    )
    if not len(rewards) == len(labels) == len(names):
        raise DataError(
            f"rewards, labels: got {len(rewards)} and {len(labels)} numbers, wanted one of each "
            f"for {', '.join(names)}"
        )
    sample = _parse_sample(_get_field(value, "texts", RATED_COLUMN))
    record, source = str(value.get("record", "")), str(value.get("source", ""))
    return Prediction.of_rating(record, source, sample, rewards, labels)


def _get_object(value: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = value.get(key)
    if not isinstance(section, Mapping):
        keys = ", ".join(map(repr, value)) or "none"
        raise DataError(f"{key}: got a row with the keys {keys}, wanted one with an object {key!r}")
    return section


def _get_field(value: Mapping[str, Any], key: str, name: str) -> Any:
    section = _get_object(value, key)
    if name not in section:
        keys = ", ".join(map(repr, section)) or "none"
        raise DataError(f"{key}: got the keys {keys}, wanted {name!r}")
    return section[name]


def _get_numbers(value: Mapping[str, Any], key: str, name: str) -> np.ndarray:
    """Convert ``value[key][name]``, a number or a list, to ``[K]`` float64; null becomes NaN."""
    numbers = _get_field(value, key, name)
    try:
        return np.array(numbers, dtype=float).ravel()
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{key}.{name}: got {numbers!r:.60}, wanted a number") from error


def _parse_sample(value: Any) -> Text:
    """Check a sample of an ``output_rewards`` file, and convert it for scoring.

    It is a string, a list of messages, or an object of messages with tools or documents.
    """
    # Only an object, which has tools or documents next to its messages, needs to be converted.
    if isinstance(value, Mapping):
        return read_text(value)
    is_conversation = isinstance(value, list) and value
    if isinstance(value, str) or (
        is_conversation and all(isinstance(turn, dict) and "role" in turn for turn in value)
    ):
        return value
    raise DataError(f"texts: got {value!r:.60}, wanted a string or a list of messages")
