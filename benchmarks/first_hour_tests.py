"""Run the tests of a file, and write the result of each test to OUTPUT as soon as it ends.

    python benchmarks/first_hour_tests.py FILE OUTPUT

gpu_first_hour.py runs this as its part ``tests``. pytest writes its own reports only at the end,
which a part that runs out of time does not reach.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from common import write_whole

_MESSAGE_LENGTH = 600


class RowWriter:
    """A pytest plugin that rewrites ``output`` with the rows of all tests finished so far."""

    def __init__(self, output: Path) -> None:
        self._output = output
        self._rows: list[dict[str, Any]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # Setup and teardown get a row only if they fail, or skip the test.
        if report.when != "call" and report.passed:
            return
        self._rows.append(
            {
                "test": report.nodeid.rpartition("::")[2],
                "outcome": report.outcome,
                "seconds": report.duration,
                "message": _message(report),
            }
        )
        write_whole(self._output, json.dumps(self._rows))


def _message(report: pytest.TestReport) -> str:
    """Render in one line why a test failed or was skipped, from pytest's report."""
    if isinstance(report.longrepr, tuple):  # a skipped test has (file, line, reason) here
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    text = report.longreprtext if crash is None else crash.message
    return " ".join(text.split())[:_MESSAGE_LENGTH]


if __name__ == "__main__":
    tests, output = sys.argv[1:]
    options = ["-q", "--tb=short", "-p", "no:cacheprovider"]
    sys.exit(pytest.main([tests, *options], plugins=[RowWriter(Path(output))]))
