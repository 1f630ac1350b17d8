"""The output of ``nemo-aligner plan``: assumptions, and the layouts that fit or why none fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from nemo_aligner.config.common import Precision
from nemo_aligner.config.dtypes import ELEMENT_BYTES
from nemo_aligner.config.model import ModelConfig
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.planning.cost import Plan
from nemo_aligner.planning.memory import GIB
from nemo_aligner.planning.planner import Candidate, Planner, PlanRequest
from nemo_aligner.utils.errors import ConfigError


def render_heading(name: str, planner: Planner, request: PlanRequest) -> str:
    """Render a description of the model, the step and the assumed machine."""
    shape = planner.shape
    frozen = f", {planner.freeze_layers} layers frozen" if planner.freeze_layers else ""
    experts = "" if shape.experts is None else f"{shape.experts}, "
    frozen += "" if shape.lora is None else f", LoRA of {shape.lora}"
    reached = "" if request.mfu is None else f" at {request.mfu:.0%}"
    return (
        f"{name}: {shape.num_layers} layers, hidden {shape.hidden_size}, "
        f"{shape.num_parameters() / 1e9:.2f} billion parameters, {experts}"
        f"{planner.precision.value}{frozen}\n"
        f"A step: {planner.batch} pairs of 2 x {planner.length} tokens, in packs of at most "
        f"{planner.budget} tokens\n"
        f"A GPU: {request.gpu_memory:g} GiB, of which {request.reserve:g} are left free; "
        f"assumed: {request.peak_flops / 1e12:g} TFLOP/s{reached}, "
        f"{request.memory_bandwidth:g} GB/s of memory, "
        f"{request.intra_node:g} GB/s in a node of {request.gpus_per_node}, "
        f"{request.inter_node:g} GB/s beyond\n"
        f"{_describe_prefix_cache(shape, planner.precision)}"
    )


def _describe_prefix_cache(shape: ModelShape, precision: Precision) -> str:
    """Describe the memory of a server's cached tokens, and of cached states if there are any."""
    size = shape.cached_token_bytes(ELEMENT_BYTES[precision])
    ranks = "tensor and pipeline" if shape.latent_attention is None else "pipeline"
    snapshot = shape.snapshot_bytes(ELEMENT_BYTES[precision])
    states = (
        f", and {snapshot / 1e6:,.1f} MB for each of server.prefix_cache_states" if snapshot else ""
    )
    return (
        f"A server's prefix cache: {size / 1e3:,.1f} kB for each of "
        f"server.prefix_cache_tokens{states}, split over the {ranks} parallel ranks\n"
    )


def render_layouts(planner: Planner, gpus: int, top: int) -> str:
    """Render the ``top`` fastest layouts on ``gpus`` GPUs, and the settings of the fastest one.

    Raises:
        ConfigError: no layout fits; the message names the smallest number of GPUs that is enough.
    """
    candidates = planner.candidates(gpus)
    planner, fitting = _with_offload_if_needed(planner, gpus, planner.ranked(candidates))
    if not fitting:
        raise ConfigError(_describe_smallest_fit(planner, gpus, candidates))
    limit = f", the fastest {top} of them above" if len(fitting) > top else ""
    offload = " with offloaded activations" * planner.activations_offload
    return "\n".join(
        [
            _render(_layout_rows([(planner, candidate) for candidate in fitting[:top]])),
            f"\n{len(fitting)} of {len(candidates)} layouts on {gpus} GPUs fit{offload}{limit}. "
            "The first one:",
            *(f"  {line}" for line in settings_of(fitting[0].plan)),
            *_budget_line(planner.budget),
            *(f"  {line}" for line in _lora_settings(planner)),
        ]
    )


def _lora_settings(planner: Planner) -> list[str]:
    """List the settings of the adapters that are trained; none without LoRA."""
    return [] if planner.shape.lora is None else planner.shape.lora.to_settings()


