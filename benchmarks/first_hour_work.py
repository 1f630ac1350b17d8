"""Worker of gpu_first_hour.py: the parts that need no other trainer or scorer than this package.

    python benchmarks/first_hour_work.py PART JOB OUTPUT

JOB is JSON: device, precision, the assumed peak in TFLOP/s, the seconds that the part may take, the
folder ``work``, and the model and pairs of the command line. OUTPUT is rewritten after every row,
so a part that is stopped leaves the rows that it has. synthetic.py builds the models and measures
them; the functions here choose the points and name the columns.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist
from common import gpu_memory_used, matmul_rate, peak_gib, write_whole
from first_hour_machine import machine, model
from step_profile import StepTrace, trace
from step_settings import fastest_so_far
from step_variants import Experiment, time_variant
from synthetic import (
    build_synthetic_learner,
    compare_memory,
    divide,
    make_point,
    measure_memory,
    shape_and_plan,
    synthetic_model,
    time_checkpoint,
    time_parts,
    time_steps,
    without_overlap,
)

from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.config.dtypes import ELEMENT_BYTES
from nemo_aligner.config.kernels import DeltaChoice
from nemo_aligner.distributed.launch import launch
from nemo_aligner.distributed.layout import ParallelLayout, destroy_layout, initialize_layout
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.planning.cost import FP32_BYTES, Plan, step_flops, traffic
from nemo_aligner.planning.memory import GIB, fullest_stage
from nemo_aligner.planning.planner import PlanRequest
from nemo_aligner.planning.step_time import Machine, peak_bandwidth, step_time
from nemo_aligner.training.learner import RewardLearner
from nemo_aligner.utils.errors import ConfigError, one_line

Job = Mapping[str, Any]
Row = dict[str, Any]
Point = dict[str, Any]
Measure = Callable[[RewardLearner], dict[str, Any]]
_SEED = 1234
_USUAL, _CALL = "a step, nothing being written", "the call of save"
_DURING, _WRITTEN = "a step while it is written", "from the call until it is on disk"
# Layers and hidden size of the synthetic Llamas.
WIDTHS = ((24, 1024), (16, 2048), (8, 4096))
# Three of four layers have linear attention, with the heads of Qwen3.5 9B.
GATED_DELTA_NET = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_KERNEL_SETTINGS = ("pointwise_kernels", "attention_kernels", "cuda_graphs")
_TRACEBACK = 1500  # number of characters that a row shows of a traceback
_MARGIN = 3.0  # in seconds: no point is started this shortly before the part's time limit


def main() -> None:
    name, job, output = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    job["end"] = psutil.Process().create_time() + job["seconds"] - _MARGIN
    job["GiB before"] = gpu_memory_used() if name == "memory" else None
    if name in PARTS_WITHOUT_LAYOUT:
        _write_rows(PARTS_WITHOUT_LAYOUT[name](job), output)
        return
    with launch() as world:
        layout = initialize_layout(seed=_SEED)
        points = points_of(job["device"], job["precision"], _read_config(job["model"]))[name]
        _write_rows(
            PARTS[name]({**job, "points": points}, layout), output if world.is_main else None
        )


def _write_rows(rows: Iterator[Row], output: Path | None) -> None:
    written: list[Row] = []
    for row in rows:
        written.append(row)
        if output is not None:
            write_whole(output, json.dumps(written))


def _read_config(model: str | None) -> dict[str, Any] | None:
    """Read the model_config of a ``.nemo``, so that its shape replaces the synthetic one.

    It returns None for other checkpoints, whose shape the measurements do not use.
    """
    if model is None or not model.endswith(".nemo"):
        return None
    with open_nemo(Path(model), with_weights=False) as folder:
        return folder.config


def points_of(
    device: str, precision: str, config: dict[str, Any] | None = None
) -> dict[str, list[Point]]:
    """Build the points (a model and the size of a step) that each part measures.

    They are sized for a GPU of 80 GiB, or tiny for a CPU.

    Args:
        device: ``cuda`` or ``cpu``.
        precision: precision of training.
        config: a model_config that replaces the synthetic one; weights are random in any case.

    Returns:
        The points (see synthetic.py) by the name of the part.
    """
    if device == "cuda":
        model, size = synthetic_model(16, 2048), (1024, 32, 8192, 5)
    else:
        model, size = synthetic_model(2, 128, vocabulary=512), (64, 4, 256, 1)
    sizes = dict(
        zip(("sequence_length", "pairs", "micro_batch_tokens", "steps"), size, strict=True)
    )
    base = make_point(config or model, precision, **sizes)
    # A mixture-of-experts model with eight experts a layer, two for each token. Its shape is
    # synthetic even where ``config`` is given.
    experts = {"num_moe_experts": 8, "moe_router_topk": 2}
    width = {"moe_ffn_hidden_size": model["hidden_size"]}
    mixture = {**base, "model": {**model, **experts, **width}}
    hybrid = {**base, "model": {**model, **GATED_DELTA_NET}}
    # The library may be missing, or be rejected on this device, so it comes last.
    hybrids = [{**hybrid, "linear_attention_kernels": choice.value} for choice in DeltaChoice]
    if device != "cuda":
        memory = [{**base, "label": "nothing recomputed"}]
        memory.append({**base, "label": "recompute full", "recompute": "full"})
        mfu, steps = [base, {**base, "sequence_length": 32, "pairs": 8}, hybrids[-1]], 2
        context = {**base, "sequence_length": 128}
    else:
        memory = [*_memory_points(base), {**mixture, "label": "eight experts"}]
        mfu, steps = [*_mfu_points(base), mixture, *hybrids], 8
        context = {**base, "sequence_length": 16384, "micro_batch_tokens": 32768}
    offload = [{**base, "steps": steps}]
    of_ranks = {"overlap": [base], "context": [context, mixture]}
    of_ranks["profile"] = list(_profile_points(base, device))
    of_ranks |= dict(_width_points(base, device))
    return {"mfu": mfu, "memory": memory, "offload": offload, "save": [base], **of_ranks}


def _mfu_points(base: Point) -> Iterator[Point]:
    longest = base["model"].get("max_position_embeddings", 8192)
    for length in (512, 1024, 2048, 4096, 8192):
        if length <= longest:
            # A pack must hold at least one pair.
            pack = max(8192, 2 * length)
            sizes = {"sequence_length": length, "pairs": 2**15 // length}
            yield {**base, **sizes, "micro_batch_tokens": pack}
    for layers, hidden in (WIDTHS[0], WIDTHS[2], (3, 8192)):
        yield {**base, "model": synthetic_model(layers, hidden)}


def _width_points(base: Point, device: str) -> Iterator[tuple[str, list[Point]]]:
    """Yield for each hidden size the name of its part (``width-N``), and a list of one point.

    ``Experiment`` in step_variants.py measures variants of this point (a model and a step size).
    """
    if device != "cuda":
        point = {**base, "spread": True, "sizes": (256, 512), "fixed": ((32, 4),), "steps": 1}
        yield f"width-{WIDTHS[0][1]}", [point]
        return
    for layers, hidden in WIDTHS:
        fixed = [(1024, 32)] + [(8192, 4)] * (hidden == 2048)
        model = synthetic_model(layers, hidden)
        # 40 pairs with 860 tokens a sequence on average: as many tokens as 32 pairs of 1,024.
        texts = {"spread": True, "sequence_length": 2048, "pairs": 40}
        sizes = {"sizes": (16384, 32768, 8192), "fixed": fixed, "micro_batch_tokens": 16384}
        yield f"width-{hidden}", [{**base, "model": model, **texts, **sizes, "steps": 4}]


def _profile_points(base: Point, device: str) -> Iterator[Point]:
    """Yield for each hidden size the point (model and step size) to profile.

    On a GPU the step has only two micro-batches, to keep the trace short.
    """
    if device != "cuda":
        yield base
        return
    for layers, hidden in WIDTHS:
        yield {**base, "model": synthetic_model(layers, hidden), "pairs": 8, "steps": 3}


def _memory_points(base: Point) -> Iterator[Point]:
    layers = base["model"]["num_layers"]
    half = base["sequence_length"] // 2
    yield {**base, "label": "nothing recomputed"}
    yield {**base, "label": "twice the tokens of a pack", "micro_batch_tokens": 16384}
    yield {**base, "label": "half of a text in common", "prefix": half}
    for recompute in ("selective", "full"):
        yield {**base, "label": f"recompute {recompute}", "recompute": recompute}
    yield {**base, "label": "half of the layers frozen", "freeze_layers": layers // 2}
    yield {**base, "label": "moments in host memory", "cpu_offload": True}


def mfu(job: Job, layout: ParallelLayout) -> Iterator[Row]:
    """Measure the speed of a step at each point (model and step size); yield it with the plan's.

    ``MFU`` is relative to the assumed peak, ``of a product`` to the rate of a large matmul measured
    here. Neither counts recomputation as work.
    """
    machine, product = _assumed_machine(job), matmul_rate()
    for point in _points_in_time(job):
        shape, plan = shape_and_plan(point)
        measure = partial(time_variant, steps=point["steps"], peak_flops=machine.flops)
        try:
            measured, note = _measure_new_model(point, layout, measure), None
        except ConfigError as error:  # kernels that cannot run here
            measured, note = {}, one_line(error)
        seconds, planned = measured.get("s/step"), step_time(shape, plan, machine).total
        rate = divide(step_flops(shape, plan), seconds)
        yield {
            "sequence": point["sequence_length"],
            "hidden": shape.hidden_size,
            "layers": shape.num_layers,
            "10^9 parameters": shape.num_parameters() / 1e9,
            "tokens/s": measured.get("tokens/s"),
            "s/step": seconds,
            "planned s/step": planned,
            "measured/planned": divide(seconds, planned),
            "TFLOP/s": divide(rate, 1e12),
            "MFU": measured.get("MFU"),
            "of a product": divide(rate, product),
            "linear attention": point.get("linear_attention_kernels"),
            "note": note or _memory_note(seconds),
        }


def variants(job: Job, layout: ParallelLayout) -> Iterator[Row]:
    """Measure a step at one hidden size with several values of the settings of ``Variant``.

    Yields a row for each combination that is measured.
    """
    (base,) = job["points"]
    peak = _assumed_machine(job).flops
    measure = partial(time_variant, steps=base["steps"], peak_flops=peak)

    def run(point: Point) -> Row:
        try:
            return _measure_new_model(point, layout, measure) or {"note": "out of memory"}
        except Exception:
            traceback.print_exc()
            return {"note": traceback.format_exc()[-_TRACEBACK:]}

    left = partial(_seconds_left, job)
    yield from Experiment(base, base["sizes"], base["fixed"], run, left).rows()


def profile(job: Job, layout: ParallelLayout) -> Iterator[Row]:
    """Profile a step at each hidden size, and yield rows that show where its time goes.

    If profiling fails at one size, its row has the traceback, and the next size follows.
    """
    for base in _points_in_time(job):
        shape, plan = shape_and_plan(base)
        about = {"width": shape.hidden_size}
        point = {**base, **_fastest_kernels(job, shape.hidden_size)}
        try:
            rows = _measure_new_model(
                point, layout, partial(_profile, plan=plan, steps=point["steps"])
            )
            settings = {name: point.get(name) for name in _KERNEL_SETTINGS}
            yield {**about, "what": "settings", "note": json.dumps(settings)}
            yield from ({**about, **row} for row in rows.get("rows", []))
            if not rows:
                yield {**about, "what": "the step", "note": "out of memory"}
        except Exception:
            failed = traceback.format_exc()[-_TRACEBACK:]
            yield {**about, "what": "the step", "note": failed}


def _fastest_kernels(job: Job, width: int) -> dict[str, Any]:
    """Return the settings of the fastest variant that the part ``width-N`` measured.

    ``width`` is N. Without such a measurement the result is empty.
    """
    best = fastest_so_far(Path(job["work"]) / f"width-{width}.out")
    if best is None:
        return {}
    return {name: getattr(best, name) for name in _KERNEL_SETTINGS}


def _profile(learner: RewardLearner, plan: Plan, steps: int) -> dict[str, Any]:
    usual = 1e3 * _time(learner, steps)["seconds"]
    rows: list[Row] = [{"what": "the step, not profiled", "ms": usual, "share of a step": 1.0}]
    layers = learner.model.config.num_layers
    events = trace(lambda: learner.train_step(steps + 2))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows += StepTrace(events, device, layers, plan.packs.count).rows(usual)
    # This must be last: it wraps the learner's methods so that each waits for the device.
    parts = time_parts(learner, steps)
    step_seconds = parts.pop("step")
    for name, seconds in parts.items():
        share, note = seconds / step_seconds, "with a device synchronization after each part"
        rows.append({"what": name, "ms": 1e3 * seconds, "share of a step": share, "note": note})
    columns = dict.fromkeys(name for row in rows for name in row)
    return {"rows": [{name: row.get(name) for name in columns} for row in rows]}


def memory(job: Job, layout: ParallelLayout) -> Iterator[Row]:
    """Measure a step's peak memory at each point (model and step size), in GiB, next to the plan's.

    A row also has the memory that torch's allocator reserves.
    """
    measure = partial(_memory_of, gib_before=job["GiB before"])
    for point in _points_in_time(job):
        shape, plan = shape_and_plan(point)
        planned = fullest_stage(shape, plan)
        measured = _measure_new_model(point, layout, measure)
        yield {
            "setting": point["label"],
            **compare_memory(measured, planned, GIB),
            "reserved": divide(measured.get("reserved"), GIB),
            "beside the allocator": measured.get("outside"),
            "note": _memory_note(measured.get("total")),
        }


def offload(job: Job, layout: ParallelLayout) -> Iterator[Row]:
    """Train the same steps twice: with Adam's moments on the device, then in host memory.

    Yields a row for each, with losses, seconds and memory. The second row also has the largest
    difference of the losses.
    """
    (base,) = job["points"]
    machine = _assumed_machine(job)
    losses: list[list[float]] = []
    for is_offloaded in (False, True):
        point = {**base, "cpu_offload": is_offloaded}
        shape, plan = shape_and_plan(point)
        measured = _measure_new_model(point, layout, partial(_train, steps=base["steps"]))
        if measured:
            losses.append(measured["losses"])
        yield {
            "moments": "host memory" if is_offloaded else "the device",
            "first loss": measured["losses"][0] if measured else None,
            "last loss": measured["losses"][-1] if measured else None,
            "largest |difference|": _largest_difference(*losses) if len(losses) == 2 else None,
            "s/step": measured.get("seconds"),
            "planned s for copies": step_time(shape, plan, machine).host,
            "peak GiB": measured.get("peak"),
            "planned GiB": fullest_stage(shape, plan).total / GIB,
            "note": _memory_note(measured.get("seconds")),
        }


def save(job: Job, layout: ParallelLayout) -> Iterator[Row]:
    """Measure how much a save slows training down.

    Yields rows with the seconds of a usual step, of the call that starts a save, of a step while
    the checkpoint is written, and until it is on disk.
    """
    (point,) = job["points"]
    shape, plan = shape_and_plan(point)
    measure = partial(_train_and_save, steps=point["steps"], folder=job["work"])
    measured = _measure_new_model(point, layout, measure)
    # A save copies the weights and two moments and, if the model has 16-bit weights, also fp32
    # weights.
    size = ELEMENT_BYTES[plan.precision]
    copied = (size + FP32_BYTES * (2 + (size < FP32_BYTES))) * shape.num_parameters()
    for name in (_USUAL, _CALL, _DURING, _WRITTEN):
        yield {
            "what": name,
            "seconds": measured.get(name),
            "planned": copied / _assumed_machine(job).host if name == _CALL else None,
            "GiB copied": copied / GIB if name == _CALL else None,
            "note": _memory_note(measured.get(_USUAL)),
        }


def overlap(job: Job, layout: ParallelLayout) -> Iterator[Row]:
    """Measure a data parallel step that reduces gradients during the backward pass, then after it.

    Yields a row for each of the two ways.
    """
    (point,) = job["points"]
    machine = _assumed_machine(job)
    shape, plan = shape_and_plan({**point, "dp": layout.dp})
    planned = step_time(shape, plan, machine)
    sent = traffic(shape, plan, 0).data
    for is_overlapped in (True, False):
        measure = partial(_time, steps=point["steps"], overlaps=is_overlapped)
        seconds = _measure_new_model(point, layout, measure).get("seconds")
        sending = planned.data if is_overlapped else sent / machine.intra_node
        yield {
            "gradients reduced": "during the backward" if is_overlapped else "after the backward",
            "ranks": layout.dp,
            "over": dist.get_backend(),
            "s/step": seconds,
            "planned s/step": planned.compute + sending,
            "planned s of computing": planned.compute,
            "GB sent by a rank": sent / 1e9,
            "note": _memory_note(seconds),
        }


def context(job: Job, layout: ParallelLayout) -> Iterator[Row]:
    """Measure the step time that context and expert parallelism save.

    A step on long sequences is measured without context parallelism, with it, and with ring
    attention; then a step of a mixture-of-experts model, without and with expert parallelism.
    Yields a row for each step.
    """
    texts, mixture = job["points"]
    ranks = layout.num_ranks
    texts = {**texts, "pairs": ranks}
    chunks: list[dict[str, Any]] = [{}, {"cp": ranks}, {"cp": ranks, "ring": True}]
    experts: list[dict[str, Any]] = [{}, {"ep": ranks}]
    points = [(texts, sizes) for sizes in chunks] + [(mixture, sizes) for sizes in experts]
    for base, sizes in points:
        destroy_layout()
        layout = initialize_layout(seed=_SEED, **sizes)
        point = {**base, **sizes, "dp": layout.dp}
        shape, plan = shape_and_plan(point)
        planned = fullest_stage(shape, plan).total
        total_bytes = _measure_new_model(point, layout, _memory_of).get("total")
        seconds = _measure_new_model(point, layout, partial(_time, steps=point["steps"])).get(
            "seconds"
        )
        yield {
            "layout": str(layout),
            "experts": shape.experts.count if shape.experts else 0,
            "tokens of a text": point["sequence_length"],
            "s/step": seconds,
            "planned s/step": step_time(shape, plan, _assumed_machine(job)).total,
            "in all": divide(total_bytes, GIB),
            "planned": planned / GIB,
            "measured/planned": divide(total_bytes, planned),
            "note": _memory_note(seconds),
        }


PARTS: dict[str, Callable[[Job, ParallelLayout], Iterator[Row]]] = {
    **{f"width-{hidden}": variants for _, hidden in WIDTHS},
    "profile": profile,
    "mfu": mfu,
    "memory": memory,
    "offload": offload,
    "save": save,
    "overlap": overlap,
    "context": context,
}
PARTS_WITHOUT_LAYOUT: dict[str, Callable[[Job], Iterator[Row]]] = {
    "machine": machine,
    "model": model,
}


def _assumed_machine(job: Job) -> Machine:
    """The machine that ``nemo-aligner plan`` assumes, with the job's peak FLOP/s."""
    assumed = PlanRequest(tflops=job["tflops"]).machine()
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return replace(assumed, memory=peak_bandwidth(name) or assumed.memory)


