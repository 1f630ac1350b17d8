"""One evaluation, from its settings to the printed table, the files and the report.

``evaluate`` is the entry point of ``nemo-aligner evaluate``. ``evaluate_source`` is the entry point
of the Python API, whose model is already loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nemo_aligner.config.common import Aggregate, RecordKind
from nemo_aligner.config.evaluation import EvaluateConfig
from nemo_aligner.config.ineffective import describe_ineffective_settings
from nemo_aligner.config.load import config_to_dict, flatten
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.data.hub import local_file
from nemo_aligner.data.readers import ReaderConfig
from nemo_aligner.distributed.collectives import on_main, once_per_node
from nemo_aligner.evaluation.evaluate import EvalResult, default_threshold, evaluate_file
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
from nemo_aligner.training.run_facts import describe_contract, find_versions
from nemo_aligner.utils.console import say
from nemo_aligner.utils.errors import AlignerError, ConfigError
from nemo_aligner.utils.writing import check_outputs


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation for programs; ``str(...)`` renders the table for people.

    Attributes:
        accuracy: accuracy on pairs, or the overall figure of a benchmark. None for ratings, and if
            the benchmark has no overall figure or some of its subsets are missing.
        interval: 95% interval of ``accuracy`` as (low, high); None if there is none.
        metrics: every metric by its name (docs/metrics.md); for a benchmark, every figure by the
            name of its row.
        counts: number of records ``read`` and ``kept``, and of those dropped, by reason.
        rows: one mapping for each record or item, with its rewards and samples, as in an
            ``output_rewards`` file.
        table: the table for people.
        robustness: how much verdicts depend on the style of replies; None without
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
        AlignerError: the settings, the data or the model cannot be used.
    """
    # Check the settings first, because loading a model takes minutes.
    task, reader = _check_settings(config)
    for note in describe_ineffective_settings(config):
        say(note)
    with open_source(config) as source:
        say(f"reading and scoring {config.data.path} ...")
        results = _measure(config, task, reader, source)
        say(results.table())
        results.write(config)


def evaluate_source(
    config: EvaluateConfig, source: RewardSource, data_name: str | None = None
) -> Evaluation:
    """Evaluate a source that is already open, and return the result without printing it.

    Args:
        data_name: name of the data file in results and errors; None means ``data.path``.

    Raises:
        AlignerError: the settings, the data or the model cannot be used.
    """
    task, reader = _check_settings(config)
    try:
        results = _measure(config, task, replace(reader, name=data_name), source)
    except AlignerError as error:
        if data_name is not None:  # errors about the file as a whole have its path
            error.args = (str(error).replace(str(config.data.path), data_name),)
        raise
    if data_name is not None:
        config = replace(config, data=replace(config.data, path=data_name))
    results.write(config)
    result = results.result
    return Evaluation(
        accuracy=result.accuracy,
        interval=result.interval,
        metrics=result.metrics,
        counts=result.counts,
        rows=result.predictions.to_rows(),
        table=results.table(),
        robustness=results.robustness,
    )


def _check_settings(config: EvaluateConfig) -> tuple[Task | None, ReaderConfig]:
    """Check the settings; return the benchmark, if one is set, and how to read a file of records.

    Raises:
        ConfigError: a required setting is missing, or settings do not fit together.
    """
    if config.data.path is None:
        raise ConfigError("data.path: it is not set. Set it to a file of pairs or ratings.")
    _check_outputs(config)
    task = None if config.task is None else find_task(config.task)
    if task is not None:
        _check_reader_unset(config)
        if config.robustness_pairs is not None:
            check_pairwise(task)
        if config.swapped:
            raise ConfigError(
                f"swapped: got true with task={config.task}, but only a file of pairs can be "
                "swapped. Leave one of the two out."
            )
    for key in ("threshold", "threshold_from"):
        value = getattr(config, key)
        if value is not None and not (task is not None and task.reads_steps):
            raise ConfigError(
                f"{key}: got {value}, but only benchmarks that judge steps use a threshold. Leave "
                "it out."
            )
    aggregate = config.aggregate
    if aggregate not in (None, Aggregate.last) and task is not None and task.reads_steps:
        raise ConfigError(
            f"aggregate: got {aggregate.value}, but task={config.task} judges every step by its "
            "own reward. Leave it out."
        )
    return task, _build_reader_config(config)


def _check_outputs(config: EvaluateConfig) -> None:
    """Raise ConfigError if an output is a file that is read, or another output."""
    read = {
        "data.path": config.data.path,
        "data.system_prompt_file": config.data.system_prompt_file,
        "data.prompt_file": config.data.prompt_file,
        "threshold_from": config.threshold_from,
        "rm_model_file": config.rm_model_file,
        "hf_model": config.hf_model,
    }
    written = {
        "output": config.output,
        "output_rewards": config.output_rewards,
        "report": config.report,
    }
    check_outputs(
        {setting: Path(path) for setting, path in written.items() if path is not None},
        {f"the file of {setting}": Path(path) for setting, path in read.items() if path},
    )


def _check_reader_unset(config: EvaluateConfig) -> None:
    """Reject settings of ``data`` that say how to read records, if a benchmark is evaluated.

    They would have no effect, because a benchmark's file has a fixed form.

    Raises:
        ConfigError: such a setting is not at its default.
    """
    defaults = type(config.data)()
    for field_ in fields(defaults):
        value = getattr(config.data, field_.name)
        if field_.name != "path" and value != getattr(defaults, field_.name):
            raise ConfigError(
                f"data.{field_.name}: got {value!r}, which has no effect on a benchmark's file. "
                f"Leave it out with task={config.task}."
            )


