"""Table of reward models on the same held-out pairs: accuracy, and what length has to do with it.

    python benchmarks/quality.py --data heldout.jsonl results/plain results/heads=ensemble

Each is a run's folder or a ``.nemo`` file, with ``=NAME`` for its row. Columns are those of
docs/metrics.md: accuracy with its 95% interval, on pairs whose longer and whose shorter reply was
chosen, Pearson's r of reward and length, and the calibration error. The first row is the verdict of
length alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import nemo_aligner as na
from nemo_aligner.checkpoint.run_folder import CHECKPOINTS_NAME, MODEL_NAME

COLUMNS = {
    "accuracy": "accuracy",
    "accuracy_longer_chosen": "longer chosen",
    "accuracy_shorter_chosen": "shorter chosen",
    "length_correlation": "length r",
    "ece": "ECE",
}


def measure(given: str, data: Path) -> dict[str, Any]:
    """Row of one model: its name, ``interval`` and the metrics."""
    path, _, name = given.partition("=")
    archive = Path(path)
    if (archive / CHECKPOINTS_NAME / MODEL_NAME).exists():
        archive = archive / CHECKPOINTS_NAME / MODEL_NAME
    with na.RewardModel.from_pretrained(archive) as model:
        found = model.evaluate(data)
    return {"model": name or path, "interval": found.interval, **found.metrics}


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown table of the rows, and of always taking the longer reply."""
    longer = rows[0]["longer_reply_accuracy"]
    lines = [
        f"| model | {' | '.join(COLUMNS.values())} |",
        "|---" * (1 + len(COLUMNS)) + "|",
        f"| always the longer reply | {longer:.1%} | 100% | 0% | | |",
    ]
    for row in rows:
        low, high = row["interval"]
        first, *others = (row[name] for name in COLUMNS)
        shares = [f"{first:.1%} ({low:.1%} to {high:.1%})", *(f"{each:.1%}" for each in others[:2])]
        numbers = [f"{each:.3f}" for each in others[2:]]
        lines.append(f"| {' | '.join([str(row['model']), *shares, *numbers])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL[=NAME]")
    parser.add_argument("--data", type=Path, required=True, help="held-out pairs")
    parser.add_argument("--output", type=Path, help="JSON file to write the rows to")
    options = parser.parse_args()
    rows = [measure(given, options.data) for given in options.models]
    print(render(rows))
    if options.output is not None:
        options.output.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
