"""Serve a reward model over HTTP until SIGTERM."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from nemo_aligner.cli.common import run_verb
from nemo_aligner.config.load import load_config
from nemo_aligner.config.serving import ServeConfig


def main(argv: Sequence[str]) -> int:
    """``[--config FILE] [section.key=value ...]``, see ``ServeConfig``."""
    config = load_config(ServeConfig, argv)
    from nemo_aligner.serving.run import run_server

    return run_server(config)


# What checks a checkpoint starts its server so.
if __name__ == "__main__":
    sys.exit(run_verb(main))
