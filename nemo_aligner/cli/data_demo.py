"""Make a demo set of preference pairs that anyone can judge: train.jsonl and heldout.jsonl."""

from __future__ import annotations

import argparse
from pathlib import Path

from nemo_aligner.cli.parser import Parser, fraction, positive


def new_parser() -> Parser:
    """The options of ``nemo-aligner data demo``."""
    parser = Parser("data demo", __doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="to make")
    parser.add_argument("--pairs", type=positive, default=2400, metavar="N", help="default: 2400")
    parser.add_argument(
        "--heldout", type=fraction, default=0.1, metavar="FRACTION", help="default: 0.1"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="default: 1")
    return parser


def run(options: argparse.Namespace) -> int:
    """Write the two files, and say what is in them."""
    from nemo_aligner.data.demo import write_demo

    print(write_demo(options.output, options.pairs, options.heldout, options.seed))
    return 0
