"""An evaluation from its settings to the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from nemo_aligner.config.common import RecordKind
from nemo_aligner.config.evaluation import EvaluateConfig
from nemo_aligner.config.idle import idle_notes
from nemo_aligner.config.load import config_to_dict, flatten
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.data.formats.base import PairKeys
from nemo_aligner.data.readers import MalformedRule, PromptWrapping, Reading
from nemo_aligner.distributed.collectives import on_main
from nemo_aligner.evaluation.evaluate import (
    EvaluationReport,
    evaluate_file,
    render_report,
    reward_rows,
    write_report,
    write_rewards,
)
from nemo_aligner.evaluation.report.run_report import Reported, of_report, of_task
from nemo_aligner.evaluation.robustness import (
    Robustness,
    ScoredPairs,
    check_pairwise,
    check_robustness,
    render_robustness,
    robustness_json,
)
from nemo_aligner.evaluation.run_task import (
    TaskReport,
    render_task,
    run_task,
    verdict_rows,
    write_task,
    write_verdicts,
)
from nemo_aligner.evaluation.sources import RewardSource, open_source
from nemo_aligner.evaluation.tasks import find_task
from nemo_aligner.evaluation.tasks.base import Level, Task
from nemo_aligner.utils.console import say
from nemo_aligner.utils.errors import ConfigError


def evaluate(config: EvaluateConfig) -> None:
    """Score held-out data, say how well, and write what the settings ask for.

    Raises:
        AlignerError: settings, data or model are unfit.
    """
    asked = _Asked.of(config)  # what is wrong with it is said before the model is loaded
    for note in idle_notes(config):
        say(note)
    with open_source(config) as source:
        say(f"reading and scoring {asked.data_file} ...")
        measured, robustness = _measure(asked, source)
        say(_render(measured, robustness))
        _write(config, measured, robustness)


def evaluate_source(config: EvaluateConfig, source: RewardSource) -> Evaluation:
    """Evaluate with a source that is loaded already; return the result without printing it.

    Raises:
        AlignerError: as ``evaluate``.
    """
    measured, robustness = _measure(_Asked.of(config), source)
    _write(config, measured, robustness)
    table = _render(measured, robustness)
    return replace(measured.evaluation(), robustness=robustness, table=table)


@dataclass(frozen=True)
class _Asked:
    """Measurements to make, and how to read the file."""

    data_file: str
    task: Task | None
    how: Reading
    robustness_pairs: int | None

    @classmethod
    def of(cls, config: EvaluateConfig) -> _Asked:
        data_file, most = config.data.path, config.robustness_pairs
        if data_file is None:
            raise ConfigError("data.path: it is not set, wanted a file of pairs or ratings")
        task = None if config.task is None else find_task(config.task)
        if task is not None:
            _check_unread(config)
        if task is not None and most is not None:
            check_pairwise(task)
        return cls(data_file, task, _reading(config), most)


def _check_unread(config: EvaluateConfig) -> None:
    """Refuse what would change how records are read: a benchmark's have their own shape.

    Raises:
        ConfigError: such a setting is not its default.
    """
    usual = type(config.data)()
    for each in fields(usual):
        got = getattr(config.data, each.name)
        if each.name != "path" and got != getattr(usual, each.name):
            raise ConfigError(
                f"data.{each.name}: got {got!r}, which has no effect on a benchmark's file; "
                f"wanted it left out with task={config.task}"
            )


def _measure(asked: _Asked, source: RewardSource) -> tuple[Measured, Robustness | None]:
    task, path = asked.task, asked.data_file
    about = {"checkpoint": source.name, "contract": source.about_contract, "data": path}
    measured: Measured
    if task is None:
        measured = MeasuredRecords(evaluate_file(source, path, asked.how), about, source.contract)
    else:
        found = run_task(task, path, source.score, source.attribute_weights, source.encode)
        measured = MeasuredTask(found, about, source.contract)
    if asked.robustness_pairs is None:
        return measured, None
    pairs, most = measured.pairs(), asked.robustness_pairs
    return measured, check_robustness(pairs, source.score_as_one, source.fits, most)


def _render(measured: Measured, robustness: Robustness | None) -> str:
    found = measured.render()
    return found if robustness is None else f"{found}\n\n{render_robustness(robustness)}"


def _write(config: EvaluateConfig, measured: Measured, robustness: Robustness | None) -> None:
    """Write what was found where the settings ask for it."""
    more = {} if robustness is None else {"robustness": robustness_json(robustness)}
    if config.output is not None:
        on_main(partial(measured.write, Path(config.output), more))
    if config.output_rewards is not None:
        on_main(partial(measured.write_each, Path(config.output_rewards)))
    if config.report is not None:
        on_main(partial(_write_page, config, measured, robustness, Path(config.report)))
        say(f"report: {config.report}")


def _write_page(
    config: EvaluateConfig, measured: Measured, robustness: Robustness | None, path: Path
) -> None:
    # Figures take a package that is not always there, and a second to import.
    from nemo_aligner.evaluation.report.page import save_page

    settings = flatten(config_to_dict(config))
    reported = replace(measured.reported(path.stem), robustness=robustness, settings=settings)
    save_page([reported], path)


def _reading(config: EvaluateConfig) -> Reading:
    data = config.data
    return Reading(
        kind=None if config.robustness_pairs is None else RecordKind.comparison,
        format=data.format,
        loss_mask_val=data.loss_mask_val,
        pair_keys=PairKeys.of(data.prompt_key, data.chosen_key, data.rejected_key),
        prompts=PromptWrapping.of(data, "data"),
        rule=MalformedRule(data.malformed, data.max_malformed, section="data."),
    )


# Results on records or a benchmark, and their outputs.


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation for programs; ``str`` gives the table for people.

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
        """Convert to an entry of a report, under this name."""
        ...

    def pairs(self) -> ScoredPairs:
        """Its pairs, where it is of pairs."""
        ...

    def evaluation(self) -> Evaluation:
        """Convert to the result for programs."""
        ...


@dataclass(frozen=True)
class MeasuredRecords:
    """Measurements on a file of pairs or ratings."""

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
    """Measurements on a benchmark."""

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
