"""Convert a Hugging Face model or a .gguf file into a .nemo archive; it says what it found.

python scripts/convert_hf_to_nemo.py --input CHECKPOINT --output base.nemo [--dtype fp32|bf16] \\
    [--tensor-parallel 2] [--template chatml] [--seq-length 2048]

A *ForSequenceClassification becomes a reward model, anything else a base model to train one from.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from nemo_aligner.cli.common import errors_name_flags, names


def main(argv: Sequence[str]) -> int:
    """Write the archive, and say what is in it."""
    options = _parse(argv)
    from nemo_aligner.checkpoint.hf.contract import ContractOptions
    from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo
    from nemo_aligner.config.common import Precision
    from nemo_aligner.precision import torch_dtype

    dtype = None if options.dtype is None else torch_dtype(Precision(options.dtype))
    given = options.template, options.seq_length, options.attributes
    contract = ContractOptions(*given) if any(value is not None for value in given) else None
    with errors_name_flags(options):
        print(
            convert_hf_to_nemo(
                options.input, options.output, dtype, options.tensor_parallel, contract
            )
        )
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "--input",
        required=True,
        help="a folder with config.json, a .gguf file, or a model's name on the hub (org/name)",
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
    parser.add_argument(
        "--template",
        help="a reward model's chat template, as model.data.template; default: the tokenizer's",
    )
    parser.add_argument(
        "--seq-length",
        type=int,
        metavar="N",
        help="the most tokens of a text that a reward model scores; default: what the model was "
        "made for, but at most 4096",
    )
    parser.add_argument(
        "--attributes",
        type=names,
        metavar="A,B",
        help="names of a reward model's outputs; default: id2label",
    )
    return parser.parse_args(argv)
