"""Reports: training runs and evaluations as one HTML page.

In the order in which data flows:

- ``run_report``: reads a run's folder, or the files of an evaluation, as a ``RunReport``; also
  accuracy by source and the list of mistakes.
- ``svg``: turns a drawing of matplotlib into SVG for a page that may be light or dark.
- ``figures``: draws the figures, and defines how numbers are written and what a page consists of:
  sections, tables, headlines, and held-out sets with their colours.
- ``training_sections``: the summary, and the sections on training (learning curves, throughput,
  memory) and on its inputs (data, settings, scoring contract).
- ``heldout_sections``: the sections on held-out records (accuracy, rewards, calibration, length,
  mistakes, robustness).
- ``page``: the first screen, and the HTML file, rendered from ``page.html.jinja``.

Importing this package does not import matplotlib, which is optional. ``check_report`` and
``write_run_report`` are for training and the command line.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from nemo_aligner.checkpoint.run_folder import METRICS_NAME, REPORT_NAME
from nemo_aligner.config.describe import install_command
from nemo_aligner.utils.errors import ConfigError


def check_report(setting: str) -> None:
    """Check that matplotlib is installed, before a run or an evaluation that ends with a report.

    Args:
        setting: the setting that turns the report on, for the error message.

    Raises:
        ConfigError: matplotlib, which draws the figures, is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            f"{setting}: a report needs the package matplotlib, which is not installed. Install it "
            f"({install_command('report')}), or leave the setting out."
        )


def write_run_report(folder: Path) -> None:
    """Write the report of a training run into its folder, if it has logged at least one step."""
    from nemo_aligner.evaluation.report.page import write_page

    if (folder / METRICS_NAME).is_file():
        print(f"report: {write_page([folder], folder / REPORT_NAME)}", flush=True)
