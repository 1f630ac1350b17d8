"""Runs a benchmark: reads its file, scores its items, and computes the benchmark's own figures.

The benchmarks themselves are in ``nemo_aligner/evaluation/tasks``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from nemo_aligner.contract.contract import NoTemplateError, OverlongError
from nemo_aligner.contract.messages import Text, messages_of
from nemo_aligner.contract.readout import one_reward
from nemo_aligner.contract.scorer import SampleEncoder
from nemo_aligner.contract.steps import StepTextError
from nemo_aligner.contract.turns import TurnMarkError
from nemo_aligner.data.files import AnyLine, BadLine, read_lines
from nemo_aligner.evaluation.predictions import Item, Prediction, Predictions
from nemo_aligner.evaluation.sources import RewardSource, check_finite
from nemo_aligner.evaluation.tasks.base import Level, Task, TaskRow, read_items
from nemo_aligner.utils.console import fit_row, say
from nemo_aligner.utils.errors import ConfigError, DataError, writable
from nemo_aligner.utils.finite import finite_or_none
from nemo_aligner.utils.writing import write_lines

# Why an item is left out, by the error about its sample; for any other error, ``_REFUSED``.
_REASONS: dict[type[DataError], str] = {
    OverlongError: "too long",
    TurnMarkError: "with turns of its own",
    StepTextError: "with a blank step, or the separator in one",
}
_REFUSED = "refused by the chat template"


@dataclass(frozen=True)
class TaskResult:
    """Results of a benchmark.

    Attributes:
        task: name of the benchmark.
        rows: its figures, in the order of its table.
        predictions: the scored items with their rewards and verdicts.
        left_out: number of items that were dropped, by reason.
    """

    task: str
    rows: list[TaskRow]
    predictions: Predictions
    left_out: dict[str, int]

    @property
    def accuracy(self) -> float | None:
        """Overall figure of the benchmark; None if it has none, or if some subsets are missing."""
        return None if self._overall_row is None else self._overall_row.value

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95% interval of the overall figure as (low, high); None if there is none."""
        row = self._overall_row
        return None if row is None or row.low is None or row.high is None else (row.low, row.high)

    @property
    def _overall_row(self) -> TaskRow | None:
        return next((row for row in self.rows if row.level is Level.overall), None)

    @property
    def metrics(self) -> dict[str, float]:
        """The values of all rows of the table, by the name of the row."""
        return {row.name: row.value for row in self.rows}

    @property
    def counts(self) -> dict[str, int]:
        """Number of scored items (``kept``), and of dropped ones by reason."""
        return {"kept": len(self.predictions.rows), **self.left_out}

    def render(self, description: Mapping[str, str]) -> str:
        """Render the table of subsets, sections and overall figures for people.

        Args:
            description: lines that name the model, its scoring contract and the data.
        """
        counts = [f"{len(self.predictions.rows)} scored"]
        counts += [f"{count} {reason}: left out" for reason, count in self.left_out.items()]
        description = {"task": self.task, **description, "items": ", ".join(counts)}
        lines = [fit_row(name, text, 14) for name, text in description.items()]
        width = max(len(row.name) for row in self.rows) + 2
        previous_level: Level | None = None
        for row in self.rows:
            if row.level is not previous_level:
                lines.append("")
            previous_level = row.level
            lines.append(_render_row(row, width))
        return "\n".join(lines)

    def write(self, path: Path, description: Mapping[str, Any]) -> str:
        """Write all rows, and the entries of ``description``, as one JSON object.

        A figure that is not finite is null.

        Returns:
            The path, and whether another file was replaced, for a message.
        """
        rows = [asdict(row) for row in self.rows]
        results = {"rows": rows, "left_out": self.left_out}
        content = finite_or_none({"task": self.task, **description, **results})
        line = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
        return write_lines(path, [line])


def _render_row(row: TaskRow, width: int) -> str:
    interval = "" if row.low is None else f"({row.low:.3f} to {row.high:.3f})"
    count = "" if row.count is None else str(row.count)
    return f"{row.name:<{width}}{row.value:>8.4f}  {interval:<18}{count:>7}".rstrip()


