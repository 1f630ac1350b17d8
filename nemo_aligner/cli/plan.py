"""Which parallel layouts fit on so many GPUs, what a GPU then holds, and how fast it might be.

    python scripts/plan_layout.py --params 8B --gpus 8
    python scripts/plan_layout.py --config base.nemo --gpus 64 --gpu-memory 141 --seq-length 4096

Nothing is measured here: nemo_aligner/planning/ counts what a step computes,
sends and holds. The memory was held against real steps (docs/performance.md); the speed rests on
what --tflops, --mfu, --intra-node and --inter-node assume. A step has --global-batch-size pairs of
two sequences of --seq-length tokens without a common prefix: the most that the settings allow.
Where memory is short, layers are recomputed, as few of each pipeline stage as it takes. With more
than one number of GPUs the best layout of each is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from nemo_aligner.cli.common import errors_name_flags
from nemo_aligner.cli.plan_flags import parse
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.planning.presets import preset
from nemo_aligner.planning.report import render_best, render_heading, render_layouts
from nemo_aligner.planning.request import PlanRequest


def main(argv: Sequence[str]) -> int:
    """The layouts on one number of GPUs, or the best on each of several."""
    options = parse(__doc__, argv)
    given = vars(options)
    with errors_name_flags(options):
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
