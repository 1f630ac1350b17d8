"""Subcommands (verbs) for evaluation: ``evaluate``, ``compare``, ``report`` and ``check``."""

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
    whole,
)
from nemo_aligner.config.evaluation import EvaluateConfig
from nemo_aligner.evaluation.report import check_report
from nemo_aligner.utils.processes import is_first_rank
from nemo_aligner.utils.writing import check_outputs, check_replaces_nothing_in

_EVALUATE = """\
Measure a reward model on held-out pairs or ratings.

nemo-aligner evaluate rm_model_file=megatron_gpt.nemo data.path=heldout.jsonl
nemo-aligner evaluate hf_model=FOLDER_OR_NAME data.path=heldout.jsonl
nemo-aligner evaluate server=http://127.0.0.1:5555 data.path=heldout.jsonl
"""


def evaluate_parser() -> Parser:
    """Build the parser of ``nemo-aligner evaluate``."""
    return settings_parser("evaluate", _EVALUATE, EvaluateConfig)


def run_evaluate(options: argparse.Namespace) -> int:
    """Evaluate a model, print the metrics, and write the output files that the settings name."""
    config = read_settings(EvaluateConfig, options, ["data.path"])
    # This call, before ranks start, raises an error unless exactly one source of rewards is set.
    config.source_key()
    if config.report is not None:
        check_report("report")
    if starts_ranks(options):
        return start_ranks("evaluate", options)
    from nemo_aligner.evaluation.run import evaluate

    evaluate(config)
    return 0


_COMPARE = """\
Compare two reward models on the same pairs: accuracies, significance, and flipped pairs.

  nemo-aligner evaluate rm_model_file=a.nemo data.path=pairs.jsonl \\
      output_rewards=a.jsonl
  nemo-aligner evaluate rm_model_file=b.nemo data.path=pairs.jsonl \\
      output_rewards=b.jsonl
  nemo-aligner compare a.jsonl b.jsonl --flips flips.jsonl

All confidence intervals are 95%: Wilson's for accuracies, Bonett and Price's for their
difference. p is from McNemar's exact test. "A only" counts pairs that only A ranks correctly.
"""


def compare_parser() -> Parser:
    """Build the parser of ``nemo-aligner compare``."""
    parser = Parser("compare", _COMPARE)
    parser.add_argument("first", type=Path, metavar="A", help="rewards of the first model")
    parser.add_argument("second", type=Path, metavar="B", help="rewards of the second model")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="file to write: the table as JSON"
    )
    parser.add_argument(
        "--flips", type=Path, metavar="FILE", help="file to write: the flipped pairs as JSONL"
    )
    parser.add_argument(
        "--show", type=whole, default=3, metavar="N", help="flipped pairs to print (default: 3)"
    )
    return parser


def run_compare(options: argparse.Namespace) -> int:
    """Print the comparison of two models, and write the files that the options name."""
    from nemo_aligner.evaluation.compare import (
        compare_files,
        render_compared,
        write_flips,
        write_rows,
    )

    outputs = {"output": options.output, "flips": options.flips}
    check_outputs(
        {flag: path for flag, path in outputs.items() if path is not None},
        {"the first file to compare": options.first, "the second file to compare": options.second},
    )
    compared = compare_files(options.first, options.second)
    print(render_compared(compared, [str(options.first), str(options.second)], options.show))
    if options.output is not None:
        print(f"output: {write_rows(options.output, compared)}")
    if options.flips is not None:
        print(f"flips: {write_flips(options.flips, compared)}")
    return 0


_REPORT = """\
Write training runs and evaluations as one HTML page: curves, calibration, mistakes in full text.

  nemo-aligner report results/first --output report.html
  nemo-aligner report results/first results/second --output both.html
  nemo-aligner report evaluation.jsonl

A RUN is the folder of a training run, even one that is still running or was killed, or a file that
evaluate wrote (output or output_rewards); a .json and a .jsonl file of the same name belong
together. Several runs are drawn into the same figures. The page has no scripts and needs no
network.
"""


def report_parser() -> Parser:
    """Build the parser of ``nemo-aligner report``."""
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
    """Write the report of runs as an HTML page, and print its path."""
    check_report("report")
    for run in options.runs:
        _check_replaces_nothing_of(run, options.output)
    from nemo_aligner.evaluation.report.page import write_page

    print(f"report: {write_page(options.runs, options.output)}")
    return 0


def _check_replaces_nothing_of(run: Path, output: Path) -> None:
    """Raise ConfigError if ``output`` is a file of ``run``; in a run's folder it may be a page."""
    check_replaces_nothing_in(run, "output", output)
    files = [run] if run.is_dir() else [run.with_suffix(end) for end in (".json", ".jsonl")]
    for file in files:
        check_outputs({"output": output}, {"a file to draw": file})


_CHECK = """\
Check that your checkpoint gives the same reward at every parallel layout and in every batch.

  nemo-aligner check --checkpoint megatron_gpt.nemo --data pairs.jsonl

The replies of some pairs (without --data, of the demo set) are scored in one process and at every
layout of 2, 4, ... processes that fits the model: in batches of one, all together, in other orders,
in small packs, in a training forward pass with and without recomputed activations, and over HTTP.
Each reward is compared with that of a batch of one, in one process and fp32.

Under torchrun or srun only the layouts of that many processes are checked, with the first of them
as the reference, and the server is skipped. The exit code is 1 if a difference exceeds its limit.
"""


def check_parser() -> Parser:
    """Build the parser of ``nemo-aligner check``."""
    parser = Parser("check", _CHECK)
    parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="FILE",
        help="a reward model: a .nemo file, or a Hugging Face folder or name",
    )
    parser.add_argument("--data", metavar="FILE", help="pairs, in any format for training")
    parser.add_argument(
        "--pairs", type=positive, default=32, metavar="N", help="number of pairs (default: 32)"
    )
    parser.add_argument(
        "--processes", type=positive, metavar="N",
        help="largest number of processes (default: all GPUs, or 2)",
    )  # fmt: skip
    parser.add_argument(
        "--min-model-parallel", type=positive, default=1, metavar="N",
        help="under torchrun or srun: skip layouts that split the model less (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--precision", choices=["fp32", "bf16", "fp16"], help="default: that of the contract"
    )
    parser.add_argument(
        "--no-server", dest="server", action="store_false", help="skip the check over HTTP"
    )
    parser.add_argument(
        "--output", type=Path, metavar="JSON", help="file to write: the table as JSON"
    )
    return parser


def run_check(options: argparse.Namespace) -> int:
    """Compare rewards of all layouts; return 1 if a difference exceeds its limit, else 0."""
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
    # Only rank 0 prints: the lines of several ranks would mix.
    with redirect_stdout(sys.stdout if is_first else io.StringIO()):
        return 0 if run_check(check, options.output if is_first else None) else 1
