"""Serve the critic of PPO over HTTP: values, training and saving, until SIGTERM or Ctrl-C.

nemo-aligner serve-critic pretrained_checkpoint.restore_from_path=rm.nemo
"""

from __future__ import annotations

import argparse

from nemo_aligner.cli.parser import Parser
from nemo_aligner.cli.settings import read_settings, settings_parser, start_ranks, starts_ranks
from nemo_aligner.config.critic import ServeCriticConfig

_VERB = "serve-critic"


def new_parser() -> Parser:
    """The options of ``nemo-aligner serve-critic``."""
    return settings_parser(_VERB, __doc__, ServeCriticConfig)


def run(options: argparse.Namespace) -> int:
    """Serve until told to stop."""
    needed = ["pretrained_checkpoint.restore_from_path"]
    config = read_settings(ServeCriticConfig, options, needed)
    if starts_ranks(options):
        return start_ranks(_VERB, options)
    from nemo_aligner.serving.run_critic import run_critic_server

    return run_critic_server(config)
