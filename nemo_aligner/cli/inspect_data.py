"""Look at preference data as training will see it, without a model.

inspect_data.py FILE... [--tokenizer base.nemo] [--train FILE...]

One table per file: records, what is dropped and why, ties, duplicates, lengths, how often the
longer reply is the chosen one. ``--train`` names the training files, whose prompts none of the
others should have. ``--tokenizer`` is a .nemo file (a reward model's brings its scoring contract)
or a folder with tokenizer.json: with it lengths are tokens, and ``--show N`` prints the first N
records exactly as they are tokenized, special tokens in brackets or, on a terminal, in reverse.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_aligner.cli.common import errors_name_flags, names, new_parser
from nemo_aligner.config.common import Overlong
from nemo_aligner.config.data import DataConfig


def main(argv: Sequence[str]) -> int:
    """Tables, and the first records of every file."""
    options = _parse(argv)
    from nemo_aligner.checkpoint.nemo.text_rules import read_or_build_text_rules
    from nemo_aligner.data.inspect import Inspection, inspect_files

    rules = None
    if options.tokenizer is not None:
        data = DataConfig(
            seq_length=options.seq_length,
            overlong=Overlong(options.overlong),
            template=options.template,
        )
        rules = read_or_build_text_rules(options.tokenizer, data, options.attributes)
        print(f"scoring contract: {rules[1].hash}")
    how = Inspection(
        rules=rules,
        show=options.show,
        format=options.format,
        attributes=options.attributes,
        loss_mask_val=options.loss_mask_val,
        marks=("\033[7m", "\033[0m") if sys.stdout.isatty() else ("[", "]"),
    )
    with errors_name_flags(options):
        for part in inspect_files(options.files, options.train, how):
            print(part)
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("files", nargs="+", metavar="FILE")
    parser.add_argument("--train", nargs="+", default=[], metavar="FILE", help="training files")
    parser.add_argument("--tokenizer", type=Path, metavar="PATH", help="a .nemo file, or a folder")
    parser.add_argument("--show", type=int, default=2, metavar="N", help="records (default 2)")
    parser.add_argument("--format", default="auto", help="a name of nemo_aligner/data/formats")
    parser.add_argument("--attributes", type=names, default=(), help="of ratings: a,b,...")
    parser.add_argument("--loss-mask-val", type=float, default=-100.0, help="a missing label")
    parser.add_argument("--template", help="as model.data.template")
    parser.add_argument("--seq-length", type=int, default=1024, help="as model.data.seq_length")
    parser.add_argument(
        "--overlong", choices=["drop", "truncate_left", "error"], default="drop",
        help="as model.data.overlong",
    )  # fmt: skip
    return parser.parse_args(argv)
