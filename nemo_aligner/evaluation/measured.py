"""What scoring a file has found, of records or of a benchmark, and all that may be done with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from nemo_aligner.evaluation.evaluate import EvaluationReport
from nemo_aligner.evaluation.html.evaluated import of_report, of_task
from nemo_aligner.evaluation.html.reported import Reported
from nemo_aligner.evaluation.report import render_report, reward_rows, write_report, write_rewards
from nemo_aligner.evaluation.robustness import Robustness, ScoredPairs
from nemo_aligner.evaluation.run_task import (
    TaskReport,
    render_task,
    verdict_rows,
    write_task,
    write_verdicts,
)
from nemo_aligner.evaluation.tasks.base import Level
from nemo_aligner.text.contract import ScoringContract


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation has found, for programs; as text it is the table for people.

    Attributes:
        accuracy: of pairs, or a benchmark's overall figure; None of ratings.
        interval: its 95% interval, low and high; None where there is none.
        metrics: every figure by its name (docs/metrics.md), those of a benchmark by its rows.
        counts: ``read``, ``kept`` and every reason for which a record was left out.
        rows: one for each record or item, with its rewards and texts.
        robustness: how far the verdicts follow the style of replies; None if nobody asked.
    """

    accuracy: float | None
    interval: tuple[float, float] | None
    metrics: Mapping[str, float]
    counts: Mapping[str, int]
    rows: Sequence[Mapping[str, Any]] = field(repr=False)
    table: str = field(repr=False)
    robustness: Robustness | None = None

    def __str__(self) -> str:
        return self.table


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

    def evaluation(self) -> Evaluation:
        """For a program."""
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

    def evaluation(self) -> Evaluation:
        report = self.report
        return Evaluation(
            accuracy=report.metrics.get("accuracy"),
            interval=report.accuracy_interval,
            metrics=report.metrics,
            counts=report.counts,
            rows=list(reward_rows(report)),
            table=self.render(),
        )


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

    def evaluation(self) -> Evaluation:
        report = self.report
        overall = next(row for row in report.rows if row.level is Level.overall)
        interval = None
        if overall.low is not None and overall.high is not None:
            interval = overall.low, overall.high
        return Evaluation(
            accuracy=overall.value,
            interval=interval,
            metrics={row.name: row.value for row in report.rows},
            counts={"kept": len(report.judged), **report.left_out},
            rows=list(verdict_rows(report)),
            table=self.render(),
        )
