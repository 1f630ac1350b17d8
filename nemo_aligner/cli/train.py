"""Train a reward model: from a base checkpoint and preference data to megatron_gpt.nemo.

  nemo-aligner train pretrained_checkpoint.restore_from_path=base.nemo \\
      model.data.data_prefix.train=pairs.jsonl \\
      exp_manager.explicit_log_dir=results/first

The same command again goes on where a run stopped. Ctrl-C and SIGTERM save before they stop it;
so does SIGUSR1, which has it end with exit code 138, for a script that starts it again.
"""

from __future__ import annotations

import argparse
import os

from nemo_aligner.api.training import NEEDED, run_training
from nemo_aligner.cli.parser import Parser
from nemo_aligner.cli.settings import read_settings, settings_parser, start_ranks, starts_ranks
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.evaluation.html import check_report
from nemo_aligner.processes import find_process, leave_together


def new_parser() -> Parser:
    """The options of ``nemo-aligner train``."""
    parser = settings_parser("train", __doc__, TrainConfig)
    parser.add_argument(
        "--dry-run", action="store_true",
        help="check settings, data, memory and layout, and begin nothing",
    )  # fmt: skip
    return parser


def run(options: argparse.Namespace) -> int:
    """Train, on as many ranks as were started."""
    config = read_settings(TrainConfig, options, NEEDED)
    if options.dry_run:
        from nemo_aligner.console import say
        from nemo_aligner.training.dry_run import check_run

        say(check_run(config, options.processes or find_process(os.environ).world_size))
        return 0
    if config.exp_manager.report:
        check_report("exp_manager.report")
    if starts_ranks(options):
        return start_ranks("train", options)
    stopped_by = run_training(config).stopped_by
    return leave_together(stopped_by.exit_code) if stopped_by is not None else 0
