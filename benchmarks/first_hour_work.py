"""Worker of gpu_first_hour.py: a part that needs nothing but this package; its rows go to OUTPUT.

    python benchmarks/first_hour_work.py PART JOB OUTPUT

JOB is JSON: device, precision, the peak that is assumed, the seconds that the part may take, the
folder ``work``, and the model and pairs that were given. OUTPUT gets the rows that are there so
far, after each: a part that is stopped leaves them.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import torch
import torch.distributed as dist
from common import gpu_memory_used, matmul_rate, now, peak_gib, write_whole
from first_hour_machine import machine, model
from step_profile import StepTrace, trace
from step_settings import fastest_so_far
from step_variants import Experiment, time_variant
from synthetic import (
    build_synthetic_learner,
    make_point,
    measure_memory,
    plan_of,
    synthetic_model,
    time_parts,
    without_overlap,
)

from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.config.dtypes import ELEMENT_BYTES
from nemo_aligner.distributed.launch import launch
from nemo_aligner.distributed.layout import ParallelLayout, destroy_layout, initialize_layout
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.planning.cost import FP32_BYTES, Plan, step_flops, traffic
from nemo_aligner.planning.memory import GIB, fullest_stage
from nemo_aligner.planning.planner import PlanRequest
from nemo_aligner.planning.step_time import Machine, peak_bandwidth, step_time
from nemo_aligner.training.learner import RewardLearner

Job = Mapping[str, Any]
Row = dict[str, Any]
Point = dict[str, Any]
Measure = Callable[[RewardLearner], dict[str, Any]]
_SEED = 1234
_USUAL, _CALL = "a step, nothing being written", "the call of save"
_DURING, _WRITTEN = "a step while it is written", "from the call until it is on disk"
# Layers and width of the Llamas that a step is measured on.
WIDTHS = ((24, 1024), (16, 2048), (8, 4096))
_TRACEBACK = 1500  # characters of it in a row
_MARGIN = 3.0  # seconds before a part would be stopped, in which it begins nothing


def main() -> None:
    name, job, output = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    job["end"] = psutil.Process().create_time() + job["seconds"] - _MARGIN
    job["GiB before"] = gpu_memory_used() if name == "memory" else None
    if name in ALONE:
        _write(ALONE[name](job), output)
        return
    with launch() as world:
        layout = initialize_layout(seed=_SEED)
        points = points_of(job["device"], job["precision"], _given_shape(job["model"]))[name]
        _write(PARTS[name]({**job, "points": points}, layout), output if world.is_main else None)


def _write(rows: Iterator[Row], output: Path | None) -> None:
    found: list[Row] = []
    for row in rows:
        found.append(row)
        if output is not None:
            write_whole(output, json.dumps(found))


def _given_shape(model: str | None) -> dict[str, Any] | None:
    """The model_config of a ``.nemo``; other checkpoints leave the synthetic points as they are."""
    if model is None or not model.endswith(".nemo"):
        return None
    with open_nemo(Path(model), with_weights=False) as folder:
        return folder.config


def points_of(
    device: str, precision: str, given: dict[str, Any] | None = None
) -> dict[str, list[Point]]:
    """The points of each part on random weights, for a GPU of 80 GiB or in miniature.

    ``given`` is a model_config to take instead of a synthetic one.
    """
    if device == "cuda":
        model, size = synthetic_model(16, 2048), (1024, 32, 8192, 5)
    else:
        model, size = synthetic_model(2, 128, vocabulary=512), (64, 4, 256, 1)
    sizes = dict(
        zip(("sequence_length", "pairs", "micro_batch_tokens", "steps"), size, strict=True)
    )
    base = make_point(given or model, precision, **sizes)
    # Eight experts a layer, of which a token has two; always synthetic, whatever is given.
    experts = {"num_moe_experts": 8, "moe_router_topk": 2}
    width = {"moe_ffn_hidden_size": model["hidden_size"]}
    mixture = {**base, "model": {**model, **experts, **width}}
    if device != "cuda":
        memory = [{**base, "label": "nothing recomputed"}]
        memory.append({**base, "label": "recompute full", "recompute": "full"})
        mfu, steps = [base, {**base, "sequence_length": 32, "pairs": 8}], 2
        context = {**base, "sequence_length": 128}
    else:
        memory = [*_memory_points(base), {**mixture, "label": "eight experts"}]
        mfu, steps = [*_mfu_points(base), mixture], 8
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
            # A pack holds a pair at least.
            pack = max(8192, 2 * length)
            sizes = {"sequence_length": length, "pairs": 2**15 // length}
            yield {**base, **sizes, "micro_batch_tokens": pack}
    for layers, hidden in (WIDTHS[0], WIDTHS[2], (3, 8192)):
        yield {**base, "model": synthetic_model(layers, hidden)}


def _width_points(base: Point, device: str) -> Iterator[tuple[str, list[Point]]]:
    """The part of each width, and what its ``step_variants.Experiment`` begins with."""
    if device != "cuda":
        point = {**base, "spread": True, "sizes": (256, 512), "fixed": ((32, 4),), "steps": 1}
        yield f"width-{WIDTHS[0][1]}", [point]
        return
    for layers, hidden in WIDTHS:
        fixed = [(1024, 32)] + [(8192, 4)] * (hidden == 2048)
        model = synthetic_model(layers, hidden)
        # 40 pairs of 860 tokens on average, as many as 32 pairs of 1,024 have.
        texts = {"spread": True, "sequence_length": 2048, "pairs": 40}
        sizes = {"sizes": (16384, 32768, 8192), "fixed": fixed, "micro_batch_tokens": 16384}
        yield f"width-{hidden}", [{**base, "model": model, **texts, **sizes, "steps": 4}]


def _profile_points(base: Point, device: str) -> Iterator[Point]:
    """Two micro-batches at each width: more would make the trace long, and show the same."""
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
    """A step's speed at each point, beside the plan's; recomputation is not counted as work.

    ``MFU`` is of the peak that is assumed, ``of a product`` of a large matrix product's rate here.
    """
    machine, product = _machine(job), matmul_rate()
    for point in _in_time(job):
        shape, plan = _shape_and_plan(point)
        measure = partial(time_variant, steps=point["steps"], peak_flops=machine.flops)
        found = _measured(point, layout, measure)
        seconds, planned = found.get("s/step"), step_time(shape, plan, machine).total
        rate = _per(step_flops(shape, plan), seconds)
        yield {
            "sequence": point["sequence_length"],
            "hidden": shape.hidden_size,
            "layers": shape.num_layers,
            "10^9 parameters": shape.num_parameters() / 1e9,
            "tokens/s": found.get("tokens/s"),
            "s/step": seconds,
            "planned s/step": planned,
            "measured/planned": _per(seconds, planned),
            "TFLOP/s": _per(rate, 1e12),
            "MFU": found.get("MFU"),
            "of a product": _per(rate, product),
            "note": _note(seconds),
        }


def variants(job: Job, layout: ParallelLayout) -> Iterator[Row]:
    """Speed of a step at one width by pointwise kernels, CUDA graphs and micro-batch size."""
    (base,) = job["points"]
    peak = _machine(job).flops
    measure = partial(time_variant, steps=base["steps"], peak_flops=peak)

    def run(point: Point) -> Row:
        try:
            return _measured(point, layout, measure) or {"note": "out of memory"}
        except Exception:
            traceback.print_exc()
            return {"note": traceback.format_exc()[-_TRACEBACK:]}

    left = partial(_seconds_left, job)
    yield from Experiment(base, base["sizes"], base["fixed"], run, left).rows()


def profile(job: Job, layout: ParallelLayout) -> Iterator[Row]:
    """Where the time of a step goes at each width; a width that fails has its traceback."""
    for base in _in_time(job):
        shape, plan = _shape_and_plan(base)
        about = {"width": shape.hidden_size}
        point = {**base, **_fastest_kernels(job, shape.hidden_size)}
        try:
            rows = _measured(point, layout, partial(_profile, plan=plan, steps=point["steps"]))
            settings = {name: point.get(name) for name in ("pointwise_kernels", "cuda_graphs")}
            yield {**about, "what": "settings", "note": json.dumps(settings)}
            yield from ({**about, **row} for row in rows.get("rows", []))
            if not rows:
                yield {**about, "what": "the step", "note": "out of memory"}
        except Exception:
            failed = traceback.format_exc()[-_TRACEBACK:]
            yield {**about, "what": "the step", "note": failed}


def _fastest_kernels(job: Job, width: int) -> dict[str, Any]:
    """The kernels of the fastest variant in a part before; the defaults if there is none."""
    best = fastest_so_far(Path(job["work"]) / f"width-{width}.out")
    if best is None:
        return {}
    return {"pointwise_kernels": best.pointwise_kernels, "cuda_graphs": best.cuda_graphs}


def _profile(learner: RewardLearner, plan: Plan, steps: int) -> dict[str, Any]:
    usual = 1e3 * _time(learner, steps)["seconds"]
    rows: list[Row] = [{"what": "the step, not profiled", "ms": usual, "share of a step": 1.0}]
    layers = learner.model.config.num_layers
    events = trace(lambda: learner.train_step(steps + 2))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows += StepTrace(events, device, layers, plan.packs.count).rows(usual)
    # Last, because this wraps the learner's methods, which then wait for the device.
    parts = time_parts(learner, steps)
    whole = parts.pop("step")
    for name, seconds in parts.items():
        share, note = seconds / whole, "the device is waited for after each part"
        rows.append({"what": name, "ms": 1e3 * seconds, "share of a step": share, "note": note})
    columns = dict.fromkeys(name for row in rows for name in row)
    return {"rows": [{name: row.get(name) for name in columns} for row in rows]}


def memory(job: Job, layout: ParallelLayout) -> Iterator[Row]:
    """GiB at the fullest moment of a step, beside the plan's, and what the allocator holds."""
    measure = partial(_memory_of, before=job["GiB before"])
    for point in _in_time(job):
        shape, plan = _shape_and_plan(point)
        planned = fullest_stage(shape, plan)
        found = _measured(point, layout, measure)
        row: Row = {"setting": point["label"]}
        for part in ("weights", "gradients", "optimizer"):
            row[part] = _per(found.get(part), GIB)
            row[f"planned {part}"] = getattr(planned, part) / GIB
        yield {
            **row,
            "kept": _per(found.get("saved"), GIB),
            "planned kept": planned.activations / GIB,
            "in all": _per(found.get("total"), GIB),
            "planned": planned.total / GIB,
            "measured/planned": _per(found.get("total"), planned.total),
            "reserved": _per(found.get("reserved"), GIB),
            "beside the allocator": found.get("outside"),
            "note": _note(found.get("total")),
        }


