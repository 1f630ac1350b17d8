"""Verbs that measure: ``evaluate``, ``compare``, ``report`` and ``check``."""

from __future__ import annotations

import argparse
import io
import sys
from contextlib import redirect_stdout
from pathlib import Path

from nemo_aligner.cli.parser import (
    Parser,
    positive,
    read_settings,
    settings_parser,
    start_ranks,
    starts_ranks,
)
from nemo_aligner.config.evaluation import EvaluateConfig
from nemo_aligner.evaluation.report import check_report
from nemo_aligner.utils.processes import is_first_rank

_EVALUATE = """\
Measure a reward model on held-out pairs or ratings.

nemo-aligner evaluate rm_model_file=megatron_gpt.nemo data.path=heldout.jsonl
nemo-aligner evaluate hf_model=FOLDER_OR_NAME data.path=heldout.jsonl
nemo-aligner evaluate server=http://127.0.0.1:5555 data.path=heldout.jsonl
"""


def evaluate_parser() -> Parser:
    """The options of ``nemo-aligner evaluate``."""
    return settings_parser("evaluate", _EVALUATE, EvaluateConfig)


def run_evaluate(options: argparse.Namespace) -> int:
    """Print the metrics, and write the files that the settings ask for."""
    config = read_settings(EvaluateConfig, options, ["data.path"])
    # It refuses none or several of them, before ranks start.
    config.source_key()
    if config.report is not None:
        check_report("report")
    if starts_ranks(options):
        return start_ranks("evaluate", options)
    from nemo_aligner.evaluation.run import evaluate

    evaluate(config)
    return 0


_COMPARE = """\
Compare two reward models on the same pairs: accuracy, how sure the difference is, and flips.

  nemo-aligner evaluate rm_model_file=a.nemo data.path=pairs.jsonl \\
      output_rewards=a.jsonl
  nemo-aligner evaluate rm_model_file=b.nemo data.path=pairs.jsonl \\
      output_rewards=b.jsonl
  nemo-aligner compare a.jsonl b.jsonl --flips flips.jsonl

All intervals are 95%: Wilson's for accuracies, bootstrap for their difference. p is from McNemar's
exact test. "A only" counts pairs that only A gets right.
"""


def compare_parser() -> Parser:
    """The options of ``nemo-aligner compare``."""
    parser = Parser("compare", _COMPARE)
    parser.add_argument("first", type=Path, metavar="A", help="rewards of the first model")
    parser.add_argument("second", type=Path, metavar="B", help="rewards of the second model")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the table as JSON")
    parser.add_argument("--flips", type=Path, metavar="FILE", help="pairs that flipped, as JSONL")
    parser.add_argument(
        "--show", type=int, default=3, metavar="N", help="flips to print (default: 3)"
    )
    return parser


def run_compare(options: argparse.Namespace) -> int:
    """Print the table, and write the files that were asked for."""
    from nemo_aligner.evaluation.compare import (
        compare_files,
        render_compared,
        write_flips,
        write_rows,
    )

    compared = compare_files(options.first, options.second)
    print(render_compared(compared, [str(options.first), str(options.second)], options.show))
    if options.output is not None:
        write_rows(options.output, compared)
    if options.flips is not None:
        write_flips(options.flips, compared)
    return 0


_REPORT = """\
Training runs and evaluations as one HTML file: curves, calibration, mistakes in full text.

  nemo-aligner report results/first --output report.html
  nemo-aligner report results/first results/second --output both.html
  nemo-aligner report evaluation.jsonl

A RUN is the folder of a training run, even one that is still running or was killed, or a file that
evaluate wrote (output or output_rewards); a .json and a .jsonl of the same name belong together.
Several runs are overlaid. The page has no script and needs no network.
"""


def report_parser() -> Parser:
    """The options of ``nemo-aligner report``."""
    parser = Parser("report", _REPORT)
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, or evaluate's output"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("report.html"), metavar="FILE",
        help="the page to write (default: %(default)s)",
    )  # fmt: skip
    return parser


def run_report(options: argparse.Namespace) -> int:
    """Write the page, and print its path."""
    check_report("report")
    from nemo_aligner.evaluation.report.page import write_page

    print(f"report: {write_page(options.runs, options.output)}")
    return 0


_CHECK = """\
Is a reward the same at every layout and in every batch? A table for your own checkpoint.

  nemo-aligner check --checkpoint megatron_gpt.nemo --data pairs.jsonl

The texts of some pairs (of the demo set without --data) are scored at one process and at every
layout of 2, 4, ... processes that the model fits: each alone, all together, in other orders, in
small packs, and in a training forward pass with and without recomputed activations; then over HTTP.
Every reward is compared with that of its text alone at one process in fp32.

Under torchrun or srun it checks only the layouts of that many processes, with the first of them as
the reference, and leaves out the server. The exit code is 1 if a difference exceeds the bar.
"""


def check_parser() -> Parser:
    """The options of ``nemo-aligner check``."""
    parser = Parser("check", _CHECK)
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
    parser.add_argument(
        "--no-server", dest="server", action="store_false", help="skip the check over HTTP"
    )
    parser.add_argument("--output", type=Path, metavar="JSON", help="the table for programs")
    return parser


def run_check(options: argparse.Namespace) -> int:
    """Return 0 if the bar holds, else 1; rank 0 prints."""
    from nemo_aligner.tools.check import Check, run_check

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
    # Lines of other ranks would stand between those of the first.
    with redirect_stdout(sys.stdout if is_first else io.StringIO()):
        return 0 if run_check(check, options.output if is_first else None) else 1
