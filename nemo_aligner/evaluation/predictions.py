"""Predictions: rewards of pairs, rated replies and benchmark items, in memory and on disk.

``compare``, robustness, benchmarks and the report all read this table. ``output_rewards`` and the
held-out files of a run have a line of JSON for each row.
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
from nemo_aligner.data.files import BadLine, Line, read_lines
from nemo_aligner.data.records import (
    PAIR_COLUMNS,
    RATED_COLUMN,
    reward_row,
    row_lines,
    write_lines,
)
from nemo_aligner.metrics.ranking import PairRewards
from nemo_aligner.utils.errors import DataError

ALL = "all"
_BENCHMARK_SIDES = ("right", "wrong")


@dataclass(frozen=True)
class Item:
    """A pair, a rated reply, or a prompt of a benchmark with its K replies.

    Attributes:
        id: as the benchmark's file has it.
        source: where the record says it is from, of a benchmark its subset; "" if it does not say.
        texts: K of them, the prompt included, the right ones first.
        num_right: how many are right.
        scores: of every text, where a benchmark has human or programmatic scores.
        pairs: indices of texts to compare, the better first, where a benchmark samples them.
        is_code: True if the replies are code without fences.
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
    """Rewards of one item.

    Attributes:
        rewards: ``[K]`` of its texts; of a rated reply ``[A]``.
        right: 1 if the chosen reply of a pair has the higher reward, one half for a tie, else 0; of
            a benchmark's item as the benchmark defines it.
        record: file and line.
        labels: ``[A]`` of a rated reply, NaN where one is missing.
        spread: ``[A]`` of a rated reply, how uncertain its rewards are; None if unknown.
        above: ``[S]`` of a benchmark's steps, the rewards less the threshold of a right one.
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
        """A chosen and a rejected reply."""
        found = cls(Item("", source, texts), rewards, record=record)
        return replace(found, right=(float(np.sign(found.margin)) + 1) / 2)

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
        """A rated reply."""
        item = Item("", source, (text,), num_right=0)
        return cls(item, rewards, record=record, labels=labels, spread=spread)

    @property
    def closest(self) -> tuple[int, int]:
        """Indices of the right reply with the lowest reward, and of the wrong one with the highest.

        The item is in order, by every pair of a right and a wrong reply, if these two are.
        """
        num_right = self.item.num_right
        lowest, highest = self.rewards[:num_right].argmin(), self.rewards[num_right:].argmax()
        return int(lowest), num_right + int(highest)

    @property
    def margin(self) -> float:
        """Reward of the first of ``closest`` minus that of the second."""
        right, wrong = self.closest
        return float(self.rewards[right]) - float(self.rewards[wrong])

    @property
    def sides(self) -> tuple[tuple[Text, ...], tuple[Text, ...]]:
        """Right texts and wrong ones."""
        return self.item.texts[: self.item.num_right], self.item.texts[self.item.num_right :]


@dataclass(frozen=True)
class Predictions:
    """Table of N predictions of one kind.

    Lengths are in characters, which do not depend on the models' tokenizers.

    Attributes:
        attributes: names of the A columns of rated replies; empty for pairs and benchmarks.
        is_benchmark: True to write the benchmark's form, lists of right and wrong replies.
    """

    rows: Sequence[Prediction]
    attributes: tuple[str, ...] = ()
    is_benchmark: bool = False

    @property
    def is_rated(self) -> bool:
        """True if the rows are rated replies, which have labels and no verdicts."""
        return bool(self.attributes)

    @cached_property
    def rewards(self) -> np.ndarray:
        """``[N, 2]`` float64 of the replies that ``closest`` finds; of rated replies ``[N, A]``."""
        found = [row.rewards if self.is_rated else row.rewards[[*row.closest]] for row in self.rows]
        return np.array(found, dtype=float).reshape(-1, len(self.attributes) or 2)

    @cached_property
    def labels(self) -> np.ndarray:
        """``[N, A]`` float64 of rated replies, NaN where one is missing."""
        return np.array([row.labels for row in self.rows], dtype=float)

    @cached_property
    def lengths(self) -> np.ndarray:
        """``[N, 2]`` int64 characters of the replies of ``rewards``, or ``[N, 1]``."""
        shown = [(0,) if self.is_rated else row.closest for row in self.rows]
        found = [
            [len(reply_of(row.item.texts[index])) for index in indices]
            for row, indices in zip(self.rows, shown, strict=True)
        ]
        return np.array(found, dtype=np.int64).reshape(len(self.rows), -1)

    @cached_property
    def right(self) -> np.ndarray:
        """``[N]`` float64, see ``Prediction``."""
        return np.array([row.right for row in self.rows], dtype=float)

    @cached_property
    def names(self) -> list[str]:
        """Records of the rows, numbered where one has several pairs."""
        seen: dict[str, Iterator[int]] = {}
        found = []
        for row in self.rows:
            # A record of three or more ranked completions has a row for each pair of them.
            number = next(seen.setdefault(row.record, count(1)))
            found.append(f"{row.record}, pair {number}" if number > 1 else row.record)
        return found

    def as_metrics(self) -> PairRewards:
        """Convert pairs to the input of ``metrics/``, with lengths in characters."""
        return PairRewards.of(torch.from_numpy(self.rewards), torch.from_numpy(self.lengths))

    def by_source(self) -> list[tuple[str, np.ndarray]]:
        """Indices of all rows, named ``all``, and of each source if there are several."""
        sources = np.array([row.item.source for row in self.rows])
        names = sorted(set(sources.tolist()))
        groups = [(name or "none", np.flatnonzero(sources == name)) for name in names]
        return [(ALL, np.arange(len(sources))), *(groups if len(names) > 1 else [])]

    def draw(self, most: int) -> Predictions:
        """Sample at most so many rows, in their order; the same ones every time."""
        if most >= len(self.rows):
            return self
        drawn = sorted(random.Random(0).sample(range(len(self.rows)), most))
        return replace(self, rows=[self.rows[index] for index in drawn])

    def to_rows(self) -> list[dict[str, Any]]:
        """Plain values of every row, as ``output_rewards`` has them."""
        make = _benchmark_row if self.is_benchmark else self._row
        return [make(row) for row in self.rows]

    def write(self, path: Path) -> None:
        """Write a line for every row, as ``output_rewards`` has it."""
        write_lines(path, row_lines(self.to_rows()))

    def _row(self, row: Prediction) -> dict[str, Any]:
        kind = RecordKind.rating if self.is_rated else RecordKind.comparison

        def named(values: np.ndarray | None) -> dict[str, float]:
            names = self.attributes or PAIR_COLUMNS
            return {} if values is None else dict(zip(names, values.tolist(), strict=True))

        item, rewards = row.item, named(row.rewards)
        more = {"labels": named(row.labels), "spread": named(row.spread)}
        return reward_row(kind, row.record, item.source, rewards, item.texts, **more)


def _benchmark_row(row: Prediction) -> dict[str, Any]:
    rewards = row.rewards.astype(float).tolist()
    parts = rewards[: row.item.num_right], rewards[row.item.num_right :]
    return {
        "record": row.record,
        "id": row.item.id,
        "source": row.item.source,
        "right": row.right,
        "rewards": dict(zip(_BENCHMARK_SIDES, parts, strict=True)),
        "texts": {
            name: [text if isinstance(text, str) else as_json(text) for text in side]
            for name, side in zip(_BENCHMARK_SIDES, row.sides, strict=True)
        },
    }


def read_predictions(path: Path) -> Predictions:
    """Read a file of ``output_rewards``.

    Raises:
        DataError: it cannot be read, or holds something else.
    """
    lines = read_lines(path)
    first = lines[0] if lines else None
    if not isinstance(first, Line) or not _is_rated(first.value):
        return _of_pairs(path, lines)
    try:
        names = tuple(_section(first.value, "rewards"))
    except DataError as error:
        raise DataError(f"{path}:{first.number}: {error}") from error
    return Predictions(list(_read_rows(path, lines, partial(_read_rated, names=names))), names)


def read_pairs(path: Path) -> Predictions:
    """``read_predictions`` of pairs or of a benchmark's items, which have verdicts.

    Raises:
        DataError: it cannot be read, or holds something else.
    """
    return _of_pairs(path, read_lines(path))


def _of_pairs(path: Path, lines: Sequence[Line | BadLine]) -> Predictions:
    if not lines:
        raise DataError(f"{path}: it is empty, wanted what evaluate's output_rewards writes")
    return Predictions(list(_read_rows(path, lines, _read_pair)))


def _read_rows(
    path: Path,
    lines: Sequence[Line | BadLine],
    read_row: Callable[[Mapping[str, Any]], Prediction],
) -> Iterator[Prediction]:
    for line in lines:
        if isinstance(line, BadLine):
            raise DataError(f"{path}:{line.number}: {line.reason}")
        try:
            yield read_row(line.value)
        except DataError as error:
            raise DataError(
                f"{path}:{line.number}: {error}. Pass a file that `nemo-aligner evaluate` wrote as "
                "output_rewards."
            ) from error


def _is_rated(value: Mapping[str, Any]) -> bool:
    texts = value.get("texts")
    return isinstance(texts, Mapping) and RATED_COLUMN in texts


def _read_pair(value: Mapping[str, Any]) -> Prediction:
    names = _BENCHMARK_SIDES if "right" in value else PAIR_COLUMNS
    if _is_rated(value):
        raise DataError(
            "got rewards of a rated reply, which has no verdict to compare; wanted a pair, or an "
            "item of a benchmark"
        )
    right, wrong = (_numbers(value, "rewards", name) for name in names)
    if not right.size or not wrong.size:
        raise DataError("got an item without a right or a wrong reply, wanted some of both")
    if not np.isfinite(right[right.argmin()] - wrong[wrong.argmax()]):
        raise DataError("a reward is missing")
    record, source = str(value.get("record", "")), str(value.get("source", ""))
    rewards = np.concatenate([right, wrong])
    sides = [_field(value, "texts", name) for name in names]
    if names is PAIR_COLUMNS:
        return Prediction.of_pair(record, source, (_text(sides[0]), _text(sides[1])), rewards)
    for name, side in zip(names, sides, strict=True):
        if not isinstance(side, list):
            raise DataError(f"texts.{name}: got {side!r:.60}, wanted a list of texts")
    texts = tuple(_text(text) for side in sides for text in side)
    item = Item(str(value.get("id", "")), source, texts, len(right))
    return Prediction(item, rewards, _share_right(value["right"]), record)


def _share_right(value: Any) -> float:
    if isinstance(value, int | float) and 0 <= value <= 1:
        return float(value)
    raise DataError(f"right: got {value!r:.60}, wanted a number from 0 to 1")


def _read_rated(value: Mapping[str, Any], names: Sequence[str]) -> Prediction:
    rewards, labels = (
        np.concatenate([_numbers(value, key, name) for name in names])
        for key in ("rewards", "labels")
    )
    if not len(rewards) == len(labels) == len(names):
        raise DataError(f"rewards, labels: wanted one number for each of {', '.join(names)}")
    text = _text(_field(value, "texts", RATED_COLUMN))
    record, source = str(value.get("record", "")), str(value.get("source", ""))
    return Prediction.of_rating(record, source, text, rewards, labels)


def _section(value: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = value.get(key)
    if not isinstance(section, Mapping):
        keys = ", ".join(map(repr, value)) or "none"
        raise DataError(f"{key}: got a row with the keys {keys}, wanted one with an object {key!r}")
    return section


def _field(value: Mapping[str, Any], key: str, name: str) -> Any:
    section = _section(value, key)
    if name not in section:
        keys = ", ".join(map(repr, section)) or "none"
        raise DataError(f"{key}: got the keys {keys}, wanted {name!r}")
    return section[name]


def _numbers(value: Mapping[str, Any], key: str, name: str) -> np.ndarray:
    """``[K]`` float64, NaN where one is null."""
    number = _field(value, key, name)
    try:
        return np.array(number, dtype=float).ravel()
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{key}.{name}: got {number!r:.60}, wanted a number") from error


def _text(value: Any) -> Text:
    """A text as evaluate wrote it; only an object, which has tools or documents, is read anew."""
    if isinstance(value, Mapping):
        return read_text(value)
    is_conversation = isinstance(value, list) and value
    if isinstance(value, str) or (
        is_conversation and all(isinstance(turn, dict) and "role" in turn for turn in value)
    ):
        return value
    raise DataError(f"texts: got {value!r:.60}, wanted a text or a list of messages")
