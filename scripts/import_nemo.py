"""Write a checkpoint of NeMo, NeMo-Aligner or Megatron as a .nemo archive of this package.

python scripts/import_nemo.py --input CHECKPOINT --output base.nemo [--tokenizer FOLDER]
python scripts/import_nemo.py --input reward.nemo --output ours.nemo --template tokenizer
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from nemo_aligner.errors import AlignerError


def main() -> int:
    arguments = _parse()
    # Imported here: --help needs no torch.
    from nemo_aligner.checkpoint.importing import ImportOptions, import_checkpoint

    options = ImportOptions(
        tokenizer=arguments.tokenizer,
        config=arguments.config,
        template=arguments.template,
        attributes=arguments.attributes,
        keep_scaling=arguments.keep_scaling,
    )
    try:
        print(import_checkpoint(arguments.input, arguments.output, options))
    except AlignerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
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
        type=lambda text: tuple(name.strip() for name in text.split(",")),
        default=(),
        metavar="A,B",
        help="names of a reward model's outputs, if it has several",
    )
    parser.add_argument(
        "--keep-scaling",
        action="store_true",
        help="apply rope and embedding scaling that NeMo-Aligner's reward models left out",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
