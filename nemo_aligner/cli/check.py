"""Is a reward the same at every layout and in every batch? A table for your own checkpoint.

  nemo-aligner check --checkpoint megatron_gpt.nemo --data pairs.jsonl

The texts of some pairs (of the demo set without --data) are scored at one process and at every
layout of 2, 4, ... processes that the model fits: each alone, all together, in other orders, in
small packs, and in a training forward pass with and without recomputed activations; then over HTTP.
Every reward is compared with that of its text alone at one process in fp32.

Started by torchrun or srun, it takes the layouts of that many processes only, with the first of
them as the reference, and leaves out the server. The exit code is 1 where the bar is missed.
"""

from __future__ import annotations

import argparse
import io
import sys
from contextlib import redirect_stdout
from pathlib import Path

from nemo_aligner.cli.parser import Parser, positive
from nemo_aligner.processes import is_first_rank


def new_parser() -> Parser:
    """The options of ``nemo-aligner check``."""
    parser = Parser("check", __doc__)
    parser.add_argument(
        "--checkpoint", required=True, metavar="FILE", help="a reward model's .nemo"
    )
    parser.add_argument("--data", metavar="FILE", help="pairs, in any format that training takes")
    parser.add_argument(
        "--pairs", type=positive, default=32, metavar="N", help="how many (default: 32)"
    )
    parser.add_argument(
        "--processes", type=positive, metavar="N", help="at most (default: all GPUs, or 2)"
    )
    parser.add_argument(
        "--min-model-parallel", type=positive, default=1, metavar="N",
        help="under torchrun or srun: no layout that splits the model less (default: 1)",
    )  # fmt: skip
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], help="default: its own")
    parser.add_argument("--no-server", dest="server", action="store_false", help="leave HTTP out")
    parser.add_argument("--output", type=Path, metavar="JSON", help="the table for programs")
    return parser


def run(options: argparse.Namespace) -> int:
    """0 where the bar holds; rank 0 prints."""
    from nemo_aligner.diagnostics.check import Check, run_check

    check = Check(
        checkpoint=options.checkpoint,
        data=options.data,
        pairs=options.pairs,
        processes=options.processes,
        min_model_parallel=options.min_model_parallel,
        precision=options.precision,
        serve=options.server,
    )
    is_first = is_first_rank()
    with redirect_stdout(sys.stdout if is_first else io.StringIO()):
        return 0 if run_check(check, options.output if is_first else None) else 1