def _budget_line(budget: int) -> list[str]:
    """Return a line with the setting of ``budget``, the most tokens of a pack; none by default."""
    is_default = budget == ModelConfig().micro_batch_tokens
    return [] if is_default else [f"  model.micro_batch_tokens={budget}"]


def render_best(planner: Planner, numbers: Sequence[int]) -> str:
    """Render a table with the fastest layout for each of ``numbers`` of GPUs."""
    fastest: dict[int, tuple[Planner, Candidate]] = {}
    for gpus in numbers:
        fitting = planner.ranked(planner.candidates(gpus))
        used, fitting = _with_offload_if_needed(planner, gpus, fitting)
        if fitting:
            fastest[gpus] = used, fitting[0]
    layout_rows = dict(zip(fastest, _layout_rows(list(fastest.values())), strict=True))
    rows = [
        {"GPUs": str(gpus), **layout_rows.get(gpus, {"layout": "none fits"})} for gpus in numbers
    ]
    columns = max(rows, key=len)
    return _render([{name: row.get(name, "") for name in columns} for row in rows])


def _with_offload_if_needed(
    planner: Planner, gpus: int, fitting: list[Candidate]
) -> tuple[Planner, list[Candidate]]:
    """If no layout fits without offloaded activations, search for layouts with them.

    Args:
        fitting: the layouts that fit without offloaded activations.

    Returns:
        The planner that found the layouts, and the layouts that fit.
    """
    if fitting:
        return planner, fitting
    offloading = replace(planner, activations_offload=True)
    fitting = offloading.ranked(offloading.candidates(gpus))
    return (offloading, fitting) if fitting else (planner, [])


def settings_of(plan: Plan) -> list[str]:
    """List the settings of a training run with this layout, as ``key=value``."""
    settings = [
        f"model.tensor_model_parallel_size={plan.tp}",
        f"model.pipeline_model_parallel_size={plan.pp}",
        *([f"model.context_parallel_size={plan.cp}"] if plan.cp > 1 else []),
        *(["model.cp_comm_type=p2p", "model.batch_invariant=false"] if plan.ring else []),
        *([f"model.expert_model_parallel_size={plan.ep}"] if plan.ep > 1 else []),
        f"model.sequence_parallel={str(plan.sequence_parallel).lower()}",
        f"model.activations_checkpoint_granularity={plan.recompute.value}",
    ]
    if plan.cpu_offload:
        settings.append("model.optim.cpu_offload=true")
    if plan.activations_offload:
        settings.append("model.activations_offload=true")
    if plan.recompute_layers is not None:
        settings.append(f"model.activations_checkpoint_num_layers={plan.recompute_layers}")
    return settings


def _layout_rows(layouts: Sequence[tuple[Planner, Candidate]]) -> list[dict[str, str]]:
    """Return a row of the printed table for each layout, with the planner that evaluated it.

    The rows have the same columns; host memory is among them if at least one layout uses it.
    """
    has_host = any(candidate.memory.host for _, candidate in layouts)
    return [_layout_row(planner, candidate, has_host) for planner, candidate in layouts]


def _layout_row(planner: Planner, candidate: Candidate, has_host: bool) -> dict[str, str]:
    """Return the cells of a layout's row in the printed table, by column name."""
    plan, memory, time = candidate.plan, candidate.memory, candidate.time
    parts = ("weights", "gradients", "optimizer", "activations", "transient")
    return {
        "layout": str(plan),
        "recompute": _describe_recompute(plan),
        "packs": str(plan.packs.count),
        **{part: f"{getattr(memory, part) / GIB:.1f}" for part in parts},
        "GiB": f"{memory.total / GIB:.1f}",
        **({"host GiB": f"{memory.host / GIB:.1f}"} if has_host else {}),
        "s/step": f"{time.total:.3g}",
        "idle": f"{time.bubble / time.total:.0%}",
        "sending": f"{time.sending / time.total:.0%}",
        "tokens/s": f"{planner.tokens_per_second(candidate):,.0f}",
    }


