"""Look at preference data as training will see it, without a model.

  nemo-aligner data inspect pairs.jsonl --tokenizer base.nemo

One table per file: records, what is dropped and why, ties, duplicates, lengths, how often the
longer reply is the chosen one. --train names the training files, whose prompts none of the others
should have. With --tokenizer lengths are tokens, and --show N prints the first N records exactly
as they are tokenized, special tokens in brackets or, on a terminal, in reverse. The exit code is 1
where a file cannot be read, or has malformed records; the others are shown.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from nemo_aligner.cli.data_flags import add_format, data_file
from nemo_aligner.cli.parser import Parser, positive
from nemo_aligner.config.common import Overlong
from nemo_aligner.config.data import DataConfig


def new_parser() -> Parser:
    """The options of ``nemo-aligner data inspect``."""
    parser = Parser("data inspect", __doc__)
    parser.add_argument("files", nargs="+", type=data_file, metavar="FILE", help="what to look at")
    parser.add_argument(
        "--train", nargs="+", type=data_file, default=[], metavar="FILE", help="training files"
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="PATH",
        help="a .nemo file (a reward model's brings its scoring contract), or a folder with "
        "tokenizer.json",
    )  # fmt: skip
    parser.add_argument(
        "--show", type=int, default=2, metavar="N", help="records to print (default: 2)"
    )
    add_format(parser)
    parser.add_argument("--template", metavar="NAME", help="as model.data.template")
    parser.add_argument(
        "--seq-length", type=positive, default=DataConfig().seq_length, metavar="N",
        help="as model.data.seq_length (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--overlong", choices=[rule.value for rule in Overlong], default="drop",
        help="as model.data.overlong (default: drop)",
    )  # fmt: skip
    return parser


def run(options: argparse.Namespace) -> int:
    """Tables, and the first records of every file."""
    from nemo_aligner.checkpoint.nemo.text_rules import read_or_build_text_rules
    from nemo_aligner.data.formats.base import PairKeys
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
        pair_keys=PairKeys.of(options.prompt_key, options.chosen_key, options.rejected_key),
        attributes=options.attributes,
        loss_mask_val=options.loss_mask_val,
        marks=("\033[7m", "\033[0m") if sys.stdout.isatty() else ("[", "]"),
    )
    all_good = True
    for part in inspect_files(options.files, options.train, how):
        print(part.text)
        all_good &= part.is_good
    return 0 if all_good else 1