def offload(job: Job, layout: ParallelLayout) -> Iterator[Row]:
    """The same steps with Adam's moments on the device, then in host memory."""
    (base,) = job["points"]
    machine = _machine(job)
    losses: list[list[float]] = []
    for is_offloaded in (False, True):
        point = {**base, "cpu_offload": is_offloaded}
        shape, plan = _shape_and_plan(point)
        found = _measured(point, layout, partial(_train, steps=base["steps"]))
        if found:
            losses.append(found["losses"])
        yield {
            "moments": "host memory" if is_offloaded else "the device",
            "first loss": found["losses"][0] if found else None,
            "last loss": found["losses"][-1] if found else None,
            "largest |difference|": _largest_difference(*losses) if len(losses) == 2 else None,
            "s/step": found.get("seconds"),
            "planned s for copies": step_time(shape, plan, machine).host,
            "peak GiB": found.get("peak"),
            "planned GiB": fullest_stage(shape, plan).total / GIB,
            "note": _note(found.get("seconds")),
        }


def save(job: Job, layout: ParallelLayout) -> Iterator[Row]:
    """Steps without a save, the call that begins one, and steps while it is written."""
    (point,) = job["points"]
    shape, plan = _shape_and_plan(point)
    measure = partial(_train_and_save, steps=point["steps"], folder=job["work"])
    found = _measured(point, layout, measure)
    # Weights, and in the optimizer fp32 weights where they are not, and two moments.
    size = ELEMENT_BYTES[plan.precision]
    copied = (size + FP32_BYTES * (2 + (size < FP32_BYTES))) * shape.num_parameters()
    for name in (_USUAL, _CALL, _DURING, _WRITTEN):
        yield {
            "what": name,
            "seconds": found.get(name),
            "planned": copied / _machine(job).host if name == _CALL else None,
            "GiB copied": copied / GIB if name == _CALL else None,
            "note": _note(found.get(_USUAL)),
        }


