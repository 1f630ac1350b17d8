"""Table of reward models on the same held-out pairs: accuracy, calibration and length bias.

    python benchmarks/quality.py --data heldout.jsonl results/plain results/heads=ensemble

A model is a run's folder or a ``.nemo`` file; ``=NAME`` names its row. Columns are metrics of
docs/metrics.md: accuracy with its 95% interval, accuracy on pairs whose longer and whose shorter
reply was chosen, Pearson's r of reward and length, and the expected calibration error. The first
row always prefers the longer reply.
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


def measure_model(argument: str, data: Path) -> dict[str, Any]:
    """Evaluate one model on the pairs of ``data``, and return its row.

    ``argument`` is a path, with ``=NAME`` after it to name the row. The row has the name, the 95%
    ``interval`` of accuracy, and the metrics.
    """
    path, _, name = argument.partition("=")
    archive = Path(path)
    if (archive / CHECKPOINTS_NAME / MODEL_NAME).exists():
        archive = archive / CHECKPOINTS_NAME / MODEL_NAME
    with na.RewardModel.from_pretrained(archive) as model:
        evaluation = model.evaluate(data)
    return {"model": name or path, "interval": evaluation.interval, **evaluation.metrics}


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    """Render the rows as a Markdown table, below a row that always prefers the longer reply."""
    longer = rows[0]["longer_reply_accuracy"]
    lines = [
        f"| model | {' | '.join(COLUMNS.values())} |",
        "|---" * (1 + len(COLUMNS)) + "|",
        f"| always the longer reply | {longer:.1%} | 100% | 0% | | |",
    ]
    for row in rows:
        low, high = row["interval"]
        first, *figures = (row[name] for name in COLUMNS)
        percentages = [
            f"{first:.1%} ({low:.1%} to {high:.1%})",
            *(f"{share:.1%}" for share in figures[:2]),
        ]
        numbers = [f"{figure:.3f}" for figure in figures[2:]]
        lines.append(f"| {' | '.join([str(row['model']), *percentages, *numbers])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL[=NAME]")
    parser.add_argument("--data", type=Path, required=True, help="held-out pairs")
    parser.add_argument("--output", type=Path, help="JSON file to write the rows to")
    options = parser.parse_args()
    rows = [measure_model(argument, options.data) for argument in options.models]
    print(render(rows))
    if options.output is not None:
        options.output.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
