"""Which parallel layouts fit on so many GPUs, what a GPU then holds, and how fast it might be.

  nemo-aligner plan --params 8B --gpus 8
  nemo-aligner plan --config base.nemo --gpus 64 --gpu-memory 141

Nothing is measured here: what a step computes, sends and holds is counted. The memory was held
against real steps (docs/performance.md); the speed rests on what --tflops, --mfu, --intra-node and
--inter-node assume. A step has --global-batch-size pairs of two sequences of --seq-length tokens
without a common prefix: the most that the settings allow. Where memory is short, layers are
recomputed, as few of each pipeline stage as it takes. With more than one number of GPUs the best
layout of each is shown.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

from nemo_aligner.cli.parser import Parser
from nemo_aligner.cli.plan_flags import add_flags
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.planning.presets import preset
from nemo_aligner.planning.report import render_best, render_heading, render_layouts
from nemo_aligner.planning.request import PlanRequest


def new_parser() -> Parser:
    """The options of ``nemo-aligner plan``."""
    parser = Parser("plan", __doc__)
    add_flags(parser)
    return parser


def run(options: argparse.Namespace) -> int:
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
    from nemo_aligner.checkpoint.nemo.config_file import read_model_config

    return ModelShape.from_config(read_model_config(path)), str(path)
