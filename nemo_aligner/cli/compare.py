"""Compare two reward models on the same pairs: accuracy, how sure the difference is, and flips.

  nemo-aligner evaluate rm_model_file=a.nemo data.path=pairs.jsonl \\
      output_rewards=a.jsonl
  nemo-aligner evaluate rm_model_file=b.nemo data.path=pairs.jsonl \\
      output_rewards=b.jsonl
  nemo-aligner compare a.jsonl b.jsonl --flips flips.jsonl

Accuracies have Wilson intervals, their difference one by bootstrap, all of 95%; p is
McNemar's, exact. "A only" are pairs that A alone has right.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from nemo_aligner.cli.parser import Parser


def new_parser() -> Parser:
    """The options of ``nemo-aligner compare``."""
    parser = Parser("compare", __doc__)
    parser.add_argument("first", type=Path, metavar="A", help="rewards of one model")
    parser.add_argument("second", type=Path, metavar="B", help="rewards of the other")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the table as JSON")
    parser.add_argument("--flips", type=Path, metavar="FILE", help="pairs that flipped, as JSONL")
    parser.add_argument(
        "--show", type=int, default=3, metavar="N", help="flips to print (default: 3)"
    )
    return parser


def run(options: argparse.Namespace) -> int:
    """Print the table, and write what was asked for."""
    from nemo_aligner.evaluation.compare import (
        compare_files,
        render_compared,
        write_flips,
        write_rows,
    )

    compared = compare_files(options.first, options.second)
    print(render_compared(compared, [str(options.first), str(options.second)], options.show))
    if options.output is not None:
        write_rows(options.output, compared)
    if options.flips is not None:
        write_flips(options.flips, compared)
    return 0
