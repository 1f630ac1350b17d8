"""Convert a Hugging Face checkpoint folder or a .gguf file into a base .nemo archive.

python scripts/convert_hf_to_nemo.py --input CHECKPOINT --output base.nemo [--dtype fp32|bf16] \\
    [--tensor-parallel 2]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

import nemo_aligner  # noqa: F401  (before megatron-core, which it fits to this machine)
from nemo_aligner.checkpoint.hf import convert_hf_to_nemo
from nemo_aligner.errors import AlignerError

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--input", required=True, type=Path, help="a folder with config.json, or a .gguf file"
    )
    parser.add_argument("--output", required=True, type=Path, help="the .nemo file to write")
    parser.add_argument(
        "--dtype", choices=_DTYPES, help="default: as stored, and fp32 for a quantised file"
    )
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="N",
        help="add query groups of zeros until N divides their number; outputs stay the same",
    )
    arguments = parser.parse_args()
    try:
        summary = convert_hf_to_nemo(
            arguments.input,
            arguments.output,
            _DTYPES.get(arguments.dtype),
            arguments.tensor_parallel,
        )
    except AlignerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(summary)
    return 0


if __name__ == "__main__":
    sys.exit(main())
