"""Write a run's metrics to files in its folder: ``metrics.jsonl``, CSV and TensorBoard.

``metrics.jsonl`` has every number, and a resumed run reads it. CSV and TensorBoard have the same
numbers for other programs. A resumed run computes the steps after its checkpoint again, so it first
deletes the entries of these steps from each file. A run that has ended measures its model on the
test sets; if it is resumed, it measures the model that it then writes, so ``metrics.jsonl`` and CSV
also lose the test metrics of the checkpoint's step.

The classes for CSV and TensorBoard have the methods ``log_metrics`` and ``finalize``, like the
Lightning loggers that ``tracking.py`` uses for W&B and MLflow. They do not use Lightning, because
importing it takes longer than importing torch, and a run would start that much later.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_aligner.training.side_outputs import RUN_FOLDER
from nemo_aligner.utils.errors import CheckpointError
from nemo_aligner.utils.finite import finite_or_none
from nemo_aligner.utils.writing import write_lines, write_problem, write_whole

# The key of the step in a line of ``metrics.jsonl``, and its column in ``metrics.csv``.
STEP = "step"
# How the names of metrics on the test sets begin.
_TEST_PREFIX = "test-"


class MetricsFile:
    """Appends lines to a run's ``metrics.jsonl``; ``log`` returns when the line is in the file.

    Opening it deletes what a run that is resumed after ``start_step`` computes again. If
    ``start_step`` is 0, it deletes all lines.

    Raises:
        ConfigError: when it is opened, if the file cannot be written.
    """

    def __init__(self, path: Path, start_step: int) -> None:
        rows = (row for row in read_metrics(path) if _is_kept(row, start_step))
        write_lines(path, map(json.dumps, rows), RUN_FOLDER)
        self._path, self._lines = path, path.open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write a line with ``step`` and the metrics. NaN and infinity, unknown to JSON, are null.

        Raises:
            CheckpointError: the line cannot be written.
        """
        numbers = {name: float(value) for name, value in metrics.items()}
        row = {STEP: step, **finite_or_none(numbers)}
        try:
            self._lines.write(json.dumps(row, allow_nan=False) + "\n")
            self._lines.flush()
        except OSError as error:
            raise CheckpointError(
                f"{self._path}: the metrics of step {step} cannot be written: "
                f"{write_problem(self._path, error)}"
            ) from error

    def close(self) -> None:
        """Close the file; the object cannot be used afterwards.

        Raises:
            CheckpointError: lines that ``log`` could not write still cannot be written.
        """
        try:
            self._lines.close()
        except OSError as error:
            raise CheckpointError(
                f"{self._path}: the last metrics cannot be written: "
                f"{write_problem(self._path, error)}"
            ) from error


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Read the lines of a metrics file in order, without a last line that was cut off.

    A step may have several lines: training, validation and saving each write one.
    """
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            row = _parse_row(line)
            if row is not None:
                yield row


def _parse_row(line: str) -> dict[str, Any] | None:
    """Parse a line of metrics; None if it is damaged, e.g. cut off when a run was killed."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get(STEP), int) else None


def _is_kept(row: Mapping[str, Any], start_step: int) -> bool:
    """Tell if a run that is resumed after ``start_step`` keeps a row of an earlier part of the run.

    It computes later steps again, and at its end the metrics of the test sets. If ``start_step`` is
    0, it computes everything again.
    """
    step = int(row[STEP])
    is_of_tests = any(name.startswith(_TEST_PREFIX) for name in row)
    return start_step > 0 and (step < start_step or (step == start_step and not is_of_tests))


class CsvFile:
    """Appends rows to a run's ``metrics.csv``, which has a column for each metric.

    A new metric adds a column, for which the whole file is written again.

    Opening it deletes the same rows as ``MetricsFile``.

    Raises:
        OSError: when it is opened, if the file cannot be written.
    """

    def __init__(self, path: Path, start_step: int) -> None:
        self._path = path
        self._write_again([row for row in _read_rows(path) if _is_kept(row, start_step)])

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write a row, which is in the file when this returns.

        Raises:
            OSError: the row cannot be written.
        """
        row = {STEP: step, **metrics}
        if row.keys() <= {*self._columns}:
            self._writer.writerow(row)
            self._lines.flush()
        else:
            self._lines.close()
            self._write_again([*_read_rows(self._path), row])

    def finalize(self, status: str) -> None:
        """Close the file, whatever the outcome of the run."""
        self._lines.close()

    def _write_again(self, rows: Sequence[Mapping[str, object]]) -> None:
        """Replace the file's content by these rows, and open the file for further ones."""
        self._columns = [STEP, *sorted({name for row in rows for name in row} - {STEP})]
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns)
        writer.writeheader()
        writer.writerows(rows)
        write_whole(self._path, text.getvalue().encode())
        self._lines = self._path.open("a", encoding="utf-8", newline="")
        self._writer = csv.DictWriter(self._lines, self._columns)


def _read_rows(path: Path) -> list[dict[str, str]]:
    """Read the rows that begin with a step, without empty cells.

    A line that was cut off when a run was killed belongs to a later step than the last checkpoint,
    so ``_is_kept`` is False for it.
    """
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as lines:
        rows = [
            {name: cell for name, cell in row.items() if name and cell}
            for row in csv.DictReader(lines)
        ]
    return [row for row in rows if row.get(STEP, "").isdigit()]


class TensorBoardFile:
    """Writes metrics for TensorBoard to an event file in a run's folder.

    Opening it tells TensorBoard to ignore the entries of steps after ``start_step``; if that is 0,
    all entries, because an earlier run in this folder may have been killed before its first
    checkpoint.
    """

    def __init__(self, folder: Path, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge_step = start_step + 1 if start_step else 0
        self._writer = SummaryWriter(str(folder), purge_step=purge_step)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Add a point to the curve of each metric; it is on disk within two minutes."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def finalize(self, status: str) -> None:
        """Write what is still in memory and close the file, whatever the outcome of the run."""
        self._writer.close()
