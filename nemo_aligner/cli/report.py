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
import importlib.util
from pathlib import Path

from nemo_aligner.cli.parser import Parser
from nemo_aligner.errors import ConfigError


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


def check_report(setting: str) -> None:
    """Refuse, before anything is computed, a report that cannot be drawn.

    Raises:
        ConfigError: the package that draws its figures is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            f"{setting}: it is set, but the package matplotlib is not installed "
            "(pip install 'nemo_aligner[report]')"
        )


def write_run_report(folder: Path) -> None:
    """Write a run's own report into its folder, unless it was stopped before its first step."""
    from nemo_aligner.checkpoint.run_folder import METRICS_NAME, REPORT_NAME
    from nemo_aligner.evaluation.html.page import write_page

    if (folder / METRICS_NAME).is_file():
        print(f"report: {write_page([folder], folder / REPORT_NAME)}", flush=True)
