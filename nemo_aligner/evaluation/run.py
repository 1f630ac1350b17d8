"""An evaluation from its settings to the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from nemo_aligner.config.common import RecordKind
from nemo_aligner.config.evaluation import EvaluateConfig
from nemo_aligner.config.load import config_to_dict, flatten
from nemo_aligner.console import say
from nemo_aligner.data.formats.base import PairKeys
from nemo_aligner.data.malformed import MalformedRule
from nemo_aligner.data.prompts import PromptWrapping
from nemo_aligner.data.reading import Reading
from nemo_aligner.errors import ConfigError
from nemo_aligner.evaluation.evaluate import EvaluationReport, evaluate_file
from nemo_aligner.evaluation.html.evaluated import of_report, of_task
from nemo_aligner.evaluation.html.reported import Reported
from nemo_aligner.evaluation.report import render_report, write_report, write_rewards
from nemo_aligner.evaluation.robustness import (
    Robustness,
    ScoredPairs,
    check_pairwise,
    check_robustness,
)
from nemo_aligner.evaluation.robustness_report import render_robustness, robustness_json
from nemo_aligner.evaluation.run_task import (
    TaskReport,
    render_task,
    run_task,
    write_task,
    write_verdicts,
)
from nemo_aligner.evaluation.sources.base import RewardSource
from nemo_aligner.evaluation.sources.opening import open_source
from nemo_aligner.evaluation.tasks import find_task
from nemo_aligner.parallel.collectives import on_main


def evaluate(config: EvaluateConfig) -> None:
    """Score held-out data, say how well, and write what the settings ask for.

    Raises:
        AlignerError: settings, data or model are unfit.
    """
    data_file = config.data.path
    if data_file is None:
        raise ConfigError("data.path: it is not set, wanted a file of pairs or ratings")
    # What is wrong with them is said before the model is loaded.
    task = None if config.task is None else find_task(config.task)
    if task is not None and config.robustness_pairs is not None:
        check_pairwise(task)
    how = _reading(config)
    with open_source(config) as source:
        say(f"reading and scoring {data_file} ...")
        about = {
            "checkpoint": source.name,
            "contract": source.about_contract,
            "data": data_file,
        }
        if task is None:
            _evaluate_records(config, source, evaluate_file(source, data_file, how), about)
        else:
            weights = source.attribute_weights
            found = run_task(task, data_file, source.score, weights, source.encode)
            _evaluate_task(config, source, found, about)


def _evaluate_records(
    config: EvaluateConfig, source: RewardSource, report: EvaluationReport, about: dict[str, str]
) -> None:
    robustness = _robustness(config, source, partial(ScoredPairs.of_report, report))
    _report(
        config,
        render_report(report, about),
        partial(write_report, report=report, about={**about, **_as_json(robustness)}),
        partial(write_rewards, report=report),
        partial(of_report, report=report, about=about, contract=source.contract),
        robustness,
    )


def _evaluate_task(
    config: EvaluateConfig, source: RewardSource, report: TaskReport, about: dict[str, str]
) -> None:
    robustness = _robustness(config, source, partial(ScoredPairs.of_task, report))
    _report(
        config,
        render_task(report, about),
        partial(write_task, report=report, about={**about, **_as_json(robustness)}),
        partial(write_verdicts, report=report),
        partial(of_task, report=report, about=about, contract=source.contract),
        robustness,
    )


def _robustness(
    config: EvaluateConfig, source: RewardSource, pairs: Callable[[], ScoredPairs]
) -> Robustness | None:
    """What changes of style do to verdicts and rewards, if that is asked for."""
    if config.robustness_pairs is None:
        return None
    return check_robustness(pairs(), source.score_as_one, source.fits, config.robustness_pairs)


def _as_json(robustness: Robustness | None) -> dict[str, Any]:
    return {} if robustness is None else {"robustness": robustness_json(robustness)}


def _report(
    config: EvaluateConfig,
    shown: str,
    write_all: Callable[[str], None],
    write_each: Callable[[str], None],
    collect: Callable[[str], Reported],
    robustness: Robustness | None,
) -> None:
    """Say what was found, and write it where the settings ask for it."""
    say(shown)
    if robustness is not None:
        say(f"\n{render_robustness(robustness)}")
    for path, write in ((config.output, write_all), (config.output_rewards, write_each)):
        if path is not None:
            on_main(partial(write, path))
    if config.report is not None:
        on_main(partial(_write_page, config, collect, robustness))
        say(f"report: {config.report}")


def _write_page(
    config: EvaluateConfig, collect: Callable[[str], Reported], robustness: Robustness | None
) -> None:
    # Figures take a package that is not always there, and a second to import.
    from nemo_aligner.evaluation.html.page import save_page

    path = Path(str(config.report))
    settings = flatten(config_to_dict(config))
    save_page([replace(collect(path.stem), robustness=robustness, settings=settings)], path)


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
