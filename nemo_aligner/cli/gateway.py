"""Answer OpenRLHF, vLLM, NeMo Gym and plain JSON over HTTP, in front of reward servers.

nemo-aligner gateway 'backends=[http://127.0.0.1:5555]' gateway.port=8000
"""

from __future__ import annotations

import argparse

from nemo_aligner.cli.parser import Parser
from nemo_aligner.cli.settings import read_settings, settings_parser
from nemo_aligner.config.gateway import GatewayRunConfig


def new_parser() -> Parser:
    """The options of ``nemo-aligner gateway``."""
    return settings_parser("gateway", __doc__, GatewayRunConfig, has_ranks=False)


def run(options: argparse.Namespace) -> int:
    """Answer until told to stop."""
    config = read_settings(GatewayRunConfig, options)
    from nemo_aligner.serving.gateway import run_gateway

    return run_gateway(config)
