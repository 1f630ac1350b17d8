"""Show that training sees its labels, with your model and settings.

  nemo-aligner probe pretrained_checkpoint.restore_from_path=base.nemo

Takes the settings of training; without model.data.data_prefix.train, records of the demo set are
used. It learns a handful of records by heart, begins anew with their labels swapped (chosen and
rejected exchanged, ratings mirrored), and looks at the metric on the labels as they were: it must
go up with the one, and down with the other. A trainer that is blind to its labels fails, with exit
code 1. Nothing is written.
"""

from __future__ import annotations

import argparse

from nemo_aligner.cli.parser import Parser, positive
from nemo_aligner.cli.settings import read_settings, settings_parser, start_ranks, starts_ranks
from nemo_aligner.config.training import TrainConfig


def new_parser() -> Parser:
    """The options of ``nemo-aligner probe``."""
    parser = settings_parser("probe", __doc__, TrainConfig)
    parser.add_argument("--records", type=positive, default=8, metavar="N", help="default: 8")
    parser.add_argument("--steps", type=positive, default=20, metavar="N", help="default: 20")
    return parser


def run(options: argparse.Namespace) -> int:
    """0 where training follows its labels."""
    config = read_settings(TrainConfig, options, ["pretrained_checkpoint.restore_from_path"])
    if starts_ranks(options):
        return start_ranks("probe", options)
    from nemo_aligner.console import say
    from nemo_aligner.diagnostics.probe_run import render_probe, run_probe

    result = run_probe(config, options.records, options.steps)
    say(render_probe(result))
    return 0 if result.passed else 1
