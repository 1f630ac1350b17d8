"""Files of records for tests, and what is read of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.data.reading import Reading, RecordFile, read_records


def write(path: Path, *records: object) -> Path:
    """JSON lines; a text is a line as it stands."""
    lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
    path.write_text("".join(line + "\n" for line in lines))
    return path


def read(
    folder: Path, *records: object, kind: RecordKind = RecordKind.comparison, **options: Any
) -> RecordFile:
    """What is read of a file ``data.jsonl`` of these records."""
    return read_records(write(folder / "data.jsonl", *records), Reading(kind, **options))


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
