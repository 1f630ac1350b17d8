"""What scoring a file has found, of records or of a benchmark, and all that may be done with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nemo_aligner.evaluation.evaluate import EvaluationReport
from nemo_aligner.evaluation.html.evaluated import of_report, of_task
from nemo_aligner.evaluation.html.reported import Reported
from nemo_aligner.evaluation.report import render_report, write_report, write_rewards
from nemo_aligner.evaluation.robustness import ScoredPairs
from nemo_aligner.evaluation.run_task import TaskReport, render_task, write_task, write_verdicts
from nemo_aligner.text.contract import ScoringContract


class Measured(Protocol):
    """``about`` says what was scored with what; the page of ``reported`` has the contract, too."""

    def render(self) -> str:
        """Tables for people."""
        ...

    def write(self, path: Path, more: Mapping[str, Any]) -> None:
        """The figures as JSON, with ``more`` beside them."""
        ...

    def write_each(self, path: Path) -> None:
        """A line of JSON for every record or item."""
        ...

    def reported(self, name: str) -> Reported:
        """As a report has it, by this name."""
        ...

    def pairs(self) -> ScoredPairs:
        """Its pairs, where it is of pairs."""
        ...


@dataclass(frozen=True)
class MeasuredRecords:
    """Of a file of pairs or ratings."""

    report: EvaluationReport
    about: Mapping[str, str]
    contract: ScoringContract | None

    def render(self) -> str:
        return render_report(self.report, self.about)

    def write(self, path: Path, more: Mapping[str, Any]) -> None:
        write_report(path, self.report, {**self.about, **more})

    def write_each(self, path: Path) -> None:
        write_rewards(path, self.report)

    def reported(self, name: str) -> Reported:
        return of_report(name, self.report, self.about, self.contract)

    def pairs(self) -> ScoredPairs:
        return ScoredPairs.of_report(self.report)


@dataclass(frozen=True)
class MeasuredTask:
    """Of a benchmark."""

    report: TaskReport
    about: Mapping[str, str]
    contract: ScoringContract | None

    def render(self) -> str:
        return render_task(self.report, self.about)

    def write(self, path: Path, more: Mapping[str, Any]) -> None:
        write_task(path, self.report, {**self.about, **more})

    def write_each(self, path: Path) -> None:
        write_verdicts(path, self.report)

    def reported(self, name: str) -> Reported:
        return of_task(name, self.report, self.about, self.contract)

    def pairs(self) -> ScoredPairs:
        return ScoredPairs.of_task(self.report)
