"""Answer texts with a reward model's rewards over HTTP, until SIGTERM or Ctrl-C.

nemo-aligner serve rm_model_file=megatron_gpt.nemo server.port=5555
"""

from __future__ import annotations

import argparse

from nemo_aligner.cli.parser import Parser
from nemo_aligner.cli.settings import read_settings, settings_parser, start_ranks, starts_ranks
from nemo_aligner.config.serving import ServeConfig


def new_parser() -> Parser:
    """The options of ``nemo-aligner serve``."""
    return settings_parser("serve", __doc__, ServeConfig)


def run(options: argparse.Namespace) -> int:
    """Serve until told to stop."""
    config = read_settings(ServeConfig, options, ["rm_model_file"])
    if starts_ranks(options):
        return start_ranks("serve", options)
    from nemo_aligner.serving.run import run_server

    return run_server(config)
