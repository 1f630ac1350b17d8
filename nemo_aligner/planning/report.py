"""A plan for people: what is assumed, the layouts that fit, and what would where none does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nemo_aligner.errors import ConfigError
from nemo_aligner.planning.cost import Plan
from nemo_aligner.planning.planner import Candidate, Planner
from nemo_aligner.planning.request import GIB, PlanRequest


def render_heading(name: str, planner: Planner, request: PlanRequest) -> str:
    """The model, the step and the machine that is assumed."""
    shape = planner.shape
    frozen = f", {planner.freeze_layers} layers frozen" if planner.freeze_layers else ""
    frozen += "" if shape.lora is None else f", LoRA of {shape.lora}"
    return (
        f"{name}: {shape.num_layers} layers, hidden {shape.hidden_size}, "
        f"{shape.num_parameters() / 1e9:.2f} billion parameters, "
        f"{planner.precision.value}{frozen}\n"
        f"A step: {planner.batch} pairs of 2 x {planner.length} tokens, in packs of at most "
        f"{planner.budget} tokens\n"
        f"A GPU: {request.gpu_memory:g} GiB, of which {request.reserve:g} are left free; "
        f"assumed: {request.tflops:g} TFLOP/s at {request.mfu:.0%}, "
        f"{request.intra_node:g} GB/s in a node of {request.gpus_per_node}, "
        f"{request.inter_node:g} GB/s beyond\n"
    )


def render_layouts(planner: Planner, gpus: int, top: int) -> str:
    """The ``top`` fastest layouts on so many GPUs, and the settings of the first.

    Raises:
        ConfigError: none fits; the message says what would.
    """
    candidates = planner.candidates(gpus)
    found = planner.ranked(candidates)
    if not found:
        raise ConfigError(_what_would_fit(planner, gpus, candidates))
    shown = f", the fastest {top} of them above" if len(found) > top else ""
    return "\n".join(
        [
            _render([_row(planner, each) for each in found[:top]]),
            f"\n{len(found)} of {len(candidates)} layouts on {gpus} GPUs fit{shown}. "
            "The first one:",
            *(f"  {line}" for line in settings_of(found[0].plan)),
        ]
    )


def render_best(planner: Planner, numbers: Sequence[int]) -> str:
    """The best layout on each number of GPUs."""
    rows = []
    for gpus in numbers:
        found = planner.ranked(planner.candidates(gpus))
        row = _row(planner, found[0]) if found else {"layout": "none fits"}
        rows.append({"GPUs": str(gpus), **row})
    columns = max(rows, key=len)
    return _render([{name: row.get(name, "") for name in columns} for row in rows])


def settings_of(plan: Plan) -> list[str]:
    """The layout as settings of a training run."""
    settings = [
        f"model.tensor_model_parallel_size={plan.tp}",
        f"model.pipeline_model_parallel_size={plan.pp}",
        f"model.sequence_parallel={str(plan.sequence_parallel).lower()}",
        f"model.activations_checkpoint_granularity={plan.recompute.value}",
    ]
    if plan.cpu_offload:
        settings.append("model.optim.cpu_offload=true")
    if plan.recompute_layers is not None:
        settings.append(f"model.activations_checkpoint_num_layers={plan.recompute_layers}")
    return settings


def _row(planner: Planner, candidate: Candidate) -> dict[str, str]:
    plan, memory, time = candidate.plan, candidate.memory, candidate.time
    parts = ("weights", "gradients", "optimizer", "activations", "transient")
    sent = time.tensor + time.pipeline + time.data + time.host
    return {
        "layout": str(plan),
        "recompute": _recompute(plan),
        "packs": str(plan.packs.count),
        **{part: f"{getattr(memory, part) / GIB:.1f}" for part in parts},
        "GiB": f"{memory.total / GIB:.1f}",
        "s/step": f"{time.total:.3g}",
        "idle": f"{time.bubble / time.total:.0%}",
        "sending": f"{sent / time.total:.0%}",
        "tokens/s": f"{planner.tokens_per_second(candidate):,.0f}",
    }


def _recompute(plan: Plan) -> str:
    """What is recomputed, and how many layers of a stage if not all."""
    if plan.recompute_layers is None:
        return plan.recompute.value
    return f"{plan.recompute_layers} layers"


def _what_would_fit(planner: Planner, gpus: int, candidates: Sequence[Candidate]) -> str:
    """Why no layout is left, and the least that would do."""
    if not candidates:
        return (
            f"gpus: got {gpus}, wanted a number that the model's heads, query groups and layers "
            f"divide into, with at most {planner.batch} data parallel ranks (the pairs of a step)"
        )
    least = min(candidates, key=lambda each: each.memory.total)
    needs = (
        f"no layout fits on {gpus} GPUs: the least is {least.plan} with recompute "
        f"{_recompute(least.plan)}, which holds {least.memory.total / GIB:.1f} GiB of the "
        f"{planner.usable / GIB:.1f} that are free"
    )
    enough = planner.least_gpus()
    if enough is None:
        return f"{needs}; no number of such GPUs is enough"
    return f"{needs}; the least that fits is {enough.num_ranks} GPUs, as {enough}"


def _render(rows: Sequence[Mapping[str, str]]) -> str:
    """Columns as wide as their content; numbers on the right."""
    names = list(rows[0])
    lines = [names, *([row[name] for name in names] for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(names))]
    left = {"layout", "recompute"}
    return "\n".join(
        "  ".join(
            cell.ljust(width) if name in left else cell.rjust(width)
            for name, cell, width in zip(names, line, widths, strict=True)
        ).rstrip()
        for line in lines
    )
