"""A benchmark's file through a scorer: its table, JSON, and a line for every item."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nemo_aligner.contract.contract import OverlongError, one_reward
from nemo_aligner.contract.messages import Text
from nemo_aligner.contract.turns import TurnMarkError
from nemo_aligner.data.files import BadLine, Line, read_lines
from nemo_aligner.data.records import write_lines, write_rows
from nemo_aligner.evaluation.sources import Score
from nemo_aligner.evaluation.tasks.base import Judged, Level, Task, TaskItem, TaskRow
from nemo_aligner.utils.console import fit_row
from nemo_aligner.utils.errors import DataError


@dataclass(frozen=True)
class TaskReport:
    """Results of a benchmark; ``left_out`` counts items by the reason."""

    task: str
    rows: list[TaskRow]
    judged: list[Judged]
    left_out: dict[str, int]


def run_task(
    task: Task,
    path: str | Path,
    score: Score,
    attribute_weights: Sequence[float] = (1.0,),
    encode: Callable[[Text], object] | None = None,
) -> TaskReport:
    """Score every text of a benchmark's file, and sum up the verdicts as the benchmark does.

    Args:
        score: N texts to ``[N, A]`` rewards, of this process, a client's, or anything's; an item of
            which a text has none (NaN) is left out and counted.
        attribute_weights: A weights that make one reward of a text's A.
        encode: raises OverlongError or TurnMarkError for a text that the model cannot take; items
            of such are left out and counted. Without it they are the scorer's to refuse.

    Raises:
        DataError: the file cannot be read, or holds something else than the benchmark's records;
            the message says in which line.
    """
    left_out: Counter[str] = Counter()
    found = list(_usable(task, path, encode, left_out))
    items = [item for _, item in found]
    if not items:
        raise DataError(
            f"{path}: no item of {task.name} in it that can be scored ({task.file}); left out: "
            f"{dict(left_out)}"
        )
    texts: list[Text] = [text for item in items for text in item.texts]
    rewards = one_reward(np.asarray(score(texts)), attribute_weights).reshape(-1)
    bounds = np.cumsum([len(item.texts) for item in items])[:-1]
    judged = []
    for (line, item), of_item in zip(found, np.split(rewards, bounds), strict=True):
        if np.isnan(of_item).any():
            left_out["without a reward"] += 1
        else:
            judged.append(Judged(item, of_item, task.judge(item, of_item), f"{path}:{line}"))
    if not judged:
        raise DataError(f"{path}: no item of {task.name} got rewards; left out: {dict(left_out)}")
    return TaskReport(task.name, task.summarise(judged), judged, dict(left_out))


def _usable(
    task: Task,
    path: str | Path,
    encode: Callable[[Text], object] | None,
    left_out: Counter[str],
) -> Iterator[tuple[int, TaskItem]]:
    """Lines and items."""
    for line in read_lines(path):
        item = _read(task, line, path)
        if item is None:
            left_out["without a verdict"] += 1
            continue
        try:
            if encode is not None:
                list(map(encode, item.texts))
        except OverlongError:
            left_out["too long"] += 1
        except TurnMarkError:
            left_out["with turns of its own"] += 1
        except DataError as error:
            raise DataError(f"{path}:{line.number}: {error}") from error
        else:
            yield line.number, item


def _read(task: Task, line: Line | BadLine, path: str | Path) -> TaskItem | None:
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


def render_task(report: TaskReport, about: Mapping[str, str]) -> str:
    """The benchmark's table: subsets, sections, overall."""
    counts = [f"{len(report.judged)} scored"]
    counts += [f"{count} {why}: left out" for why, count in report.left_out.items()]
    about = {"task": report.task, **about, "items": ", ".join(counts)}
    lines = [fit_row(name, text, 14) for name, text in about.items()]
    width = max(len(row.name) for row in report.rows) + 2
    before: Level | None = None
    for row in report.rows:
        if row.level is not before:
            lines.append("")
        before = row.level
        lines.append(_table_line(row, width))
    return "\n".join(lines)


def _table_line(row: TaskRow, width: int) -> str:
    interval = "" if row.low is None else f"({row.low:.3f} to {row.high:.3f})"
    count = "" if row.count is None else str(row.count)
    return f"{row.name:<{width}}{row.value:>8.4f}  {interval:<18}{count:>7}".rstrip()


def write_task(path: str | Path, report: TaskReport, about: Mapping[str, Any]) -> None:
    """Write all rows as one JSON object."""
    rows = task_rows(report)
    content = {"task": report.task, **about, "rows": rows, "left_out": report.left_out}
    write_lines(Path(path), [json.dumps(content, indent=2, ensure_ascii=False)])


def write_verdicts(path: str | Path, report: TaskReport) -> None:
    """A line for every item: the verdict, and rewards and texts of right replies and wrong ones."""
    write_rows(Path(path), list(verdict_rows(report)))


def task_rows(report: TaskReport) -> list[dict[str, Any]]:
    """The figures of a benchmark as plain JSON values."""
    return [{**asdict(row), "level": row.level.value} for row in report.rows]


def verdict_rows(report: TaskReport) -> Iterator[dict[str, Any]]:
    """Yield the rows that ``write_verdicts`` writes."""
    return map(_line, report.judged)


def _line(judged: Judged) -> dict[str, Any]:
    item, rewards = judged.item, [float(reward) for reward in judged.rewards]
    return {
        "record": judged.record,
        "id": item.id,
        "source": item.subset,
        "right": judged.right,
        "rewards": _parted(rewards, item.num_right),
        "texts": _parted(item.texts, item.num_right),
    }


def _parted(values: Sequence[Any], num_right: int) -> dict[str, list[Any]]:
    return {"right": list(values[:num_right]), "wrong": list(values[num_right:])}
