"""An evaluation from its settings to the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from nemo_aligner.config.common import Aggregate, RecordKind
from nemo_aligner.config.evaluation import EvaluateConfig
from nemo_aligner.config.load import config_to_dict, flatten, idle_notes
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.data.readers import ReaderConfig
from nemo_aligner.distributed.collectives import on_main
from nemo_aligner.evaluation.evaluate import EvalResult, evaluate_file, right_from
from nemo_aligner.evaluation.report.run_report import RunReport
from nemo_aligner.evaluation.robustness import (
    Robustness,
    check_pairwise,
    check_robustness,
    render_robustness,
    robustness_json,
)
from nemo_aligner.evaluation.run_task import TaskResult, choose_threshold, run_task
from nemo_aligner.evaluation.sources import RewardSource, open_source
from nemo_aligner.evaluation.tasks import find_task
from nemo_aligner.evaluation.tasks.base import Task
from nemo_aligner.training.resume import describe_contract, find_versions
from nemo_aligner.utils.console import say
from nemo_aligner.utils.errors import ConfigError


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation for programs; ``str`` gives the table for people.

    Attributes:
        accuracy: of pairs, or a benchmark's overall figure; None of ratings, and where a benchmark
            has no such figure or parts of it are missing.
        interval: its 95% interval, low and high; None where there is none.
        metrics: every figure by its name (docs/metrics.md), those of a benchmark by its rows.
        counts: ``read``, ``kept`` and every reason for which a record was left out.
        rows: one for each record or item, with its rewards and texts.
        robustness: how far verdicts depend on the style of replies; None without
            ``robustness_pairs``.
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


def evaluate(config: EvaluateConfig) -> None:
    """Score held-out data, print the results, and write the files that the settings name.

    Raises:
        AlignerError: settings, data or model cannot be used.
    """
    task, how = _check(config)  # before the model is loaded
    for note in idle_notes(config):
        say(note)
    with open_source(config) as source:
        say(f"reading and scoring {config.data.path} ...")
        measured = _measure(config, task, how, source)
        say(measured.table())
        measured.write(config)


def evaluate_source(config: EvaluateConfig, source: RewardSource) -> Evaluation:
    """Evaluate with a source that is loaded already; return the result without printing it.

    Raises:
        AlignerError: as ``evaluate``.
    """
    measured = _measure(config, *_check(config), source)
    measured.write(config)
    result = measured.result
    return Evaluation(
        accuracy=result.accuracy,
        interval=result.interval,
        metrics=result.metrics,
        counts=result.counts,
        rows=result.predictions.to_rows(),
        table=measured.table(),
        robustness=measured.robustness,
    )


def _check(config: EvaluateConfig) -> tuple[Task | None, ReaderConfig]:
    """The benchmark, if one is asked for, and how to read a file of records.

    Raises:
        ConfigError: settings do not fit together.
    """
    if config.data.path is None:
        raise ConfigError("data.path: it is not set, wanted a file of pairs or ratings")
    task = None if config.task is None else find_task(config.task)
    if task is not None:
        _check_unread(config)
        if config.robustness_pairs is not None:
            check_pairwise(task)
        if config.swapped:
            raise ConfigError(f"swapped: got true with task={config.task}, wanted a file of pairs")
    for key in ("threshold", "threshold_from"):
        got = getattr(config, key)
        if got is not None and not (task is not None and task.reads_steps):
            raise ConfigError(f"{key}: got {got}, wanted null: no steps are judged by it")
    how = config.aggregate
    if how not in (None, Aggregate.last) and task is not None and task.reads_steps:
        raise ConfigError(
            f"aggregate: got {how.value}, but task={config.task} judges every step by its own "
            "reward. Leave it out"
        )
    return task, _reading(config)


def _check_unread(config: EvaluateConfig) -> None:
    """Refuse settings on how to read records: a benchmark's file has a fixed form.

    Raises:
        ConfigError: such a setting is not at its default.
    """
    usual = type(config.data)()
    for each in fields(usual):
        got = getattr(config.data, each.name)
        if each.name != "path" and got != getattr(usual, each.name):
            raise ConfigError(
                f"data.{each.name}: got {got!r}, which has no effect on a benchmark's file; "
                f"wanted it left out with task={config.task}"
            )


def _reading(config: EvaluateConfig) -> ReaderConfig:
    data = config.data
    kind = RecordKind.comparison if config.robustness_pairs or config.swapped else None
    return ReaderConfig.of(data, "data", kind=kind, loss_mask_val=data.loss_mask_val)


@dataclass(frozen=True)
class _Measured:
    """Result on records or a benchmark; ``about`` names the model, its contract and the data."""

    result: EvalResult | TaskResult
    about: Mapping[str, str]
    contract: ScoringContract | None
    robustness: Robustness | None

    def table(self) -> str:
        """Render the tables for people."""
        tables = [self.result.render(self.about)]
        if self.robustness is not None:
            tables.append(render_robustness(self.robustness))
        return "\n\n".join(tables)

    def write(self, config: EvaluateConfig) -> None:
        """Write what the settings ask for, on the first rank."""
        result, robustness = self.result, self.robustness
        more = {} if robustness is None else {"robustness": robustness_json(robustness)}
        if config.output is not None:
            on_main(partial(result.write, Path(config.output), {**self.about, **more}))
        if config.output_rewards is not None:
            on_main(partial(result.predictions.write, Path(config.output_rewards)))
        if config.report is not None:
            on_main(partial(self._write_page, config, Path(config.report)))
            say(f"report: {config.report}")

    def _write_page(self, config: EvaluateConfig, path: Path) -> None:
        # matplotlib is optional, and takes a second to import.
        from nemo_aligner.evaluation.report.page import save_page

        report = report_evaluation(path.stem, self.result, self.about, self.contract)
        settings = flatten(config_to_dict(config))
        save_page([replace(report, robustness=self.robustness, settings=settings)], path)


def _measure(
    config: EvaluateConfig, task: Task | None, how: ReaderConfig, source: RewardSource
) -> _Measured:
    path = str(config.data.path)
    about = {"checkpoint": source.name, "contract": source.about_contract, "data": path}
    if config.swapped:
        about["data"] += ", chosen and rejected exchanged"
    source = source.by(config.aggregate)
    if source.aggregate is not None:
        about["aggregate"] = f"{source.aggregate.value}, as set"
    result: EvalResult | TaskResult
    if task is None:
        result = evaluate_file(source, path, how, swapped=config.swapped)
    else:
        result = _measure_task(task, path, config, source, about)
    robustness, most = None, config.robustness_pairs
    if most is not None:
        robustness = check_robustness(result.predictions, source, most)
    return _Measured(result, about, source.contract, robustness)


def _measure_task(
    task: Task, path: str, config: EvaluateConfig, source: RewardSource, about: dict[str, str]
) -> TaskResult:
    """Run a benchmark; where it judges steps, ``about`` gets the threshold and its origin."""
    threshold_file = config.threshold_from
    chosen, threshold = None, config.threshold
    if threshold_file is not None:
        say(f"choosing the threshold by {threshold_file} ...")
        chosen = choose_threshold(task, threshold_file, source)
        threshold = chosen.value
    elif threshold is None:
        threshold = right_from(source)
    result = run_task(task, path, source, threshold)
    if task.reads_steps:
        origin = "the default" if config.threshold is None else "as set"
        about["threshold"] = f"{threshold:g}, {origin}"
        if chosen is not None and threshold_file is not None:
            about["threshold"] = chosen.about(threshold_file, result)
    return result


def report_evaluation(
    name: str,
    result: EvalResult | TaskResult,
    about: Mapping[str, str],
    contract: ScoringContract | None,
) -> RunReport:
    """Entry of a report for an evaluation in memory.

    A benchmark without right and wrong replies, such as best of n, has only its figures.
    """
    if isinstance(result, EvalResult):
        facts = _facts(about, result.counts, contract)
        predictions = {name: result.predictions}
        return RunReport(name, "evaluation", {}, predictions, result.metrics, facts=facts)
    rows = result.predictions.rows
    has_sides = all(0 < row.item.num_right < len(row.rewards) for row in rows)
    return RunReport(
        name=name,
        kind=f"benchmark {result.task}",
        predictions={name: result.predictions} if has_sides else {},
        rows=result.rows,
        facts=_facts(about, result.left_out, contract),
    )


def _facts(
    about: Mapping[str, str], counts: Mapping[str, int], contract: ScoringContract | None
) -> dict[str, object]:
    return {
        **about,
        **({} if contract is None else describe_contract(contract)),
        "counts": dict(counts),
        "versions": find_versions(),
        "described": [f"checkpoint: {about['checkpoint']}"],
    }