def _describe_recompute(plan: Plan) -> str:
    """Describe the recomputation of a plan, and whether it offloads activations.

    Recomputation is described by its kind, or by the number of recomputed layers per stage.
    """
    offloaded = ", offloaded" * plan.activations_offload
    if plan.recompute_layers is None:
        return plan.recompute.value + offloaded
    return f"{plan.recompute_layers} layers{offloaded}"


def _describe_smallest_fit(planner: Planner, gpus: int, candidates: Sequence[Candidate]) -> str:
    """Explain that no layout fits, and name the smallest number of GPUs that is enough.

    ``_with_offload_if_needed`` has tried offloaded activations already. Adam's moments in host
    memory (``cpu_offload``) are tried only if the user asks for that, so the message suggests
    ``cpu_offload`` if fewer GPUs are then enough.
    """
    if not candidates:
        return (
            f"gpus: got {gpus}, wanted a number that a layout can use. Tensor and pipeline "
            "parallel sizes must divide the model's heads, query groups and layers, and a step of "
            f"{planner.batch} pairs has work for at most {planner.batch} data parallel ranks"
        )
    offloading = replace(planner, activations_offload=True)
    evaluated = [*candidates, *offloading.candidates(gpus)]
    smallest = min(evaluated, key=lambda candidate: candidate.memory.total)
    settings = [f"recompute {smallest.plan.recompute.value}", *_offload_settings(smallest.plan)]
    message = (
        f"no layout fits on {gpus} GPUs. The one that needs the least memory is {smallest.plan} "
        f"with {' and '.join(settings)}: it needs {smallest.memory.total / GIB:.1f} GiB per GPU, "
        f"but {planner.usable / GIB:.1f} GiB are free; "
    )
    fitting = _least_fitting(planner)
    if fitting is None:
        message += "no number of such GPUs is enough"
    else:
        message += f"the fewest GPUs that fit: {_describe_gpus(fitting)}"
    if planner.cpu_offload:
        return message
    offloaded = _least_fitting(replace(planner, cpu_offload=True))
    if offloaded is None or (fitting is not None and fitting.num_ranks <= offloaded.num_ranks):
        return message
    return f"{message}; or {_describe_gpus(offloaded)}"


def _least_fitting(planner: Planner) -> Plan | None:
    """Find the layout that fits on the fewest GPUs; None if none fits on any number of GPUs.

    The layout offloads activations only if fewer GPUs are then enough.
    """
    plans = (planner.least_gpus(), replace(planner, activations_offload=True).least_gpus())
    fitting = [plan for plan in plans if plan is not None]
    return min(fitting, key=lambda plan: plan.num_ranks, default=None)


def _describe_gpus(plan: Plan) -> str:
    """Describe a plan in a phrase for an error: number of GPUs, layout, settings for offloading."""
    settings = _offload_settings(plan)
    gpus = f"{plan.num_ranks} GPU{'s' * (plan.num_ranks > 1)}, as {plan}"
    return f"{gpus} with {' and '.join(settings)}" if settings else gpus


def _offload_settings(plan: Plan) -> list[str]:
    """List the settings of a plan that move activations or Adam's moments to host memory."""
    return [setting for setting in settings_of(plan) if "offload" in setting]


def _render(rows: Sequence[Mapping[str, str]]) -> str:
    """Render rows as a table with a header; numbers are right-aligned."""
    names = list(rows[0])
    lines = [names, *([row[name] for name in names] for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(names))]
    left_aligned = {"layout", "recompute"}
    return "\n".join(
        "  ".join(
            cell.ljust(width) if name in left_aligned else cell.rjust(width)
            for name, cell, width in zip(names, line, widths, strict=True)
        ).rstrip()
        for line in lines
    )
