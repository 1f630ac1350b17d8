"""Verb ``plan``: parallel layouts that fit, with memory per GPU and estimated speed."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from nemo_aligner.cli.parser import Parser, positive
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.tools.planner import (
    PRESETS,
    PlanRequest,
    preset,
    render_best,
    render_heading,
    render_layouts,
)

_PLAN = """\
List the parallel layouts that fit on so many GPUs, with memory per GPU and estimated speed.

  nemo-aligner plan --params 8B --gpus 8
  nemo-aligner plan --config base.nemo --gpus 64 --gpu-memory 141

Nothing is measured: the plan counts what a step computes, sends and holds. The memory was compared
with real steps (docs/performance.md); the speed depends on the assumptions --tflops, --mfu,
--intra-node and --inter-node. A step has --global-batch-size pairs of two sequences of --seq-length
tokens without a common prefix, the most that the settings allow. If memory is short, as few layers
of each pipeline stage as necessary are recomputed. For several numbers of GPUs the best layout of
each is shown.
"""


def plan_parser() -> Parser:
    """The options of ``nemo-aligner plan``."""
    parser = Parser("plan", _PLAN)
    add_flags(parser)
    return parser


def run_plan(options: argparse.Namespace) -> int:
    """The layouts on one number of GPUs, or the best on each of several."""
    given = vars(options)
    shape, name = preset(options.params) if options.params else _read_shape(options.config)
    request = PlanRequest(**{each.name: given[each.name] for each in fields(PlanRequest)})
    planner = request.planner(shape)
    print(render_heading(name, planner, request), flush=True)
    if len(options.gpus) == 1:
        print(render_layouts(planner, options.gpus[0], options.top))
    else:
        print(render_best(planner, options.gpus))
    return 0


def _read_shape(path: Path) -> tuple[ModelShape, str]:
    from nemo_aligner.checkpoint.nemo.open import read_model_config

    return ModelShape.from_config(read_model_config(path)), str(path)


def add_flags(parser: Parser) -> None:
    """Add the options of ``nemo-aligner plan``."""
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument(
        "--config", type=Path, metavar="FILE", help="a model_config.yaml or a .nemo archive"
    )
    model.add_argument(
        "--params", metavar="SIZE", help=f"a Llama of this size: {', '.join(PRESETS)}"
    )
    parser.add_argument(
        "--gpus",
        type=positive,
        nargs="+",
        required=True,
        metavar="N",
        help="number of GPUs, or several to compare",
    )
    parser.add_argument("--gpu-memory", type=float, metavar="GIB", help="default: 80")
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


def _add_batch(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--seq-length", type=positive, metavar="N", help="as model.data.seq_length")
    size = group.add_mutually_exclusive_group()
    size.add_argument(
        "--global-batch-size", type=positive, metavar="N", help="as model.global_batch_size"
    )
    size.add_argument(
        "--global-batch-tokens", type=positive, metavar="N", help="instead, tokens of a step"
    )
    group.add_argument(
        "--micro-batch-tokens", type=positive, metavar="N",
        help="as model.micro_batch_tokens (default: its own, or a pair if that is more)",
    )  # fmt: skip
    group.add_argument("--precision", choices=["fp32", "bf16", "fp16"], help="default: bf16")
    group.add_argument("--freeze-layers", type=int, metavar="N", help="as model.freeze_layers")
    group.add_argument("--lora-rank", type=int, metavar="N", help="as model.lora.rank")
    group.add_argument("--cpu-offload", action="store_true", help="as model.optim.cpu_offload=true")
    group.add_argument(
        "--recompute", choices=["auto", "none", "selective", "full"],
        help="default auto: as few layers as fit",
    )  # fmt: skip


def _add_speed(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--tflops", type=float, metavar="N", help="peak of a GPU (default 989: H100, H200 in bf16)"
    )
    group.add_argument(
        "--mfu", type=float, metavar="FRACTION", help="of it that computation reaches (default 0.4)"
    )
    group.add_argument("--intra-node", type=float, metavar="GB/S", help="of a GPU (450: NVLink 4)")
    group.add_argument("--inter-node", type=float, metavar="GB/S", help="of a GPU (50: 400 Gb/s)")
    group.add_argument("--host", type=float, metavar="GB/S", help="to host memory (50: PCIe 5)")
    group.add_argument("--gpus-per-node", type=positive, metavar="N", help="default: 8")
