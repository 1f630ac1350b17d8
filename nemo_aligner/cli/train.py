"""Subcommands (verbs) for planning and training: ``plan``, ``train`` and ``probe``."""

from __future__ import annotations

import argparse
import os
from dataclasses import fields
from pathlib import Path

from nemo_aligner.api.training import NEEDED, run_training
from nemo_aligner.cli.parser import (
    Parser,
    positive,
    read_settings,
    settings_parser,
    start_ranks,
    starts_ranks,
)
from nemo_aligner.config.training import TrainConfig
from nemo_aligner.evaluation.report import check_report
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.planning.planner import PlanRequest
from nemo_aligner.planning.presets import PRESETS, preset
from nemo_aligner.planning.render import render_best, render_heading, render_layouts
from nemo_aligner.utils.processes import find_process, leave_together

_TRAIN = """\
Train a reward model: from a base checkpoint and preference data to megatron_gpt.nemo.

  nemo-aligner train pretrained_checkpoint.restore_from_path=base.nemo \\
      model.data.data_prefix.train=pairs.jsonl \\
      exp_manager.explicit_log_dir=results/first

The same command resumes a run that was stopped. On Ctrl-C, SIGTERM and SIGHUP (a closed terminal)
the run saves and stops. On SIGUSR1 it does the same with exit code 138, which tells a script to
start the run again.
"""


def train_parser() -> Parser:
    """Build the parser of ``nemo-aligner train``."""
    parser = settings_parser("train", _TRAIN, TrainConfig)
    parser.add_argument(
        "--dry-run", action="store_true",
        help="check settings, data, memory and layout without training",
    )  # fmt: skip
    return parser


def run_train(options: argparse.Namespace) -> int:
    """Train on all ranks, or with ``--dry-run`` print what training would do."""
    config = read_settings(TrainConfig, options, NEEDED)
    if options.dry_run:
        from nemo_aligner.training.dry_run import check_run
        from nemo_aligner.utils.console import say

        say(check_run(config, options.processes or find_process(os.environ).world_size))
        return 0
    # The check comes before ranks start, because every rank would report the error.
    if config.exp_manager.report:
        check_report("exp_manager.report")
    if starts_ranks(options):
        return start_ranks("train", options)
    stopped_by = run_training(config).stopped_by
    return leave_together(stopped_by.exit_code) if stopped_by is not None else 0


_PROBE = """\
Check that training follows its labels, with your model and settings.

  nemo-aligner probe pretrained_checkpoint.restore_from_path=base.nemo

It takes the settings of training; without model.data.data_prefix.train it uses records of the demo
set. It overfits a few records twice: with their labels, and with these swapped (chosen and rejected
exchanged, ratings mirrored). The metric on the original labels must rise the first time and fall
the second time, else the exit code is 1. No files are written.
"""


def probe_parser() -> Parser:
    """Build the parser of ``nemo-aligner probe``."""
    parser = settings_parser("probe", _PROBE, TrainConfig)
    parser.add_argument(
        "--records", type=positive, default=8, metavar="N", help="records to overfit (default: 8)"
    )
    parser.add_argument(
        "--steps", type=positive, default=20, metavar="N", help="steps of each run (default: 20)"
    )
    return parser


def run_probe(options: argparse.Namespace) -> int:
    """Overfit a few records, print the metrics, and return 1 if training ignores the labels."""
    config = read_settings(TrainConfig, options, ["pretrained_checkpoint.restore_from_path"])
    if starts_ranks(options):
        return start_ranks("probe", options)
    from nemo_aligner.tools.overfit_test import render_probe, run_probe
    from nemo_aligner.utils.console import say

    result = run_probe(config, options.records, options.steps)
    say(render_probe(result))
    return 0 if result.passed else 1


_PLAN = """\
List the parallel layouts that fit on a number of GPUs, with memory per GPU and estimated speed.

  nemo-aligner plan --params 8B --gpus 8
  nemo-aligner plan --config base.nemo --gpus 64 --gpu-memory 141

Nothing is measured: the plan counts what a step computes, sends and stores. The memory was compared
with real steps (docs/planning.md); the speed depends on the assumptions --tflops, --mfu,
--intra-node and --inter-node. A step has --global-batch-size pairs of two sequences of --seq-length
tokens without a shared prefix, the most that the settings allow. If memory is short, as few layers
of each pipeline stage as necessary are recomputed. For several numbers of GPUs the best layout of
each is shown.
"""


