"""Verbs that train: ``train`` and ``probe``."""

from __future__ import annotations

import argparse
import os

from nemo_aligner.api.training import NEEDED, run_training
from nemo_aligner.cli.parser import Parser, positive
from nemo_aligner.cli.settings import read_settings, settings_parser, start_ranks, starts_ranks
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.evaluation.report import check_report
from nemo_aligner.utils.processes import find_process, leave_together

_TRAIN = """\
Train a reward model: from a base checkpoint and preference data to megatron_gpt.nemo.

  nemo-aligner train pretrained_checkpoint.restore_from_path=base.nemo \\
      model.data.data_prefix.train=pairs.jsonl \\
      exp_manager.explicit_log_dir=results/first

The same command resumes a run that stopped. Ctrl-C and SIGTERM save before the run stops; so does
SIGUSR1, after which the exit code is 138, so that a script can start the run again.
"""


def train_parser() -> Parser:
    """The options of ``nemo-aligner train``."""
    parser = settings_parser("train", _TRAIN, TrainConfig)
    parser.add_argument(
        "--dry-run", action="store_true",
        help="check settings, data, memory and layout without training",
    )  # fmt: skip
    return parser


def run_train(options: argparse.Namespace) -> int:
    """Train, on as many ranks as were started."""
    config = read_settings(TrainConfig, options, NEEDED)
    if options.dry_run:
        from nemo_aligner.training.dry_run import check_run
        from nemo_aligner.utils.console import say

        say(check_run(config, options.processes or find_process(os.environ).world_size))
        return 0
    if config.exp_manager.report:
        check_report("exp_manager.report")
    if starts_ranks(options):
        return start_ranks("train", options)
    stopped_by = run_training(config).stopped_by
    return leave_together(stopped_by.exit_code) if stopped_by is not None else 0


_PROBE = """\
Show that training sees its labels, with your model and settings.

  nemo-aligner probe pretrained_checkpoint.restore_from_path=base.nemo

Takes the settings of training; without model.data.data_prefix.train it uses records of the demo
set. It overfits a handful of records, then starts again with their labels swapped (chosen and
rejected exchanged, ratings mirrored). The metric on the original labels must rise the first time
and fall the second. Training that ignores its labels fails the probe, with exit code 1. Nothing is
written.
"""


def probe_parser() -> Parser:
    """The options of ``nemo-aligner probe``."""
    parser = settings_parser("probe", _PROBE, TrainConfig)
    parser.add_argument("--records", type=positive, default=8, metavar="N", help="default: 8")
    parser.add_argument("--steps", type=positive, default=20, metavar="N", help="default: 20")
    return parser


def run_probe(options: argparse.Namespace) -> int:
    """Return 0 if training follows its labels, else 1."""
    config = read_settings(TrainConfig, options, ["pretrained_checkpoint.restore_from_path"])
    if starts_ranks(options):
        return start_ranks("probe", options)
    from nemo_aligner.tools.overfit_test import render_probe, run_probe
    from nemo_aligner.utils.console import say

    result = run_probe(config, options.records, options.steps)
    say(render_probe(result))
    return 0 if result.passed else 1
