"""Convert a Hugging Face model or a .gguf file into a .nemo archive.

  nemo-aligner convert --input path/to/hf_folder --output base.nemo

A *ForSequenceClassification becomes a reward model, anything else a base model to train one from.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from nemo_aligner.cli.parser import Parser, names, positive


def new_parser() -> Parser:
    """The options of ``nemo-aligner convert``."""
    parser = Parser("convert", __doc__)
    parser.add_argument(
        "--input", required=True, metavar="CHECKPOINT",
        help="a folder with config.json, a .gguf file, or a model's name on the hub (org/name)",
    )  # fmt: skip
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help=".nemo to write")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16"), help="default: as stored, fp32 for a quantised file"
    )
    parser.add_argument(
        "--tensor-parallel", type=positive, default=1, metavar="N",
        help="add query groups of zeros until N divides their number; outputs stay the same",
    )  # fmt: skip
    rules = parser.add_argument_group("of a reward model")
    rules.add_argument(
        "--template", help="its chat template, as model.data.template; default: the tokenizer's"
    )
    rules.add_argument(
        "--seq-length", type=positive, metavar="N",
        help="the most tokens of a text; default: what it was made for, but at most 4096",
    )  # fmt: skip
    rules.add_argument(
        "--attributes", type=names, metavar="A,B", help="names of its outputs; default: id2label"
    )
    return parser


def run(options: argparse.Namespace) -> int:
    """Write the archive, and say what is in it."""
    from nemo_aligner.checkpoint.hf.contract import ContractOptions
    from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo
    from nemo_aligner.config.common import Precision
    from nemo_aligner.precision import torch_dtype

    dtype = None if options.dtype is None else torch_dtype(Precision(options.dtype))
    given = options.template, options.seq_length, options.attributes
    contract = ContractOptions(*given) if any(value is not None for value in given) else None
    print(
        convert_hf_to_nemo(options.input, options.output, dtype, options.tensor_parallel, contract)
    )
    return 0