def _build_reader_config(config: EvaluateConfig) -> ReaderConfig:
    data = config.data
    kind = RecordKind.comparison if config.robustness_pairs or config.swapped else None
    return ReaderConfig.of(data, "data", kind=kind, loss_mask_val=data.loss_mask_val)


@dataclass(frozen=True)
class _Results:
    """Results on records or on a benchmark, ready to be rendered and written.

    Attributes:
        result: the metrics and predictions.
        description: lines for people that name the model, its scoring contract and the data.
        contract: the scoring contract; None if it is unknown.
        robustness: None without ``robustness_pairs``.
    """

    result: EvalResult | TaskResult
    description: Mapping[str, str]
    contract: ScoringContract | None
    robustness: Robustness | None

    def table(self) -> str:
        """Render the tables for people."""
        tables = [self.result.render(self.description)]
        if self.robustness is not None:
            tables.append(render_robustness(self.robustness))
        return "\n\n".join(tables)

    def write(self, config: EvaluateConfig) -> None:
        """Write the files that the settings name, on the first rank.

        Raises:
            ConfigError: some cannot be written; the others are written nevertheless.
        """
        result, description = self.result, dict[str, Any](self.description)
        if self.robustness is not None:
            description["robustness"] = robustness_json(self.robustness)
        writers: dict[str, Callable[[Path], str]] = {
            "output": partial(result.write, description=description),
            "output_rewards": result.predictions.write,
            "report": partial(self._write_page, config),
        }
        errors: list[ConfigError] = []
        for setting, write in writers.items():
            path = getattr(config, setting)
            if path is not None:
                try:
                    say(f"{setting}: {on_main(partial(write, Path(path)))}")
                except ConfigError as error:
                    errors.append(error)
        if errors:
            raise ConfigError("\n  ".join(map(str, errors))) from errors[0]

    def _write_page(self, config: EvaluateConfig, path: Path) -> str:
        # Imported here because matplotlib is optional, and takes a second to import.
        from nemo_aligner.evaluation.report.page import save_page

        report = report_evaluation(path.stem, self.result, self.description, self.contract)
        settings = flatten(config_to_dict(config))
        report = replace(report, robustness=self.robustness, settings=settings)
        return save_page([report], path, "report")


def _measure(
    config: EvaluateConfig, task: Task | None, reader: ReaderConfig, source: RewardSource
) -> _Results:
    path = str(config.data.path)
    description = {
        "checkpoint": source.name,
        "contract": source.shown_contract,
        "data": path if reader.name is None else reader.name,
    }
    path = _find_local_file(path)
    if config.swapped:
        description["data"] += ", chosen and rejected swapped"
    source = source.with_aggregate(config.aggregate).for_format(config.data.format)
    if source.aggregate is not None:
        description["aggregate"] = f"{source.aggregate.value}, as set"
    result: EvalResult | TaskResult
    if task is None:
        result = evaluate_file(
            source,
            path,
            reader,
            swapped=config.swapped,
            needs_marked_replies=config.robustness_pairs is not None,
        )
    else:
        result = _measure_task(task, path, config, reader.name, source, description)
    robustness = None
    if config.robustness_pairs is not None:
        robustness = check_robustness(result.predictions, source, config.robustness_pairs)
    return _Results(result, description, source.contract, robustness)


def _find_local_file(name: str) -> str:
    """Return the file to read; a data set of the hub is downloaded by the first rank of a node."""
    return once_per_node(lambda: local_file(name))


def _measure_task(
    task: Task,
    path: str,
    config: EvaluateConfig,
    name: str | None,
    source: RewardSource,
    description: dict[str, str],
) -> TaskResult:
    """Run a benchmark; if it judges steps, add the threshold and its origin to ``description``."""
    threshold_file = config.threshold_from
    chosen, threshold = None, config.threshold
    if threshold is not None:
        # Rewards are float32, in which a reward of 0.9 would be below a threshold of 0.9.
        threshold = float(np.float32(threshold))
    if threshold_file is not None:
        say(f"choosing the threshold on {threshold_file} ...")
        chosen = choose_threshold(task, _find_local_file(threshold_file), source)
        threshold = chosen.value
    elif threshold is None:
        threshold = default_threshold(source)
    result = run_task(task, path, source, threshold, name)
    if task.reads_steps:
        origin = "the default" if config.threshold is None else "as set"
        description["threshold"] = f"{threshold:g}, {origin}"
        if chosen is not None and threshold_file is not None:
            description["threshold"] = chosen.describe(threshold_file, result)
    return result


def report_evaluation(
    name: str,
    result: EvalResult | TaskResult,
    description: Mapping[str, str],
    contract: ScoringContract | None,
) -> RunReport:
    """Build the entry of a report for an evaluation in memory.

    A benchmark without right and wrong replies, such as best of n, gets its figures but no
    predictions.
    """
    if isinstance(result, EvalResult):
        facts = _collect_facts(description, result.counts, contract)
        predictions = {name: result.predictions}
        return RunReport(name, "evaluation", {}, predictions, result.metrics, facts=facts)
    return RunReport(
        name=name,
        kind=f"benchmark {result.task}",
        predictions={name: result.predictions} if result.predictions.has_sides else {},
        rows=result.rows,
        facts=_collect_facts(description, result.left_out, contract),
    )


def _collect_facts(
    description: Mapping[str, str], counts: Mapping[str, int], contract: ScoringContract | None
) -> dict[str, object]:
    return {
        **description,
        **({} if contract is None else describe_contract(contract)),
        "counts": dict(counts),
        "versions": find_versions(),
        "described": [f"checkpoint: {description['checkpoint']}"],
    }
