"""Training steps of a model with random weights on random tokens: measured next to planned cost.

    python benchmarks/synthetic.py point JOB        (or under torchrun; ``make_point`` makes a job)

scaling.py, the first hour and the planner's tests use it. A "point" is a dict that describes one
measurement: model_config, precision, layout, lengths, number of pairs and steps.
"""

from __future__ import annotations

import resource
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from common import now, start
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nemo_aligner.batch.packed import Records
from nemo_aligner.checkpoint.run import RunCheckpoints, RunState
from nemo_aligner.config.common import Precision, RecordKind
from nemo_aligner.config.kernels import AttentionChoice, DeltaChoice, PointwiseChoice
from nemo_aligner.config.model import ModelConfig, OptimConfig, Recompute
from nemo_aligner.cpu.matmuls import resident_bytes
from nemo_aligner.data.dataset import TokenizedDataset
from nemo_aligner.data.records import Origin
from nemo_aligner.data.token_index import TokenSequences
from nemo_aligner.data.training_data import TrainingData, TrainLoader
from nemo_aligner.distributed.collectives import gather_objects
from nemo_aligner.distributed.launch import launch
from nemo_aligner.distributed.layout import ParallelLayout, initialize_layout
from nemo_aligner.losses.pairwise import BradleyTerry
from nemo_aligner.models import reward_model
from nemo_aligner.models.experts import collect_load, routers
from nemo_aligner.models.lora import train_adapters_alone
from nemo_aligner.models.quantized_layers import quantized_layers
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.training_wrap import set_routers
from nemo_aligner.planning.cost import Plan, even_packs, step_flops
from nemo_aligner.planning.memory import Memory
from nemo_aligner.training.build import build_optimized
from nemo_aligner.training.learner import RewardLearner

TIMED_PARTS = ("data", "forward", "backward", "reduce", "optimizer")
PLAN_KEYS = (
    "tp",
    "cp",
    "pp",
    "dp",
    "sequence_parallel",
    "ring",
    "recompute_layers",
    "freeze_layers",
)
_SEED = 1234


def make_point(model: dict[str, Any], precision: str, **changes: Any) -> dict[str, Any]:
    """Describe a measurement (a "point"): one rank, no recomputation, updated by ``changes``."""
    return {
        "model": model,
        "precision": precision,
        "tp": 1,
        "cp": 1,
        "pp": 1,
        "dp": 1,
        "sequence_parallel": False,
        "ring": False,
        "recompute": "none",
        "recompute_layers": None,
        "freeze_layers": 0,
        "cpu_offload": False,
        "prefix": 0,
        "save": False,
        **changes,
    }


def synthetic_model(layers: int, hidden: int, vocabulary: int = 32000) -> dict[str, Any]:
    """The model_config of a Llama whose hidden size is ``hidden``, a multiple of 128."""
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": 3 * hidden,
        "num_attention_heads": hidden // 64,
        "num_query_groups": max(2, hidden // 256),
        "kv_channels": 64,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32768,
    }


