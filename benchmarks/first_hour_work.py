"""Worker of gpu_first_hour.py: one part that needs nothing but this package, on random weights.

    python benchmarks/first_hour_work.py PART JOB OUTPUT

JOB is JSON: the points of the part, each a job of scaling.py, and what is assumed of the machine.
OUTPUT gets the rows that are there so far, after each: a part that is stopped leaves them.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from common import matmul_rate
from scaling import plan_of
from scaling_point import build_synthetic_learner, measure_memory, now, without_overlap

from nemo_aligner.config.dtypes import ELEMENT_BYTES
from nemo_aligner.distributed.launch import launch
from nemo_aligner.distributed.layout import ParallelLayout, initialize_layout
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.planning.cost import FP32_BYTES, Machine, Plan, step_flops, step_time, traffic
from nemo_aligner.planning.memory import fullest_stage
from nemo_aligner.planning.planner import GIB, PlanRequest
from nemo_aligner.training.learner import RewardLearner

Job = Mapping[str, Any]
Row = dict[str, Any]
Measure = Callable[[RewardLearner], dict[str, Any]]
_SEED = 1234
_USUAL, _CALL = "a step, nothing being written", "the call of save"
_DURING, _WRITTEN = "a step while it is written", "from the call until it is on disk"


def main() -> None:
    name, job, output = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
    rows: list[Row] = []
    with launch() as world:
        layout = initialize_layout(seed=_SEED)
        for row in PARTS[name](job, layout):
            rows.append(row)
            if world.is_main:
                output.write_text(json.dumps(rows))


def mfu(job: Job, layout: ParallelLayout) -> Iterator[Row]:
    """A step's speed at each point, beside the plan's; recomputation is not counted as work.

    ``MFU`` is of the peak that is assumed, ``of a product`` of a large matrix product's rate here.
    """
    machine, product = _machine(job), matmul_rate()
    for point in job["points"]:
        shape, plan = _shape_and_plan(point)
        steps = point["steps"]
        seconds = _measured(point, layout, partial(_time, steps=steps)).get("seconds")
        planned = step_time(shape, plan, machine).total
        rate = _per(step_flops(shape, plan), seconds)
        yield {
            "sequence": point["sequence_length"],
            "hidden": shape.hidden_size,
            "layers": shape.num_layers,
            "10^9 parameters": shape.num_parameters() / 1e9,
            "tokens/s": _per(_tokens(point), seconds),
            "s/step": seconds,
            "planned s/step": planned,
            "measured/planned": _per(seconds, planned),
            "TFLOP/s": _per(rate, 1e12),
            "MFU": _per(rate, machine.flops),
            "of a product": _per(rate, product),
            "note": _note(seconds),
        }


def memory(job: Job, layout: ParallelLayout) -> Iterator[Row]:
    """GiB at the fullest moment of a step, beside the plan's, and what the allocator holds."""
    for point in job["points"]:
        shape, plan = _shape_and_plan(point)
        planned = fullest_stage(shape, plan)
        found = _measured(point, layout, _memory_of)
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
            "peak GiB": _per(found.get("peak"), GIB),
            "planned GiB": fullest_stage(shape, plan).total / GIB,
            "note": _note(found.get("seconds")),
        }


def save(job: Job, layout: ParallelLayout) -> Iterator[Row]:
    """Steps without a save, the call that begins one, and steps while it is written."""
    (point,) = job["points"]
    shape, plan = _shape_and_plan(point)
    measure = partial(_train_and_save, steps=point["steps"], folder=job["folder"])
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


PARTS: dict[str, Callable[[Job, ParallelLayout], Iterator[Row]]] = {
    "mfu": mfu,
    "memory": memory,
    "offload": offload,
    "save": save,
    "overlap": overlap,
}


def _machine(job: Job) -> Machine:
    """What ``nemo-aligner plan`` assumes, but for the peak, which is the job's."""
    assumed = PlanRequest()
    return Machine(
        flops=job["tflops"] * 1e12,
        efficiency=assumed.mfu,
        intra_node=assumed.intra_node * 1e9,
        inter_node=assumed.inter_node * 1e9,
        ranks_per_node=assumed.gpus_per_node,
        host=assumed.host * 1e9,
    )


def _shape_and_plan(point: Job) -> tuple[ModelShape, Plan]:
    return ModelShape.from_config(point["model"]), plan_of(point)


def _tokens(point: Job) -> int:
    return point["pairs"] * (2 * point["sequence_length"] - point["prefix"])


def _per(number: float | None, divisor: float | None) -> float | None:
    """Their quotient; None where there is no such number."""
    return None if number is None or divisor is None else number / divisor


def _measured(point: Job, layout: ParallelLayout, measure: Measure) -> dict[str, Any]:
    """What ``measure`` finds on a new model; nothing where the device's memory is too small."""
    shape = ModelShape.from_config(point["model"])
    found: dict[str, Any] = {}
    with suppress(torch.OutOfMemoryError):
        found = measure(build_synthetic_learner(shape, layout, dict(point)))
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return found


def _note(found: object) -> str:
    return "out of memory" if found is None else ""


def _memory_of(learner: RewardLearner) -> dict[str, Any]:
    found = measure_memory(learner, 0)
    if not torch.cuda.is_available():
        return found
    return {**found, "reserved": torch.cuda.max_memory_reserved()}


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
    if not torch.cuda.is_available():
        return found
    return {**found, "peak": torch.cuda.max_memory_allocated()}


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