def overlap(job: Job, layout: ParallelLayout) -> Iterator[Row]:
    """A data parallel step, its gradients reduced during the backward pass, and after it."""
    (point,) = job["points"]
    machine = _machine(job)
    shape, plan = _shape_and_plan({**point, "dp": layout.dp})
    planned = step_time(shape, plan, machine)
    sent = traffic(shape, plan, 0).data
    for is_overlapped in (True, False):
        measure = partial(_time, steps=point["steps"], overlaps=is_overlapped)
        seconds = _measured(point, layout, measure).get("seconds")
        sending = planned.data if is_overlapped else sent / machine.intra_node
        yield {
            "gradients reduced": "during the backward" if is_overlapped else "after the backward",
            "ranks": layout.dp,
            "over": dist.get_backend(),
            "s/step": seconds,
            "planned s/step": planned.compute + sending,
            "planned s of computing": planned.compute,
            "GB sent by a rank": sent / 1e9,
            "note": _note(seconds),
        }


def context(job: Job, layout: ParallelLayout) -> Iterator[Row]:
    """A step on long texts, each on one rank, then each on all of them, and in a ring.

    Then one of a mixture, its experts on each rank, and shared out.
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
        shape, plan = _shape_and_plan(point)
        planned = fullest_stage(shape, plan).total
        found = _measured(point, layout, _memory_of).get("total")
        seconds = _measured(point, layout, partial(_time, steps=point["steps"])).get("seconds")
        yield {
            "layout": str(layout),
            "experts": shape.experts.count if shape.experts else 0,
            "tokens of a text": point["sequence_length"],
            "s/step": seconds,
            "planned s/step": step_time(shape, plan, _machine(job)).total,
            "in all": _per(found, GIB),
            "planned": planned / GIB,
            "measured/planned": _per(found, planned),
            "note": _note(seconds),
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
ALONE: dict[str, Callable[[Job], Iterator[Row]]] = {"machine": machine, "model": model}


def _machine(job: Job) -> Machine:
    """What ``nemo-aligner plan`` assumes, but for the peak, which is the job's."""
    assumed = PlanRequest(tflops=job["tflops"]).machine()
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return replace(assumed, memory=peak_bandwidth(name) or assumed.memory)


