"""Make training files: a demo set of preference pairs, or a split by prompt of a file you have.

prepare_data.py demo --output DIR
prepare_data.py split FILE --output DIR --heldout 0.2

Both write ``train.jsonl`` and ``heldout.jsonl``. ``split`` takes every format that training takes
and keeps the lines as they are; all records of a prompt land on the same side, and records that
training would drop (see nemo_aligner/data/reading.py) are left out and counted.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from nemo_aligner.cli.common import errors_name_flags, fraction, names, new_parser
from nemo_aligner.config.common import RecordKind


def main(argv: Sequence[str]) -> int:
    """``demo`` or ``split``, with its options."""
    options = _parse(argv)
    with errors_name_flags(options):
        print(options.run(options))
    return 0


def _demo(options: argparse.Namespace) -> str:
    from nemo_aligner.data.demo import write_demo

    return write_demo(options.output, options.pairs, options.heldout, options.seed)


def _split(options: argparse.Namespace) -> str:
    from nemo_aligner.data.split import Split, split_file

    how = Split(
        heldout=options.heldout,
        seed=options.seed,
        by=options.by,
        kind=None if options.kind is None else RecordKind(options.kind),
        format=options.format,
        attributes=options.attributes,
        loss_mask_val=options.loss_mask_val,
    )
    return split_file(options.input, options.output, how)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = new_parser(__doc__)
    commands = parser.add_subparsers(required=True)
    demo = commands.add_parser("demo", help="make the demo set")
    demo.set_defaults(run=_demo)
    demo.add_argument("--pairs", type=int, default=2400)
    demo.add_argument("--heldout", type=fraction, default=0.1, help="their share (default 0.1)")
    split = commands.add_parser("split", help="split a file by prompt")
    split.set_defaults(run=_split)
    split.add_argument("input", type=Path)
    split.add_argument("--heldout", type=fraction, default=0.2, help="their share (default 0.2)")
    split.add_argument("--by", choices=["first_prompt", "prompt"], default="first_prompt")
    split.add_argument(
        "--kind", choices=[kind.value for kind in RecordKind], help="default: seen from the file"
    )
    split.add_argument("--format", default="auto", help="a name of nemo_aligner/data/formats")
    split.add_argument(
        "--attributes", type=names, default=(), help="of ratings: names, separated by commas"
    )
    split.add_argument("--loss-mask-val", type=float, default=-100.0, help="a missing label")
    for command in (demo, split):
        command.add_argument("--output", type=Path, required=True, help="a folder")
        command.add_argument("--seed", type=int, default=1)
    return parser.parse_args(argv)
