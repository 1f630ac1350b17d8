"""What training has gained on held-out data: the run's metrics before it, an evaluation after."""

from __future__ import annotations

import csv
import json
from pathlib import Path

from nemo_aligner.errors import DataError


def render_gain(run_folder: Path, evaluation: Path) -> str:
    """The main metric of a run's first validation, and of the report of its reward model.

    Raises:
        DataError: the run has not one metrics.csv, or no validation of that metric in it.
    """
    after = json.loads(evaluation.read_text())
    name = "accuracy" if "accuracy" in after["metrics"] else "pearson_mean"
    before = _first_validation(run_folder, name)
    text = (
        f"held-out {name}, {after['counts']['kept']} records: {before:.3f} before training, "
        f"{after['metrics'][name]:.3f} after"
    )
    if name == "accuracy":
        longer = after["metrics"]["longer_reply_accuracy"]
        text += f"\n(always taking the longer reply: {longer:.3f})"
    return text


def _first_validation(run_folder: Path, name: str) -> float:
    paths = sorted(run_folder.rglob("metrics.csv"))
    if len(paths) != 1:
        raise DataError(f"{run_folder}: got {len(paths)} files metrics.csv, wanted one")
    with paths[0].open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    # "validation-<file>/accuracy", and not "validation-<file>/by_source/<source>/accuracy"
    for key in rows[0] if rows else ():
        if key.startswith("validation-") and key.count("/") == 1 and key.endswith(f"/{name}"):
            values = [row[key] for row in rows if row[key]]
            if values:
                return float(values[0])
    raise DataError(f"{paths[0]}: got no validation, wanted one with {name}")
