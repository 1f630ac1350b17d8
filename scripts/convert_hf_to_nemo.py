"""Convert a Hugging Face checkpoint folder or a .gguf file into a base .nemo archive.

python scripts/convert_hf_to_nemo.py --input CHECKPOINT --output base.nemo [--dtype fp32|bf16] \\
    [--tensor-parallel 2]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from nemo_aligner.errors import AlignerError


def main() -> int:
    arguments = _parse()
    # Imported here: --help needs no torch.
    from nemo_aligner.checkpoint.hf import convert_hf_to_nemo
    from nemo_aligner.config.schema import Precision
    from nemo_aligner.models.backbone import DTYPES

    dtype = None if arguments.dtype is None else DTYPES[Precision(arguments.dtype)]
    try:
        summary = convert_hf_to_nemo(
            arguments.input, arguments.output, dtype, arguments.tensor_parallel
        )
    except AlignerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(summary)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--input", required=True, type=Path, help="a folder with config.json, or a .gguf file"
    )
    parser.add_argument("--output", required=True, type=Path, help="the .nemo file to write")
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16"),
        help="default: as stored, and fp32 for a quantised file",
    )
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="N",
        help="add query groups of zeros until N divides their number; outputs stay the same",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
