"""``metrics.jsonl`` in the folder of a run: every number that is logged, a JSON object a line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_aligner.data.write import replace_lines
from nemo_aligner.errors import CheckpointError


class MetricsFile:
    """Appends to the file of a run; a line is on its way to the disk before ``log`` returns.

    What a run before this one had logged after ``start_step`` is cut off; at 0 that is all.
    """

    def __init__(self, path: Path, start_step: int) -> None:
        _forget_after(path, start_step)
        self._path, self._lines = path, path.open("a", encoding="utf-8")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """A line of ``step`` and the metrics; null for NaN and infinity, which JSON has not.

        Raises:
            CheckpointError: it cannot be written.
        """
        row = {"step": step, **{name: _finite(value) for name, value in metrics.items()}}
        try:
            self._lines.write(json.dumps(row, allow_nan=False) + "\n")
            self._lines.flush()
        except OSError as error:
            raise CheckpointError(
                f"{self._path}: the metrics of step {step} cannot be written: {error.strerror}"
            ) from error

    def close(self) -> None:
        self._lines.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole line, in the order of the file; the last one may be half of one.

    A step has one line of its training, and others of its validation and of its checkpoint.
    """
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            row = _as_row(line)
            if row is not None:
                yield row


def _as_row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _forget_after(path: Path, last_step: int) -> None:
    kept = (row for row in read_metrics(path) if last_step > 0 and row["step"] <= last_step)
    replace_lines(path, map(json.dumps, kept))


def _finite(value: float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
