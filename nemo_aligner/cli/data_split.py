"""Split a file of preference data by prompt: train.jsonl and heldout.jsonl.

  nemo-aligner data split pairs.jsonl --output data --heldout 0.1

Every format that training takes is read, and lines stay as they are. All records of a prompt land
on the same side; records that training would drop are left out and counted.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from nemo_aligner.cli.data_flags import add_format
from nemo_aligner.cli.parser import Parser, fraction
from nemo_aligner.config.common import Malformed, RecordKind
from nemo_aligner.config.data import DataConfig


def new_parser() -> Parser:
    """The options of ``nemo-aligner data split``."""
    parser = Parser("data split", __doc__)
    parser.add_argument("input", type=Path, metavar="FILE", help="what to split")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="to make")
    parser.add_argument(
        "--heldout", type=fraction, default=0.2, metavar="FRACTION",
        help="of the records that is held out (default: 0.2)",
    )  # fmt: skip
    parser.add_argument(
        "--by", choices=["prompt", "first_prompt"], default="prompt",
        help="keep records together that share the whole prompt, or the first user turn "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--similar", type=fraction, metavar="FRACTION",
        help="keep near duplicates together, too: prompts whose sets of three consecutive words "
        "have this Jaccard similarity or more (needs the extra `dedup`; default: only prompts "
        "that are the same but for case and white space)",
    )  # fmt: skip
    parser.add_argument(
        "--kind", choices=[kind.value for kind in RecordKind], help="default: seen from the file"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="default: 1")
    parser.add_argument(
        "--malformed", choices=[rule.value for rule in Malformed],
        default=DataConfig.malformed.value, help="as model.data.malformed (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--max-malformed", type=float, default=DataConfig.max_malformed, metavar="FRACTION",
        help="as model.data.max_malformed (default: %(default)s)",
    )  # fmt: skip
    add_format(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Write the two files, and say what is in them."""
    from nemo_aligner.data.formats.base import PairKeys
    from nemo_aligner.data.split import Split, split_file

    how = Split(
        heldout=options.heldout,
        seed=options.seed,
        by=options.by,
        similar=options.similar,
        kind=None if options.kind is None else RecordKind(options.kind),
        format=options.format,
        pair_keys=PairKeys.of(options.prompt_key, options.chosen_key, options.rejected_key),
        attributes=options.attributes,
        loss_mask_val=options.loss_mask_val,
        malformed=Malformed(options.malformed),
        max_malformed=options.max_malformed,
    )
    print(split_file(options.input, options.output, how))
    return 0