def _measure_new_model(point: Job, layout: ParallelLayout, measure: Measure) -> dict[str, Any]:
    """Build a new model for ``point``, and return the result of ``measure`` on it.

    The result is empty if the device's memory is too small.
    """
    shape = ModelShape.from_config(point["model"])
    result: dict[str, Any] = {}
    try:
        with suppress(torch.OutOfMemoryError):
            learner = build_synthetic_learner(shape, layout, dict(point))
            try:
                result = measure(learner)
            finally:
                learner.release()
                del learner
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    return result


def _seconds_left(job: Job) -> float:
    return job["end"] - time.time()


def _points_in_time(job: Job) -> Iterator[Point]:
    """Yield the points (models and step sizes) of the job, as long as there is time.

    Stop if less time is left than the longest measurement so far took.
    """
    longest = 0.0
    for index, point in enumerate(job["points"]):
        if _seconds_left(job) < longest:
            print(f"no time is left for {len(job['points']) - index} measurements", flush=True)
            return
        start = time.perf_counter()
        yield point
        longest = max(longest, time.perf_counter() - start)


def _memory_note(figure: object) -> str:
    return "out of memory" if figure is None else ""


def _memory_of(learner: RewardLearner, gib_before: float | None = None) -> dict[str, Any]:
    """Return the result of ``measure_memory``, on a GPU with two more figures.

    "reserved" is the memory that torch's allocator holds, in bytes. "outside" is the memory that
    the process holds in addition to it, in GiB. ``gib_before`` is the GPU memory that was in use
    before this process used the GPU.
    """
    measured: dict[str, Any] = measure_memory(learner, 0)
    if not torch.cuda.is_available():
        return measured
    measured["reserved"] = torch.cuda.max_memory_reserved()
    gib_after = gpu_memory_used()
    if gib_before is not None and gib_after is not None:
        measured["outside"] = gib_after - gib_before - torch.cuda.memory_reserved() / GIB
    return measured


