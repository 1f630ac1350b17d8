"""Write a data set of the Hugging Face hub to a file of JSON lines.

  nemo-aligner data fetch nvidia/HelpSteer2 --output helpsteer2.jsonl
  nemo-aligner data fetch Anthropic/hh-rlhf --split test --output heldout.jsonl

It needs the extra hub, and a network; training then needs neither.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from nemo_aligner.cli.parser import Parser


def new_parser() -> Parser:
    """The options of ``nemo-aligner data fetch``."""
    parser = Parser("data fetch", __doc__)
    parser.add_argument("name", metavar="NAME", help="owner/name, or a local folder of one")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="to write")
    parser.add_argument("--split", default="train", metavar="SPLIT", help="default: train")
    parser.add_argument("--subset", metavar="SUBSET", help="its configuration, if it has several")
    parser.add_argument("--revision", metavar="REVISION", help="default: the newest")
    return parser


def run(options: argparse.Namespace) -> int:
    """Fetch it, and say how many rows there are."""
    from nemo_aligner.data.hub import fetch

    count = fetch(options.name, options.output, options.split, options.subset, options.revision)
    print(f"{count} rows of {options.name}, {options.split} -> {options.output}")
    return 0