def _shape_and_plan(point: Job) -> tuple[ModelShape, Plan]:
    return ModelShape.from_config(point["model"]), plan_of(point)


def _per(number: float | None, divisor: float | None) -> float | None:
    """Their quotient; None where there is no such number."""
    return None if number is None or divisor is None else number / divisor


def _measured(point: Job, layout: ParallelLayout, measure: Measure) -> dict[str, Any]:
    """What ``measure`` finds on a new model; nothing where the device's memory is too small."""
    shape = ModelShape.from_config(point["model"])
    found: dict[str, Any] = {}
    try:
        with suppress(torch.OutOfMemoryError):
            learner = build_synthetic_learner(shape, layout, dict(point))
            try:
                found = measure(learner)
            finally:
                learner.release()
                del learner
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    return found


def _seconds_left(job: Job) -> float:
    return job["end"] - time.time()


def _in_time(job: Job) -> Iterator[Point]:
    """The points of a job, as long as another one is likely to end in time."""
    longest = 0.0
    for index, point in enumerate(job["points"]):
        if _seconds_left(job) < longest:
            print(f"no time was left for {len(job['points']) - index} more points", flush=True)
            return
        start = time.perf_counter()
        yield point
        longest = max(longest, time.perf_counter() - start)


def _note(found: object) -> str:
    return "out of memory" if found is None else ""


def _memory_of(learner: RewardLearner, before: float | None = None) -> dict[str, Any]:
    """What ``measure_memory`` finds, and on a GPU also what the process holds.

    ``before`` is how many GiB of the GPU were held before this process used it.
    """
    found: dict[str, Any] = measure_memory(learner, 0)
    if not torch.cuda.is_available():
        return found
    found["reserved"] = torch.cuda.max_memory_reserved()
    after = gpu_memory_used()
    if before is not None and after is not None:
        found["outside"] = after - before - torch.cuda.memory_reserved() / GIB
    return found


def _time(learner: RewardLearner, steps: int, overlaps: bool = True) -> dict[str, Any]:
    """Mean seconds of a step, after two that are not timed."""
    with nullcontext() if overlaps else without_overlap(learner._ddp.ddp_config):
        for step in range(2):
            learner.train_step(step)
        start = now()
        for step in range(2, steps + 2):
            learner.train_step(step)
        return {"seconds": (now() - start) / steps}


def _train(learner: RewardLearner, steps: int) -> dict[str, Any]:
    """Losses, mean seconds of a step after the first, and the most bytes that were in use."""
    losses = [learner.train_step(0)["loss"]]
    start = now()
    losses += [learner.train_step(step)["loss"] for step in range(1, steps + 1)]
    found = {"losses": losses, "seconds": (now() - start) / steps}
    return {**found, "peak": peak_gib()} if torch.cuda.is_available() else found


def _largest_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def _train_and_save(learner: RewardLearner, steps: int, folder: str) -> dict[str, Any]:
    from nemo_aligner.checkpoint.run import RunCheckpoints, RunState

    with tempfile.TemporaryDirectory(dir=folder) as own:
        checkpoints = RunCheckpoints(Path(own))
        checkpoints.reserve(learner.model, learner.optimizer)
        learner.train_step(0)
        usual = [_step_seconds(learner, step) for step in range(1, steps + 1)]
        start = now()
        checkpoints.save(RunState(1, 1), learner.model, learner.optimizer)
        held = now() - start
        during: list[float] = []
        while not checkpoints.is_written:
            during.append(_step_seconds(learner, steps + 1 + len(during)))
        checkpoints.publish()
        written = time.perf_counter() - start
    shown = median(during) if during else None
    return {_USUAL: median(usual), _CALL: held, _DURING: shown, _WRITTEN: written}


def _step_seconds(learner: RewardLearner, step: int) -> float:
    start = now()
    learner.train_step(step)
    return now() - start


if __name__ == "__main__":
    main()
