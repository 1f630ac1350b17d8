"""Write a checkpoint of NeMo, NeMo-Aligner or Megatron as a .nemo archive of this package.

python scripts/import_nemo.py --input CHECKPOINT --output base.nemo [--tokenizer FOLDER]
python scripts/import_nemo.py --input reward.nemo --output ours.nemo --template tokenizer
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from nemo_aligner.cli.common import errors_name_flags, names


def main(argv: Sequence[str]) -> int:
    """Write the archive, and say what is in it."""
    options = _parse(argv)
    from nemo_aligner.checkpoint.importing import ImportOptions, import_checkpoint

    how = ImportOptions(
        tokenizer=options.tokenizer,
        config=options.config,
        template=options.template,
        attributes=options.attributes,
        keep_scaling=options.keep_scaling,
    )
    with errors_name_flags(options):
        print(import_checkpoint(options.input, options.output, how))
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "--input",
        required=True,
        type=Path,
        help=".nemo file, or folder of NeMo 2, Megatron-LM or Megatron-Bridge",
    )
    parser.add_argument("--output", required=True, type=Path, help="the .nemo file to write")
    parser.add_argument(
        "--tokenizer",
        metavar="FOLDER_OR_HUB_NAME",
        help="with a tokenizer.json; default: its own",
    )
    parser.add_argument(
        "--config", type=Path, metavar="YAML", help="model_config.yaml; default: its own"
    )
    parser.add_argument(
        "--template",
        help="of a reward model: 'tokenizer', a built-in name, a file, or 'none' for raw texts",
    )
    parser.add_argument(
        "--attributes",
        type=names,
        default=(),
        metavar="A,B",
        help="names of a reward model's outputs, if it has several",
    )
    parser.add_argument(
        "--keep-scaling",
        action="store_true",
        help="apply rope and embedding scaling that NeMo-Aligner's reward models left out",
    )
    return parser.parse_args(argv)