def plan_of(job: Mapping[str, Any], expert_load: float = 1.0) -> Any:
    """Build the plan from which nemo_aligner/planning predicts the cost of the measurement ``job``.

    ``job`` is a point from ``make_point``. ``expert_load`` is the load of the busiest expert
    parallel rank relative to the mean (``Plan.expert_load``).
    """
    local_pairs = -(-job["pairs"] // job["dp"])
    budget = job["micro_batch_tokens"]
    packs = even_packs(local_pairs, job["sequence_length"], budget, job["prefix"])
    if not torch.cuda.is_available():
        # Attention on a CPU copies no keys, and computes prefixes and replies one at a time.
        longest = max(job["prefix"], job["sequence_length"] - job["prefix"])
        packs = replace(packs, kept_keys=1.0, longest=longest)
    return Plan(
        packs,
        precision=Precision(job["precision"]),
        recompute=Recompute(job["recompute"]),
        cpu_offload=job["cpu_offload"],
        expert_load=expert_load,
        ep=job.get("ep", 1),
        fused_kernels=torch.cuda.is_available() and job.get("pointwise_kernels") != "eager",
        **{key: job[key] for key in PLAN_KEYS},
    )


def shape_and_plan(point: Mapping[str, Any]) -> tuple[ModelShape, Plan]:
    """Return the shape and the plan from which nemo_aligner/planning predicts a point's cost."""
    return ModelShape.from_config(point["model"]), plan_of(point)


def compare_memory(
    measured: Mapping[str, float], planned: Memory, unit: float
) -> dict[str, float | None]:
    """Return columns of a table: measured next to planned memory, in units of ``unit`` bytes.

    ``measured`` is the result of ``measure_memory``, or empty where the device's memory was too
    small; the measured columns are then None.
    """
    columns: dict[str, float | None] = {}
    for name, measured_part, planned_bytes in (
        ("weights", "weights", planned.weights),
        ("gradients", "gradients", planned.gradients),
        ("optimizer", "optimizer", planned.optimizer),
        ("kept", "saved", planned.activations),
        ("in all", "total", planned.total),
    ):
        columns[name] = divide(measured.get(measured_part), unit)
        columns["planned" if name == "in all" else f"planned {name}"] = planned_bytes / unit
    return {**columns, "measured/planned": divide(measured.get("total"), planned.total)}


def divide(number: float | None, divisor: float | None) -> float | None:
    """Divide two numbers; None if either is missing, so that the table shows a dash."""
    return None if number is None or divisor is None else number / divisor


def measure_point(job: dict[str, Any]) -> dict[str, Any] | None:
    """Measure the training steps that ``job`` (a point from ``make_point``) describes.

    Every rank calls this function. The main rank returns the tokens of a step over all ranks, the
    seconds of the slowest rank by part of the step, and the memory of the rank that holds most, in
    bytes. Other ranks return None.
    """

    with launch() as world:
        sizes = {key: job[key] for key in ("tp", "pp", "cp", "sequence_parallel", "ring")}
        layout = initialize_layout(**sizes, seed=_SEED, ep=job.get("ep", 1))
        shape = ModelShape.from_config(job["model"])
        bytes_before = resident_bytes()
        learner = build_synthetic_learner(shape, layout, job)
        measured = measure_memory(learner, bytes_before)
        parts = time_parts(learner, job["steps"]) if job["steps"] else {"step": 0.0}
        if job["save"]:
            parts |= time_checkpoint(learner)
        result = {
            "tokens": sum(batch.num_tokens for batch in learner._loader.plan(0).packs),
            "seconds": parts,
            "memory": measured,
        }
        gathered = [None] * world.world_size
        dist.all_gather_object(gathered, result)
        if not world.is_main:
            return None
    ranks = cast("list[dict[str, Any]]", gathered)
    return {
        "tokens": sum(rank["tokens"] for rank in ranks) // (len(ranks) // layout.dp),
        "seconds": max((rank["seconds"] for rank in ranks), key=lambda seconds: seconds["step"]),
        "memory": max((rank["memory"] for rank in ranks), key=lambda memory: memory["total"]),
    }


def build_synthetic_learner(
    shape: ModelShape, layout: ParallelLayout, job: dict[str, Any]
) -> RewardLearner:
    """Build a learner with random weights, on pairs of random tokens.

    ``job`` is a point of ``make_point``; with "spread" the lengths of its sequences differ, and
    "pointwise_kernels", "attention_kernels", "linear_attention_kernels" and "cuda_graphs" are the
    settings ``model.*`` of these names.
    """
    options = _model_options(job)
    model = reward_model.build_reward_model(
        shape,
        layout,
        num_attributes=1,
        precision=Precision(job["precision"]),
        recompute=Recompute(job["recompute"]),
        recompute_layers=job["recompute_layers"],
        kernels=options.kernels,
    )
    torch.manual_seed(_SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=0.02)
    for layer in quantized_layers(model).values():
        layer.store_weight(0.02 * torch.randn(layer.weight_shape, dtype=model.config.params_dtype))
    set_routers(model, trained=False, aux_loss_coeff=0.0)
    if shape.lora is not None:
        train_adapters_alone(model)
    wrapped, optimizer = build_optimized(model, shape, options, 1.0, 1000)
    train = _random_pairs(
        job["pairs"],
        job["sequence_length"],
        job["prefix"],
        shape.vocab_size,
        job.get("spread", False),
    )
    budget = job["micro_batch_tokens"]
    cost = shape.query_key_cost()
    loader = TrainLoader(train, job["pairs"], budget, _SEED, layout.dp_rank, layout.dp, cost)
    # There is no scoring contract: the data are tokens already.
    data = TrainingData(train, [], cast(Any, None), BradleyTerry())
    return RewardLearner(
        wrapped,
        optimizer,
        data,
        loader,
        layout,
        budget,
        cost,
        count_flops=lambda packs: step_flops(shape, Plan(packs)),
    )


def _model_options(job: Mapping[str, Any]) -> ModelConfig:
    pointwise = job.get("pointwise_kernels")
    return ModelConfig(
        # With kernels of other packages, the last bits of a reward may depend on the pack.
        batch_invariant=pointwise in (None, "eager", "triton"),
        freeze_layers=job["freeze_layers"],
        optim=OptimConfig(lr=2e-5, cpu_offload=job["cpu_offload"]),
        pointwise_kernels=None if pointwise is None else PointwiseChoice(pointwise),
        attention_kernels=AttentionChoice(job.get("attention_kernels", "torch")),
        cuda_graphs=job.get("cuda_graphs", False),
        linear_attention_kernels=DeltaChoice(job.get("linear_attention_kernels", "torch")),
    )


def _random_pairs(
    count: int, length: int, prefix: int, vocabulary: int, spread: bool
) -> TokenizedDataset:
    """``count`` pairs of random sequences of up to ``length`` tokens that share ``prefix`` tokens.

    All have ``length`` tokens; with ``spread`` the logarithm of the length is uniform from an
    eighth of it, which resembles the lengths of chats.
    """
    generator = torch.Generator().manual_seed(_SEED)
    sequences = torch.randint(1, vocabulary, (count, 2, length), generator=generator)
    sequences[:, 1, :prefix] = sequences[:, 0, :prefix]
    # The two sequences differ right after the prefix, so that it is not longer by chance.
    sequences[:, 0, prefix], sequences[:, 1, prefix] = 1, 2
    lengths = torch.full((2 * count,), length)
    if spread:
        shares = 8 ** -torch.rand(2 * count, generator=generator)
        lengths = (length * shares).long().clamp(min=prefix + 1)
    rows = zip(sequences.flatten(0, 1).numpy(), lengths.tolist(), strict=True)
    return TokenizedDataset(
        kind=RecordKind.comparison,
        name="train",
        sequences=TokenSequences.of([tokens[:size] for tokens, size in rows]),
        places=lengths - 1,
        records=Records.of(range(count), [2] * count, reply_lengths=lengths - prefix),
        origins=[Origin("random", line + 1) for line in range(count)],
        sources=[""] * count,
        reports=[],
        prefixes=torch.full((count,), prefix),
    )


def measure_memory(learner: RewardLearner, resident: int) -> dict[str, float]:
    """Bytes of this rank: what is allocated between steps, and the peak that a step adds.

    ``resident`` is the process's resident memory in bytes before the model was built.
    """
    standing = _persistent_bytes(learner)
    growth = _peak_growth(lambda: learner.train_step(0))
    expert_load = _measure_expert_load(learner)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - resident
    saved = [0]
    # Count saved bytes in a separate step: the hook on saved tensors keeps them alive for longer,
    # which would change the peak.
    with _count_saved_bytes(learner.model, saved), without_overlap(learner._ddp.ddp_config):
        learner.train_step(1)
    return {
        **standing,
        "saved": float(max(saved)),
        "expert_load": expert_load,
        "step": float(growth),
        "total": sum(standing.values()) + growth,
        "resident": float(resident),
    }


def _measure_expert_load(learner: RewardLearner) -> float:
    """Return the expert load (``Plan.expert_load``) that the previous step had.

    Only layers that compute every token are counted.
    """
    all_routers = routers(learner.model)
    if not all_routers:
        return 1.0
    size = learner.model.config.num_layers, next(iter(all_routers.values())).load.numel()
    load = collect_load(learner.model, *size)[:-1]
    rows = load.sum(0).view(learner._layout.ep, -1).sum(1).double()
    return float(rows.max() / rows.mean())


@contextmanager
def without_overlap(config: Any) -> Iterator[None]:
    """Turn off reducing gradients during the backward pass, for a block with saved-tensor hooks.

    megatron-core marks each weight whose gradient can be reduced early, and the hooks hide the
    mark.
    """
    overlap, config.overlap_grad_reduce = config.overlap_grad_reduce, False
    yield
    config.overlap_grad_reduce = overlap


def _unique_storages(tensors: Any) -> dict[int, torch.UntypedStorage]:
    """Collect the storages of ``tensors`` by their addresses, so that views count only once."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}


def _count_bytes(tensors: Any) -> float:
    return float(sum(storage.nbytes() for storage in _unique_storages(tensors).values()))


def _persistent_bytes(learner: RewardLearner) -> dict[str, float]:
    parameters = list(learner.model.parameters())
    weights = _unique_storages(parameters)
    quantized = [layer.num_weight_bytes for layer in quantized_layers(learner.model).values()]
    return {
        "weights": _count_bytes(parameters) + sum(quantized),
        "gradients": _count_bytes(p.main_grad for p in parameters if p.requires_grad),
        "optimizer": _count_bytes(
            t
            for t in learner.optimizer.state_tensors()
            if t.device == parameters[0].device and t.untyped_storage().data_ptr() not in weights
        ),
    }


@contextmanager
def _count_saved_bytes(model: torch.nn.Module, sizes: list[int]) -> Iterator[None]:
    """Append to ``sizes`` the bytes that autograd saves in each forward pass, except weights."""
    weights = _unique_storages(model.parameters())
    forward = model.forward

    def watched(*arguments: Any, **options: Any) -> Any:
        stores: dict[int, torch.UntypedStorage] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                stores[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            output = forward(*arguments, **options)
        sizes.append(sum(store.nbytes() for store in stores.values()))
        return output

    model.forward = watched  # type: ignore[method-assign]
    yield
    del model.forward


def _peak_growth(step: Callable[[], object]) -> int:
    """Peak bytes that ``step`` allocates in addition to what was allocated before it."""
    if torch.cuda.is_available():
        bytes_before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() - bytes_before
    with _LiveBytes() as live:
        step()
    return live.peak


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of all live tensors that were made inside the block, on a CPU.

    Memory that an operation allocates and frees internally is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, Any] = {}
        self._level = 0
        self.peak = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        # A tensor not seen before that comes as an argument existed before the block: count it as 0
        # bytes, even if the operation returns it.
        self._note((arguments, options), is_new=False)
        result = function(*arguments, **(options or {}))
        self._note(result, is_new=True)
        return result

    def _note(self, tensors: Any, is_new: bool) -> None:
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._watch(storage, storage.nbytes() if is_new else 0)

    def _watch(self, storage: torch.UntypedStorage, size: int) -> None:
        key = storage._cdata

        def gone(reference: object) -> None:
            del self._known[key]
            self._level -= size

        self._known[key] = weakref.ref(storage, gone)
        self._level += size
        self.peak = max(self.peak, self._level)


def _stopwatch(seconds: dict[str, float]) -> Callable[..., Any]:
    """Return a wrapper that adds a function's seconds to ``seconds[part]``.

    On a GPU the wrapper waits for the device before it reads the clock.
    """
    inside: list[str] = []

    def wrap(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            # Recomputation runs a backward pass inside the backward pass; count only the outer one.
            if inside:
                return function(*arguments, **options)
            begun = now()
            inside.append(part)
            result = function(*arguments, **options)
            inside.pop()
            seconds[part] += now() - begun
            return result

        return timed

    return wrap


def time_steps(
    learner: RewardLearner, first: int, count: int
) -> tuple[list[dict[str, float]], float]:
    """Run ``count`` training steps, beginning with number ``first``.

    Returns their metrics and the mean seconds of a step.
    """
    started = now()
    metrics = [learner.train_step(first + number) for number in range(count)]
    return metrics, (now() - started) / count


def time_parts(learner: RewardLearner, steps: int) -> dict[str, float]:
    """Mean seconds of a step and of its parts over ``steps`` steps; ``other`` is the remainder.

    Waiting for adjacent pipeline stages counts as ``other``, waiting for the slowest data parallel
    rank as ``reduce``.
    """
    spent = dict.fromkeys(TIMED_PARTS, 0.0)
    wrap = _stopwatch(spent)
    model, backward = learner.model, torch.autograd.backward
    learner._loader.plan = wrap("data", learner._loader.plan)  # type: ignore[method-assign]
    learner.optimizer.step = wrap("optimizer", learner.optimizer.step)  # type: ignore[method-assign]
    model.forward = wrap("forward", model.forward)
    model.config.finalize_model_grads_func = wrap("reduce", model.config.finalize_model_grads_func)
    torch.autograd.backward = wrap("backward", backward)
    try:
        _, total = time_steps(learner, 2, steps)
    finally:
        torch.autograd.backward = backward
    seconds = {part: spent[part] / steps for part in TIMED_PARTS}
    return {"step": total, **seconds, "other": total - sum(seconds.values())}


def time_checkpoint(
    learner: RewardLearner,
    folder: str | None = None,
    while_writing: Callable[[], object] | None = None,
) -> dict[str, float]:
    """Seconds that a save interrupts training for ("save"), and until it is on disk ("written").

    All ranks call it. The checkpoint goes into a temporary folder, made in ``folder``, which all
    ranks must see. ``while_writing`` is called repeatedly until this rank has written its part.
    """
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        checkpoints = RunCheckpoints(Path(gather_objects(temporary)[0]))
        checkpoints.reserve(learner.model, learner.optimizer)
        started = now()
        checkpoints.save(RunState(1, 1), learner.model, learner.optimizer)
        save_seconds = now() - started
        while while_writing is not None and not checkpoints.is_written:
            while_writing()
        checkpoints.publish()
        written_seconds = now() - started
        dist.barrier()
    return {"save": save_seconds, "written": written_seconds}


if __name__ == "__main__":
    start(lambda: sys.exit(__doc__), point=measure_point)
