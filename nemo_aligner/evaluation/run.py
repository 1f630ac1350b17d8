"""An evaluation from its settings to the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from nemo_aligner.config.evaluation import EvaluateConfig, EvaluateDataConfig
from nemo_aligner.config.load import config_to_dict, flatten
from nemo_aligner.console import Counter, say
from nemo_aligner.data.formats.base import PairKeys
from nemo_aligner.data.malformed import MalformedRule
from nemo_aligner.data.prompts import PromptWrapping
from nemo_aligner.data.reading import Reading
from nemo_aligner.errors import ConfigError
from nemo_aligner.evaluation.evaluate import evaluate_file
from nemo_aligner.evaluation.html.evaluated import of_report, of_task
from nemo_aligner.evaluation.html.reported import Reported
from nemo_aligner.evaluation.report import render_report, write_report, write_rewards
from nemo_aligner.evaluation.run_task import (
    render_task,
    run_task,
    write_task,
    write_verdicts,
)
from nemo_aligner.evaluation.tasks import find_task
from nemo_aligner.parallel.collectives import on_main
from nemo_aligner.parallel.launch import launch
from nemo_aligner.parallel.layout import initialize_layout
from nemo_aligner.scoring.scorer import load_scorer
from nemo_aligner.text.contract_changes import check_expected


def evaluate(config: EvaluateConfig) -> None:
    """Score held-out data, say how well, and write what the settings ask for.

    Raises:
        AlignerError: settings, data or model are unfit.
    """
    model_file, data_file = config.rm_model_file, config.data.path
    if model_file is None or data_file is None:
        key = "rm_model_file" if model_file is None else "data.path"
        raise ConfigError(f"{key}: it is not set; wanted both rm_model_file and data.path")
    # What is wrong with them is said before the model is loaded.
    task = None if config.task is None else find_task(config.task)
    how = _reading(config.data)
    with launch():
        layout = initialize_layout(
            config.model.tensor_model_parallel_size,
            config.model.pipeline_model_parallel_size,
            config.model.sequence_parallel,
        )
        say(f"loading {model_file} ...")
        scorer = load_scorer(
            model_file,
            layout,
            precision=config.precision,
            micro_batch_tokens=config.model.micro_batch_tokens,
            invariant_rows=config.model.invariant_rows,
            watch=Counter("scoring", "texts").show,
        )
        check_expected(scorer.contract, config.expect_contract, "expect_contract")
        say(f"reading, tokenizing and scoring {data_file} ...")
        about = {
            "checkpoint": model_file,
            "contract": scorer.contract.hash,
            "data": data_file,
        }
        if task is None:
            report = evaluate_file(scorer, data_file, how)
            _report(
                config,
                render_report(report, about),
                partial(write_report, report=report, about=about),
                partial(write_rewards, report=report),
                partial(of_report, report=report, about=about, contract=scorer.contract),
            )
            return
        weights = scorer.contract.attribute_weights
        found = run_task(task, data_file, scorer.score, weights, scorer.encode)
        _report(
            config,
            render_task(found, about),
            partial(write_task, report=found, about=about),
            partial(write_verdicts, report=found),
            partial(of_task, report=found, about=about, contract=scorer.contract),
        )


def _report(
    config: EvaluateConfig,
    shown: str,
    write_all: Callable[[str], None],
    write_each: Callable[[str], None],
    collect: Callable[[str], Reported],
) -> None:
    """Say what was found, and write it where the settings ask for it."""
    say(shown)
    for path, write in ((config.output, write_all), (config.output_rewards, write_each)):
        if path is not None:
            on_main(partial(write, path))
    if config.report is not None:
        on_main(partial(_write_page, config, collect))
        say(f"report: {config.report}")


def _write_page(config: EvaluateConfig, collect: Callable[[str], Reported]) -> None:
    # Figures take a package that is not always there, and a second to import.
    from nemo_aligner.evaluation.html.page import save_page

    found = collect(Path(str(config.report)).stem)
    save_page([replace(found, settings=flatten(config_to_dict(config)))], Path(str(config.report)))


def _reading(data: EvaluateDataConfig) -> Reading:
    return Reading(
        format=data.format,
        loss_mask_val=data.loss_mask_val,
        pair_keys=PairKeys.of(data.prompt_key, data.chosen_key, data.rejected_key),
        prompts=PromptWrapping.of(data, "data"),
        rule=MalformedRule(data.malformed, data.max_malformed, section="data."),
    )
