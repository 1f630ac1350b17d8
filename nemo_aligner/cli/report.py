"""Training runs and evaluations as one HTML file: curves, calibration, mistakes in full text.

  nemo-aligner report results/first --output report.html
  nemo-aligner report results/first results/second --output both.html
  nemo-aligner report evaluation.jsonl

A RUN is the folder of a training run, also of one that still runs or was killed, or a file that
evaluate's output or output_rewards wrote; a .json and a .jsonl beside it belong together. Several
are overlaid. The page needs no network, and has no script.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from nemo_aligner.cli.parser import Parser
from nemo_aligner.evaluation.html import check_report


def new_parser() -> Parser:
    """The options of ``nemo-aligner report``."""
    parser = Parser("report", __doc__)
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, or evaluate's output"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("report.html"), metavar="FILE",
        help="the page to write (default: %(default)s)",
    )  # fmt: skip
    return parser


def run(options: argparse.Namespace) -> int:
    """Write the page, and say where it is."""
    check_report("report")
    from nemo_aligner.evaluation.html.page import write_page

    print(f"report: {write_page(options.runs, options.output)}")
    return 0
