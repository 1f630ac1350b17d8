"""Running a benchmark: its file, a source of rewards, and the benchmark's own figures."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from nemo_aligner.contract.contract import OverlongError
from nemo_aligner.contract.messages import Text, messages_of
from nemo_aligner.contract.readout import one_reward
from nemo_aligner.contract.scorer import SampleEncoder
from nemo_aligner.contract.steps import StepTextError
from nemo_aligner.contract.turns import TurnMarkError
from nemo_aligner.data.files import BadLine, Line, read_lines
from nemo_aligner.data.records import write_lines
from nemo_aligner.evaluation.predictions import Item, Prediction, Predictions
from nemo_aligner.evaluation.sources import RewardSource
from nemo_aligner.evaluation.tasks.base import Level, Task, TaskRow
from nemo_aligner.utils.console import fit_row
from nemo_aligner.utils.errors import ConfigError, DataError, writable


@dataclass(frozen=True)
class TaskResult:
    """Results of a benchmark; ``left_out`` counts items by reason."""

    task: str
    rows: list[TaskRow]
    predictions: Predictions
    left_out: dict[str, int]

    @property
    def accuracy(self) -> float | None:
        """The benchmark's overall figure; None where a part of it is missing, or it has none."""
        return None if self._overall is None else self._overall.value

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval of the overall figure; None where there is none."""
        row = self._overall
        return None if row is None or row.low is None or row.high is None else (row.low, row.high)

    @property
    def _overall(self) -> TaskRow | None:
        return next((row for row in self.rows if row.level is Level.overall), None)

    @property
    def metrics(self) -> dict[str, float]:
        """Figures by name."""
        return {row.name: row.value for row in self.rows}

    @property
    def counts(self) -> dict[str, int]:
        """Number of scored items, and of those left out by reason."""
        return {"kept": len(self.predictions.rows), **self.left_out}

    def render(self, about: Mapping[str, str]) -> str:
        """Table of subsets, sections and overall figures, for people."""
        counts = [f"{len(self.predictions.rows)} scored"]
        counts += [f"{count} {why}: left out" for why, count in self.left_out.items()]
        about = {"task": self.task, **about, "items": ", ".join(counts)}
        lines = [fit_row(name, text, 14) for name, text in about.items()]
        width = max(len(row.name) for row in self.rows) + 2
        before: Level | None = None
        for row in self.rows:
            if row.level is not before:
                lines.append("")
            before = row.level
            lines.append(_table_line(row, width))
        return "\n".join(lines)

    def write(self, path: Path, about: Mapping[str, Any]) -> None:
        """Write all rows as one JSON object."""
        rows = [asdict(row) for row in self.rows]
        content = {"task": self.task, **about, "rows": rows, "left_out": self.left_out}
        write_lines(path, [json.dumps(content, indent=2, ensure_ascii=False)])


def _table_line(row: TaskRow, width: int) -> str:
    interval = "" if row.low is None else f"({row.low:.3f} to {row.high:.3f})"
    count = "" if row.count is None else str(row.count)
    return f"{row.name:<{width}}{row.value:>8.4f}  {interval:<18}{count:>7}".rstrip()


def run_task(
    task: Task,
    path: str | Path,
    source: RewardSource,
    threshold: float = 0.5,
) -> TaskResult:
    """Score every text of a benchmark's file, and summarise the verdicts as the benchmark does.

    An item with a text that the model does not take, or that gets no reward, is left out and
    counted.

    Args:
        source: see ``RewardSource.of``, which takes any scorer.
        threshold: the reward from which on a step is right.

    Raises:
        ConfigError: it is a benchmark of steps, and the model has no rewards of them.
        DataError: the file cannot be read, or a line is not a record of this benchmark.
    """
    left_out: Counter[str] = Counter()
    rows = []
    for line, item, of_item in _scored(task, path, source, left_out):
        above = of_item.astype(np.float64) - threshold if task.reads_steps else None
        right = task.judge(item, of_item if above is None else above)
        rows.append(Prediction(item, of_item, right, f"{path}:{line}", above=above))
    predictions = Predictions(rows, is_benchmark=True)
    return TaskResult(task.name, task.summarise(rows), predictions, dict(left_out))


@dataclass(frozen=True)
class ChosenThreshold:
    """The threshold of a held-out file of N items, the figure it is best by, and their texts."""

    value: float
    figure: float
    texts: Sequence[Text]

    def about(self, path: str, result: TaskResult) -> str:
        """Say for people where it is from, and how many of its items are measured with it."""
        measured = {repr(row.item.texts[0]) for row in result.predictions.rows}
        both = sum(repr(text) in measured for text in self.texts)
        also = f", {both} of them measured here, too" if both else ""
        return (
            f"{self.value:g}, the best of {path} ({self.figure:.4f} there, {len(self.texts)} items"
            f"{also})"
        )


def choose_threshold(task: Task, path: str | Path, source: RewardSource) -> ChosenThreshold:
    """Choose the threshold by which steps of a held-out file are judged best; see ``run_task``.

    Raises:
        ConfigError: the benchmark has no rule for it, or as ``run_task``.
        DataError: as ``run_task``, or the file lets none be chosen.
    """
    if task.choose is None:
        raise ConfigError(f"threshold_from: got {path}, but {task.name} has no rule to choose by")
    found = _scored(task, path, source, Counter())
    try:
        value, figure = task.choose([item for _, item, _ in found], [each for *_, each in found])
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    return ChosenThreshold(value, figure, [item.texts[0] for _, item, _ in found])


def _scored(
    task: Task, path: str | Path, source: RewardSource, left_out: Counter[str]
) -> list[tuple[int, Item, np.ndarray]]:
    """Line numbers and items with their rewards; without those that got none."""
    found = list(_usable(task, path, source.encoder, left_out))
    items = [item for _, item in found]
    if not items:
        raise DataError(
            f"{path}: no item of {task.name} in it that can be scored ({task.file}); left out: "
            f"{dict(left_out)}"
        )
    rows = []
    for (line, item), of_item in zip(found, _rewards(task, items, source), strict=True):
        if np.isnan(of_item).any():
            left_out["without a reward"] += 1
        elif task.reads_steps and len(of_item) != len(messages_of(item.texts[0])[-1]["content"]):
            left_out["without a reward of each step"] += 1
        else:
            rows.append((line, item, of_item))
    if not rows:
        raise DataError(f"{path}: no item of {task.name} got rewards; left out: {dict(left_out)}")
    return rows


def _rewards(task: Task, items: Sequence[Item], source: RewardSource) -> list[np.ndarray]:
    """Rewards of each item, of its steps or of its texts; NaN for a text that is rejected."""
    scored = None
    if source.has_steps or not task.reads_steps:
        scored = source.scorer.score_rows([text for item in items for text in item.texts])
    if scored is not None and not task.reads_steps:
        rewards = one_reward(source.rewards_of(scored), source.weights).reshape(-1)
        return np.split(rewards, np.cumsum([len(item.texts) for item in items])[:-1])
    # A server that shapes the rewards of whole texts has none of steps.
    if scored is None or scored.steps is None:
        raise ConfigError(
            f"task: {task.name} judges steps, wanted a model that has a reward for each "
            "(model.head.reads=step_ends or step_marks)"
        )
    return [
        one_reward(np.full((1, 1), np.nan) if steps is None else steps.rewards, source.weights)
        for steps in scored.steps
    ]


def _usable(
    task: Task, path: str | Path, encoder: SampleEncoder | None, left_out: Counter[str]
) -> Iterator[tuple[int, Item]]:
    """Yield line numbers and items that the model can take."""
    for line in read_lines(path):
        read = _read(task, line, path)
        if read is None:
            left_out["without a verdict"] += 1
            continue
        for as_read in (read,) if isinstance(read, Item) else read:
            item = replace(as_read, id=writable(as_read.id), source=writable(as_read.source))
            try:
                if encoder is not None:
                    list(map(encoder.encode, item.texts))
            except OverlongError:
                left_out["too long"] += 1
            except TurnMarkError:
                left_out["with turns of its own"] += 1
            except StepTextError:
                left_out["with a blank step, or the separator in one"] += 1
            except DataError as error:
                raise DataError(f"{path}:{line.number}: {error}") from error
            else:
                yield line.number, item


def _read(task: Task, line: Line | BadLine, path: str | Path) -> Item | tuple[Item, ...] | None:
    where = f"{path}:{line.number}"
    if isinstance(line, BadLine):
        raise DataError(f"{where}: {line.reason}")
    try:
        return task.read({**task.of_name(Path(path).stem), **line.value})
    except KeyError as error:
        keys = ", ".join(map(repr, line.value))
        raise DataError(
            f"{where}: missing key {error}, it has {keys}; wanted a record of {task.file}"
        ) from error
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
