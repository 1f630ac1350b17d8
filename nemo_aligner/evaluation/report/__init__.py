"""Runs and evaluations as one HTML page; importing this package imports no matplotlib."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from nemo_aligner.checkpoint.run_folder import METRICS_NAME, REPORT_NAME
from nemo_aligner.config.describe import install_command
from nemo_aligner.utils.errors import ConfigError


def check_report(setting: str) -> None:
    """Refuse, before anything is computed, a report that cannot be drawn.

    Raises:
        ConfigError: the package that draws its figures is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            f"{setting}: it is set, but the package matplotlib is not installed "
            f"({install_command('report')})"
        )


def write_run_report(folder: Path) -> None:
    """Write a run's own report into its folder, unless it was stopped before its first step."""
    from nemo_aligner.evaluation.report.page import write_page

    if (folder / METRICS_NAME).is_file():
        print(f"report: {write_page([folder], folder / REPORT_NAME)}", flush=True)