def _time(learner: RewardLearner, steps: int, overlaps: bool = True) -> dict[str, Any]:
    """Measure the mean seconds of a step, after two steps that are not timed.

    If ``overlaps`` is False, gradients are reduced only after the backward pass.
    """
    with nullcontext() if overlaps else without_overlap(learner._ddp.ddp_config):
        time_steps(learner, 0, 2)
        return {"seconds": time_steps(learner, 2, steps)[1]}


def _train(learner: RewardLearner, steps: int) -> dict[str, Any]:
    """Train ``steps`` steps.

    Returns:
        The losses, the mean seconds of a step without the first, and on a GPU the peak memory in
        GiB.
    """
    metrics, _ = time_steps(learner, 0, 1)
    timed, seconds = time_steps(learner, 1, steps)
    result = {"losses": [step["loss"] for step in (*metrics, *timed)], "seconds": seconds}
    return {**result, "peak": peak_gib()} if torch.cuda.is_available() else result


def _largest_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def _train_and_save(learner: RewardLearner, steps: int, folder: str) -> dict[str, Any]:
    """Train, and save a checkpoint into ``folder`` while training continues.

    Returns:
        Seconds of a step before the save, of a step while the checkpoint is written, of the call
        that starts the save, and from this call until the checkpoint is on disk.
    """
    numbers = count(1)

    def step_seconds() -> float:
        return time_steps(learner, next(numbers), 1)[1]

    learner.train_step(0)
    usual = [step_seconds() for _ in range(steps)]
    during: list[float] = []
    saved = time_checkpoint(learner, folder, lambda: during.append(step_seconds()))
    return {
        _USUAL: median(usual),
        _CALL: saved["save"],
        _DURING: median(during) if during else None,
        _WRITTEN: saved["written"],
    }


if __name__ == "__main__":
    main()
