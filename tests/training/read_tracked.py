"""What W&B and MLflow have in a run's folder, as JSON; by a Python that has both.

``read_tracked.py FOLDER``. W&B keeps an offline run as LevelDB's log format has it, with records of
its own protobuf messages, behind a header of seven bytes:
https://github.com/google/leveldb/blob/main/doc/log_format.md
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEADER = 32768, 7
_FULL, _LAST = 1, 4


def read_log(path: Path) -> Iterator[bytes]:
    data, at, record = path.read_bytes(), _HEADER, b""
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (_FULL, _LAST):
            yield record
            record = b""


def read_wandb(path: Path) -> dict[str, Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    contents: dict[str, Any] = {"rows": [], "config": {}}
    for data in read_log(path):
        record = Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            contents["id"] = record.run.run_id
        elif kind == "config":
            items = record.config.update
            contents["config"] |= {item.key: json.loads(item.value_json) for item in items}
        elif kind == "history":
            row = {
                item.key or item.nested_key[0]: json.loads(item.value_json)
                for item in record.history.item
            }
            contents["rows"].append({key: row[key] for key in row if key[0] != "_"})
    return contents


def read_mlflow(database: Path) -> list[dict[str, Any]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{database}")
    experiments = [item.experiment_id for item in client.search_experiments()]
    return [
        {
            "id": run.info.run_id,
            "status": run.info.status,
            "params": run.data.params,
            "tags": run.data.tags,
            "metrics": {
                name: [
                    (item.step, item.value)
                    for item in client.get_metric_history(run.info.run_id, name)
                ]
                for name in run.data.metrics
            },
        }
        for run in client.search_runs(experiments)
    ]


def main() -> None:
    folder = Path(sys.argv[1])
    contents = {
        "wandb": [read_wandb(path) for path in sorted(folder.glob("wandb/offline-run-*/*.wandb"))],
        "mlflow": read_mlflow(folder / "mlflow.db"),
    }
    print(json.dumps(contents))


if __name__ == "__main__":
    main()
