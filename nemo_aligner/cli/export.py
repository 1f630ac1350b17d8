"""Export a reward model's .nemo as a Hugging Face folder, and check that it scores the same.

python scripts/convert_nemo_to_hf.py --input reward.nemo --output FOLDER [--dtype fp32|bf16] \\
    [--merge] [--max-shard-size 5GB] [--base-license apache-2.0]
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from nemo_aligner.cli.common import errors_name_flags

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def main(argv: Sequence[str]) -> int:
    """Write the folder, and say how it was checked."""
    options = _parse(argv)
    from nemo_aligner.checkpoint.hf.export import ExportOptions, export_to_hf
    from nemo_aligner.config.common import Precision
    from nemo_aligner.parallel.launch import single_process
    from nemo_aligner.parallel.layout import initialize_layout
    from nemo_aligner.precision import torch_dtype

    how = ExportOptions(
        dtype=None if options.dtype is None else torch_dtype(Precision(options.dtype)),
        merge=options.merge,
        max_shard_bytes=options.max_shard_size,
        base_license=options.base_license,
    )
    with errors_name_flags(options), single_process():
        print(export_to_hf(options.input, options.output, initialize_layout(), how))
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--input", required=True, type=Path, help="a reward model's .nemo")
    parser.add_argument("--output", required=True, type=Path, help="the folder to make")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), help="of the body; default: as stored")
    parser.add_argument(
        "--merge",
        action="store_true",
        help="one output: the attributes, by the weights of the scoring contract",
    )
    parser.add_argument(
        "--max-shard-size", type=_bytes, default="5GB", help="of a safetensors file (default: 5GB)"
    )
    parser.add_argument(
        "--base-license",
        default="unknown",
        metavar="NAME",
        help="the base model's licence, for the model card",
    )
    return parser.parse_args(argv)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]B)", text.upper())
    size = 0 if match is None else int(float(match[1]) * _UNITS[match[2]])
    if size == 0:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted for example 5GB or 500MB")
    return size