def plan_parser() -> Parser:
    """Build the parser of ``nemo-aligner plan``."""
    parser = Parser("plan", _PLAN)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument(
        "--config",
        type=Path,
        metavar="MODEL",
        help="a .nemo archive, Hugging Face folder, hub name, .gguf file or model_config.yaml",
    )
    model.add_argument(
        "--params", metavar="SIZE", help=f"a Llama of this size: {', '.join(PRESETS)}"
    )
    parser.add_argument(
        "--gpus", type=positive, nargs="+", required=True, metavar="N",
        help="number of GPUs, or several to compare",
    )  # fmt: skip
    parser.add_argument(
        "--gpu-memory", type=float, metavar="GIB", help="memory of a GPU (default: 80)"
    )
    parser.add_argument(
        "--reserve", type=float, metavar="GIB",
        help="memory for CUDA, NCCL and fragmentation (default: 4, assumed)",
    )  # fmt: skip
    _add_batch(parser.add_argument_group("the batch"))
    _add_speed(parser.add_argument_group("assumptions on speed"))
    parser.add_argument(
        "--top", type=positive, default=12, metavar="N", help="layouts to show (default: 12)"
    )
    parser.set_defaults(**vars(PlanRequest()))
    return parser


def run_plan(options: argparse.Namespace) -> int:
    """Print the layouts for one number of GPUs, or the best layout for each of several numbers."""
    arguments = vars(options)
    request = PlanRequest(**{item.name: arguments[item.name] for item in fields(PlanRequest)})
    if options.params:
        shape, name = preset(options.params)
    else:
        from nemo_aligner.checkpoint.hf.convert import read_config_and_limits

        config, limits = read_config_and_limits(options.config)
        shape, name = ModelShape.from_config(config), str(options.config)
        request = request if limits is None else request.continuing(*limits)
    planner = request.planner(shape)
    print(render_heading(name, planner, request), flush=True)
    if len(options.gpus) == 1:
        print(render_layouts(planner, options.gpus[0], options.top))
    else:
        print(render_best(planner, options.gpus))
    return 0


def _add_batch(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--seq-length", type=positive, metavar="N", help="as model.data.seq_length")
    size = group.add_mutually_exclusive_group()
    size.add_argument(
        "--global-batch-size", type=positive, metavar="N", help="as model.global_batch_size"
    )
    size.add_argument(
        "--global-batch-tokens", type=positive, metavar="N", help="instead: tokens per step"
    )
    group.add_argument(
        "--micro-batch-tokens", type=positive, metavar="N",
        help="as model.micro_batch_tokens (default: its default, but at least a pair)",
    )  # fmt: skip
    group.add_argument(
        "--precision", choices=["fp32", "bf16", "fp16"],
        help="as trainer.precision (default: that of a reward model, else bf16)",
    )  # fmt: skip
    group.add_argument("--freeze-layers", type=int, metavar="N", help="as model.freeze_layers")
    group.add_argument(
        "--lora-rank", type=int, metavar="N",
        help="as model.lora.rank (default: that of a model's adapters, else 0)",
    )  # fmt: skip
    group.add_argument(
        "--base-precision", choices=["nf4", "int8", "fp8"], help="as model.lora.base_precision"
    )
    group.add_argument("--cpu-offload", action="store_true", help="as model.optim.cpu_offload=true")
    group.add_argument(
        "--activations-offload", action="store_true",
        help="as model.activations_offload=true (default: only if nothing fits without it)",
    )  # fmt: skip
    group.add_argument(
        "--recompute", choices=["auto", "none", "selective", "full"],
        help="activations to recompute (default: auto, in as few layers as necessary)",
    )  # fmt: skip


def _add_speed(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tflops", type=float, metavar="N",
        help="peak of a GPU (default: an H100's, 989 in bf16 and fp16, 67 in fp32)",
    )  # fmt: skip
    group.add_argument(
        "--memory-bandwidth", type=float, metavar="GB/S",
        help="bandwidth of a GPU's memory (default: 3350, H100)",
    )  # fmt: skip
    group.add_argument(
        "--mfu", type=float, metavar="FRACTION",
        help="fraction of --tflops that is reached (default: as measured, by kind of work)",
    )  # fmt: skip
    group.add_argument(
        "--intra-node", type=float, metavar="GB/S",
        help="bandwidth between GPUs of a node (default: 450, NVLink 4)",
    )  # fmt: skip
    group.add_argument(
        "--inter-node", type=float, metavar="GB/S",
        help="bandwidth per GPU between nodes (default: 50, 400 Gb/s)",
    )  # fmt: skip
    group.add_argument(
        "--host", type=float, metavar="GB/S",
        help="bandwidth between a GPU and host memory (default: 50, PCIe 5)",
    )  # fmt: skip
    group.add_argument(
        "--gpus-per-node", type=positive, metavar="N", help="number of GPUs of a node (default: 8)"
    )
