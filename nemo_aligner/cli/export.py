"""Export a reward model's .nemo as a Hugging Face folder, and check that it scores the same.

nemo-aligner export --input megatron_gpt.nemo --output hf_folder
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from nemo_aligner.api.reward_model import export_archive
from nemo_aligner.cli.parser import Parser

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def new_parser() -> Parser:
    """The options of ``nemo-aligner export``."""
    parser = Parser("export", __doc__)
    parser.add_argument(
        "--input", required=True, type=Path, metavar="FILE", help="a reward model's .nemo"
    )
    parser.add_argument(
        "--output", required=True, type=Path, metavar="FOLDER", help="the folder to make"
    )
    parser.add_argument("--dtype", choices=("fp32", "bf16"), help="of the body; default: as stored")
    parser.add_argument(
        "--merge", action="store_true",
        help="one output: the attributes, by the weights of the scoring contract",
    )  # fmt: skip
    parser.add_argument(
        "--adapter-of", metavar="MODEL",
        help="write LoRA by itself, and not folded into the weights: for peft, which loads it onto "
        "this base model, a folder (then it is checked) or a name",
    )  # fmt: skip
    parser.add_argument(
        "--max-shard-size", type=_bytes, default="5GB", metavar="SIZE",
        help="of a safetensors file (default: 5GB)",
    )  # fmt: skip
    parser.add_argument(
        "--base-license", default="unknown", metavar="NAME",
        help="the base model's licence, for the model card",
    )  # fmt: skip
    return parser


def run(options: argparse.Namespace) -> int:
    """Write the folder, and say how it was checked."""
    print(
        export_archive(
            options.input,
            options.output,
            dtype=options.dtype,
            merge=options.merge,
            adapter_of=options.adapter_of,
            max_shard_bytes=options.max_shard_size,
            base_license=options.base_license,
        )
    )
    return 0


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]B)", text.upper())
    size = 0 if match is None else int(float(match[1]) * _UNITS[match[2]])
    if size == 0:
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted for example 5GB or 500MB")
    return size