def run_task(
    task: Task,
    path: str | Path,
    source: RewardSource,
    threshold: float = 0.5,
    name: str | None = None,
) -> TaskResult:
    """Score all items of a benchmark's file, and compute the figures that the benchmark defines.

    An item is dropped and counted if the model cannot take one of its samples, or rejects it.

    Args:
        task: the benchmark.
        path: its file.
        source: the model; ``RewardSource.of`` makes one from any scorer.
        threshold: a step with this reward or a higher one is right; for benchmarks of steps.
        name: name of the file in predictions and in errors about its lines; None means ``path``.

    Raises:
        ConfigError: the benchmark judges steps, but the model has no reward for each step.
        DataError: the file cannot be read, a line is not a record of this benchmark, or the reward
            of a sample or step is not finite.
    """
    left_out: Counter[str] = Counter()
    rows = []
    name = str(path) if name is None else name
    for line, item, rewards in _score_items(task, read_lines(path), name, source, left_out):
        above = rewards.astype(np.float64) - threshold if task.reads_steps else None
        right = task.judge(item, rewards if above is None else above)
        rows.append(Prediction(item, rewards, right, f"{name}:{line}", above=above))
    predictions = Predictions(rows, is_benchmark=True)
    return TaskResult(task.name, task.summarise(rows), predictions, dict(left_out))


@dataclass(frozen=True)
class ChosenThreshold:
    """A threshold for steps that was chosen on a held-out file.

    Attributes:
        value: the threshold.
        figure: the benchmark's figure on the held-out file with this threshold, the highest one.
        texts: the samples of the held-out file.
    """

    value: float
    figure: float
    texts: Sequence[Text]

    def describe(self, path: str, result: TaskResult) -> str:
        """Describe for people on which file the threshold was chosen, and how well it does there.

        The text has a warning if ``result``, the evaluation with this threshold, has the same
        items.
        """
        measured = {repr(row.item.texts[0]) for row in result.predictions.rows}
        shared = sum(repr(text) in measured for text in self.texts)
        warning = f", {shared} of them also measured here" if shared else ""
        return (
            f"{self.value:g}, the best of {path} ({self.figure:.4f} there, {len(self.texts)} items"
            f"{warning})"
        )


def choose_threshold(task: Task, path: str | Path, source: RewardSource) -> ChosenThreshold:
    """Choose the threshold that judges the steps of a held-out file best.

    Raises:
        ConfigError: the benchmark has no rule to choose by, or the model has no rewards of steps.
        DataError: the file cannot be read, has too little to choose by, or the reward of a step is
            not finite.
    """
    if task.choose is None:
        raise ConfigError(
            f"threshold_from: got {path}, but {task.name} defines no rule to choose a threshold. "
            "Set threshold to a number instead."
        )
    scored = _score_items(task, read_lines(path), str(path), source, Counter())
    items = [item for _, item, _ in scored]
    try:
        value, figure = task.choose(items, [rewards for *_, rewards in scored])
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    return ChosenThreshold(value, figure, [item.texts[0] for item in items])


def _score_items(
    task: Task,
    lines: Iterable[AnyLine],
    name: str,
    source: RewardSource,
    left_out: Counter[str],
) -> list[tuple[int, Item, np.ndarray]]:
    """Score the items of the file ``name``, and count the dropped ones in ``left_out`` by reason.

    Returns:
        Line number, item and rewards of every item whose samples all got rewards.
    """
    numbered_items = list(_read_items(task, lines, name, source.encoder, left_out))
    items = [item for _, item in numbered_items]
    if not items:
        raise DataError(
            f"{name}: it has no item of {task.name} that can be scored; left out: "
            f"{dict(left_out)}. The benchmark's file is {task.file}."
        )
    origins = [f"{name}:{line}" for line, _ in numbered_items]
    rows = []
    scored = zip(numbered_items, _compute_rewards(task, items, origins, source), strict=True)
    for (line, item), rewards in scored:
        if np.isnan(rewards).any():
            left_out["without a reward"] += 1
        elif task.reads_steps and len(rewards) != len(messages_of(item.texts[0])[-1]["content"]):
            left_out["without a reward of each step"] += 1
        else:
            rows.append((line, item, rewards))
    if not rows:
        raise DataError(
            f"{name}: the model returned no rewards for its items of {task.name}; left out: "
            f"{dict(left_out)}"
        )
    return rows


