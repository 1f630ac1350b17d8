"""The rewards of held-out records as lines of JSON: the one shape that is written and compared."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.records import Origin
from nemo_aligner.data.write import write_lines
from nemo_aligner.text.messages import Text

PAIR_COLUMNS = ("chosen", "rejected")
RATED_COLUMN = "response"


def reward_row(
    kind: RecordKind,
    origin: Origin,
    source: str,
    rewards: Mapping[str, float],
    texts: Sequence[Text],
    **more: Mapping[str, float],
) -> dict[str, Any]:
    """Where a record came from, its rewards and texts; ``more`` are labels and the like.

    ``rewards`` are of a pair ``chosen`` and ``rejected``, of a rating by attribute. A number that
    is not finite is null.
    """
    row: dict[str, Any] = {"record": str(origin), "rewards": _finite(rewards)}
    if source:
        row["source"] = source
    sides = PAIR_COLUMNS if kind is RecordKind.comparison else (RATED_COLUMN,)
    row["texts"] = dict(zip(sides, texts, strict=True))
    return row | {name: _finite(values) for name, values in more.items() if values}


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a line for each row."""
    write_lines(path, row_lines(rows))


def row_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The line of each row."""
    return [json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows]


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
