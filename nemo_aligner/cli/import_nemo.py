"""Write a checkpoint of NeMo, NeMo-Aligner or Megatron as a .nemo archive of this package.

nemo-aligner import --input CHECKPOINT --output base.nemo --tokenizer FOLDER
nemo-aligner import --input rm.nemo --output ours.nemo --template tokenizer
"""

from __future__ import annotations

import argparse
from pathlib import Path

from nemo_aligner.cli.parser import Parser, names


def new_parser() -> Parser:
    """The options of ``nemo-aligner import``."""
    parser = Parser("import", __doc__)
    parser.add_argument(
        "--input", required=True, type=Path, metavar="CHECKPOINT",
        help=".nemo file, or folder of NeMo 2, Megatron-LM or Megatron-Bridge",
    )  # fmt: skip
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help=".nemo to write")
    parser.add_argument(
        "--tokenizer", metavar="FOLDER", help="with a tokenizer.json, or a name on the hub; "
        "default: its own",
    )  # fmt: skip
    parser.add_argument(
        "--config", type=Path, metavar="YAML", help="model_config.yaml; default: its own"
    )
    rules = parser.add_argument_group("of a reward model")
    rules.add_argument(
        "--template", help="'tokenizer', a built-in name, a file, or 'none' for raw texts"
    )
    rules.add_argument(
        "--attributes", type=names, default=(), metavar="A,B", help="names of several outputs"
    )
    rules.add_argument(
        "--keep-scaling", action="store_true",
        help="apply rope and embedding scaling that NeMo-Aligner's reward models left out",
    )  # fmt: skip
    return parser


def run(options: argparse.Namespace) -> int:
    """Write the archive, and say what is in it."""
    from nemo_aligner.checkpoint.importing import ImportOptions, import_checkpoint

    how = ImportOptions(
        tokenizer=options.tokenizer,
        config=options.config,
        template=options.template,
        attributes=options.attributes,
        keep_scaling=options.keep_scaling,
    )
    print(import_checkpoint(options.input, options.output, how))
    return 0
