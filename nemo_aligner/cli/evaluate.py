"""Measure a reward model on held-out pairs or ratings.

nemo-aligner evaluate rm_model_file=megatron_gpt.nemo data.path=heldout.jsonl
nemo-aligner evaluate hf_model=FOLDER_OR_NAME data.path=heldout.jsonl
nemo-aligner evaluate server=http://127.0.0.1:5555 data.path=heldout.jsonl
"""

from __future__ import annotations

import argparse

from nemo_aligner.cli.parser import Parser
from nemo_aligner.cli.settings import read_settings, settings_parser, start_ranks, starts_ranks
from nemo_aligner.config.evaluation import EvaluateConfig
from nemo_aligner.evaluation.html import check_report


def new_parser() -> Parser:
    """The options of ``nemo-aligner evaluate``."""
    return settings_parser("evaluate", __doc__, EvaluateConfig)


def run(options: argparse.Namespace) -> int:
    """Print the metrics, and write what ``output``, ``output_rewards`` and ``report`` ask for."""
    config = read_settings(EvaluateConfig, options, ["data.path"])
    config.source_key()
    if config.report is not None:
        check_report("report")
    if starts_ranks(options):
        return start_ranks("evaluate", options)
    from nemo_aligner.evaluation.run import evaluate

    evaluate(config)
    return 0