def _compute_rewards(
    task: Task, items: Sequence[Item], origins: Sequence[str], source: RewardSource
) -> list[np.ndarray]:
    """Compute the rewards of each item; ``origins`` has the file and line of each.

    Returns:
        For each item, the rewards of the steps of its one sample, ``[S]``, if the benchmark judges
        steps; otherwise those of its samples, ``[K]``. A rejected sample gets NaN.

    Raises:
        ConfigError: the benchmark judges steps, but the source has no reward for each step.
        DataError: the reward of a sample or step is not finite.
    """
    texts = [text for item in items for text in item.texts]
    sizes = [len(item.texts) for item in items]
    if not task.reads_steps:
        rewards = source.score_as_one(texts, np.repeat(origins, sizes).tolist())
        return np.split(rewards, np.cumsum(sizes)[:-1])
    steps_by_item = source.scorer.score_rows(texts).steps if source.has_steps else None
    # ``steps`` is None if the scorer gives no rewards of steps. A server that post-processes the
    # rewards of samples does not return them either.
    if steps_by_item is None:
        raise ConfigError(
            f"task: {task.name} judges steps, but this model has no reward for each step. Evaluate "
            "a model that was trained with model.head.reads=step_ends or step_marks."
        )
    for origin, steps in zip(origins, steps_by_item, strict=True):
        if steps is not None:
            check_finite(steps.rewards, [origin] * len(steps.rewards))
    return [
        one_reward(np.full((1, 1), np.nan) if steps is None else steps.rewards, source.weights)
        for steps in steps_by_item
    ]


def _read_items(
    task: Task,
    lines: Iterable[AnyLine],
    name: str,
    encoder: SampleEncoder | None,
    left_out: Counter[str],
) -> Iterator[tuple[int, Item]]:
    """Yield (line number, item) for every item that the model can take.

    The other items are counted in ``left_out`` by reason. ``encoder`` finds samples that are too
    long or refused by the chat template; None for a server, which rejects them itself.

    Raises:
        DataError: a line is not a record of this benchmark, or there is no chat template.
    """
    for line in lines:
        parsed = _parse_line(task, line, name)
        if not parsed:
            left_out["without a verdict"] += 1
        for raw_item in parsed:
            item = replace(raw_item, id=writable(raw_item.id), source=writable(raw_item.source))
            error = None if encoder is None else _find_refusal(item, encoder)
            if error is None:
                yield line.number, item
                continue
            if isinstance(error, NoTemplateError):
                raise DataError(f"{name}:{line.number}: {error}") from error
            reason = _REASONS.get(type(error), _REFUSED)
            if reason == _REFUSED and reason not in left_out:
                say(f"{name}:{line.number}: left out (later ones are only counted): {error}")
            left_out[reason] += 1


def _find_refusal(item: Item, encoder: SampleEncoder) -> DataError | None:
    """Return the error about the first sample that the model cannot take; None if it takes all."""
    try:
        for text in item.texts:
            encoder.encode(text)
    except DataError as error:
        return error
    return None


def _parse_line(task: Task, line: AnyLine, file_name: str) -> tuple[Item, ...]:
    location = f"{file_name}:{line.number}"
    if isinstance(line, BadLine):
        raise DataError(f"{location}: {line.reason}")
    try:
        name = Path(file_name).name.partition(".")[0]  # ``stem`` would keep the .json of x.json.gz
        return read_items(task, {**task.keys_from_name(name), **line.value})
    except KeyError as error:
        keys = ", ".join(map(repr, line.value))
        raise DataError(
            f"{location}: the key {error} is missing; the record has {keys}. The benchmark's file "
            f"is {task.file}."
        ) from error
    except DataError as error:
        raise DataError(f"{location}: {error}") from error
