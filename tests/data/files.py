"""Write files of records for tests, and read them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nemo_aligner.config.common import RecordKind
from nemo_aligner.config.model import DataPrefixConfig
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.data.readers import ReaderConfig, RecordFile, read_records
from nemo_aligner.data.training_data import TrainingData, build_training_data
from tests.harness import tiny
from tests.harness.contracts import Contracts

DATA = Path(os.environ.get("NEMO_ALIGNER_DATA", tiny.ROOT.parent / "shared" / "data"))


def published(name: str) -> Path:
    """Return the path of a published file, or skip the test if it is not on this machine."""
    if not (DATA / name).is_file():
        pytest.skip(f"{DATA / name} is not here; NEMO_ALIGNER_DATA can name the folder it is in")
    return DATA / name


def write(path: Path, *records: object) -> Path:
    """Write JSON lines; a string is written as a line unchanged."""
    lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
    path.write_text("".join(line + "\n" for line in lines))
    return path


def read(
    folder: Path, *records: object, kind: RecordKind = RecordKind.comparison, **options: Any
) -> RecordFile:
    """Write records to ``data.jsonl`` and read this file."""
    return read_records(write(folder / "data.jsonl", *records), ReaderConfig(kind, **options))


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def build(
    contracts: Contracts,
    train: Sequence[Path | str],
    validation: Sequence[Path | str] = (),
    *,
    attributes: list[str] | None = None,
    contract: ScoringContract | None = None,
    objective: str | None = None,
    settings: dict[str, Any] | None = None,
    **data: Any,
) -> TrainingData:
    """Build the training data of these files for an objective with these ``settings``."""
    config = contracts.config(attributes, **data)
    config.objective, config.objective_kwargs = objective, settings or {}
    files = ([str(path) for path in paths] for paths in (train, validation))
    config.data.data_prefix = DataPrefixConfig(*files)
    contract = contract or contracts(attributes, **data)
    return build_training_data(config, contract, contracts.tokenizer)


def pair_with_call(**arguments: str) -> dict[str, Any]:
    """A pair with a tool and a call that have arguments."""
    parameters = {"type": "object", "properties": {name: {"type": "string"} for name in arguments}}
    function = {"name": "look", "description": "Looks.", "parameters": parameters}
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {
        "prompt": [{"role": "user", "content": "why"}],
        "chosen": [{"role": "assistant", "content": "", "tool_calls": [call]}],
        "rejected": [{"role": "assistant", "content": "no"}],
        "tools": [{"type": "function", "function": function}],
    }
