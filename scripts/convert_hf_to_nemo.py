"""Convert a Hugging Face model or a .gguf file into a .nemo archive; it says what it found.

python scripts/convert_hf_to_nemo.py --input CHECKPOINT --output base.nemo [--dtype fp32|bf16] \\
    [--tensor-parallel 2] [--template chatml] [--seq-length 2048]

A *ForSequenceClassification becomes a reward model, anything else a base model to train one from.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from nemo_aligner.errors import AlignerError


def main() -> int:
    arguments = _parse()
    # Imported here: --help needs no torch.
    from nemo_aligner.checkpoint.hf.contract import ContractOptions
    from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo
    from nemo_aligner.config.common import Precision
    from nemo_aligner.precision import torch_dtype

    dtype = None if arguments.dtype is None else torch_dtype(Precision(arguments.dtype))
    given = arguments.template, arguments.seq_length, arguments.attributes
    options = ContractOptions(*given) if any(value is not None for value in given) else None
    try:
        summary = convert_hf_to_nemo(
            arguments.input, arguments.output, dtype, arguments.tensor_parallel, options
        )
    except AlignerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(summary)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
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
        type=_names,
        metavar="A,B",
        help="names of a reward model's outputs; default: id2label",
    )
    return parser.parse_args()


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted names with commas between them")
    return names


if __name__ == "__main__":
    sys.exit(main())
