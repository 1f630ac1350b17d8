"""A training step of a synthetic model: what the planner says of it, and what it costs.

    python benchmarks/synthetic.py point JOB        (or under torchrun; ``make_point`` makes a job)

For scaling.py, the first hour and the planner's tests. Weights and tokens are random.
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
from nemo_aligner.config.model import ModelConfig, OptimConfig, PointwiseChoice, Recompute
from nemo_aligner.cpu.products import resident_bytes
from nemo_aligner.data.dataset import TokenizedDataset
from nemo_aligner.data.records import Origin
from nemo_aligner.data.token_index import TokenSequences
from nemo_aligner.data.training_data import TrainingData, TrainLoader
from nemo_aligner.distributed.collectives import gather_objects
from nemo_aligner.distributed.launch import launch
from nemo_aligner.distributed.layout import ParallelLayout, initialize_layout
from nemo_aligner.losses.pairwise import BradleyTerry
from nemo_aligner.models import reward_model
from nemo_aligner.models.experts import routers, take_load
from nemo_aligner.models.lora import train_adapters_alone
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.models.training_wrap import set_routers
from nemo_aligner.planning.cost import Plan, even_packs, step_flops
from nemo_aligner.training.build import build_optimized
from nemo_aligner.training.learner import RewardLearner

TIMED = ("data", "forward", "backward", "reduce", "optimizer")
PLANNED = ("tp", "cp", "pp", "dp", "sequence_parallel", "ring", "recompute_layers", "freeze_layers")
_SEED = 1234


def make_point(model: dict[str, Any], precision: str, **changes: Any) -> dict[str, Any]:
    """The job of a worker: one rank and nothing recomputed, but for ``changes``."""
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
    """The model_config of a Llama; ``hidden`` is a multiple of 128."""
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
    """The job in the cost model's terms."""
    mine = -(-job["pairs"] // job["dp"])
    budget = job["micro_batch_tokens"]
    packs = even_packs(mine, job["sequence_length"], budget, job["prefix"])
    if not torch.cuda.is_available():
        # A CPU's attention copies no keys, and takes one segment at a time.
        longest = max(job["prefix"], job["sequence_length"] - job["prefix"])
        packs = replace(packs, kept_keys=1.0, longest=longest)
    return Plan(
        packs,
        precision=Precision(job["precision"]),
        recompute=Recompute(job["recompute"]),
        cpu_offload=job["cpu_offload"],
        expert_load=expert_load,
        ep=job.get("ep", 1),
        **{key: job[key] for key in PLANNED},
    )


def measure_point(job: dict[str, Any]) -> dict[str, Any] | None:
    """Train some steps of a synthetic model, timed by part; every rank calls it.

    The main one returns the tokens of a step over all ranks, the times of the slowest rank and the
    memory of the fullest.
    """

    with launch() as world:
        sizes = {key: job[key] for key in ("tp", "pp", "cp", "sequence_parallel", "ring")}
        layout = initialize_layout(**sizes, seed=_SEED, ep=job.get("ep", 1))
        shape = ModelShape.from_config(job["model"])
        before = resident_bytes()
        learner = build_synthetic_learner(shape, layout, job)
        measured = measure_memory(learner, before)
        parts = time_parts(learner, job["steps"]) if job["steps"] else {"step": 0.0}
        if job["save"]:
            parts |= _time_checkpoint(learner)
        found = {
            "tokens": sum(batch.num_tokens for batch in learner._loader.plan(0).packs),
            "seconds": parts,
            "memory": measured,
        }
        everyone = [None] * world.world_size
        dist.all_gather_object(everyone, found)
        if not world.is_main:
            return None
    ranks = cast("list[dict[str, Any]]", everyone)
    return {
        "tokens": sum(rank["tokens"] for rank in ranks) // (len(ranks) // layout.dp),
        "seconds": max((rank["seconds"] for rank in ranks), key=lambda seconds: seconds["step"]),
        "memory": max((rank["memory"] for rank in ranks), key=lambda memory: memory["total"]),
    }


def build_synthetic_learner(
    shape: ModelShape, layout: ParallelLayout, job: dict[str, Any]
) -> RewardLearner:
    """A learner with random weights, on pairs of random tokens.

    ``job`` is a point of ``make_point``. With ``spread`` the lengths of the sequences differ.
    ``pointwise_kernels`` and ``cuda_graphs`` are the settings of these names.
    """
    options = _options(job)
    model = reward_model.build_reward_model(
        shape,
        layout,
        num_attributes=1,
        precision=Precision(job["precision"]),
        recompute=Recompute(job["recompute"]),
        recompute_layers=job["recompute_layers"],
        pointwise_kernels=options.pointwise_kernels,
    )
    torch.manual_seed(_SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=0.02)
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
    # The contract is for texts; these are tokens.
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


def _options(job: Mapping[str, Any]) -> ModelConfig:
    pointwise = job.get("pointwise_kernels")
    return ModelConfig(
        # Kernels of other packages may give a row other bits in another pack.
        batch_invariant=pointwise in (None, "eager", "triton"),
        freeze_layers=job["freeze_layers"],
        optim=OptimConfig(lr=2e-5, cpu_offload=job["cpu_offload"]),
        pointwise_kernels=None if pointwise is None else PointwiseChoice(pointwise),
        cuda_graphs=job.get("cuda_graphs", False),
    )


def _random_pairs(
    count: int, length: int, prefix: int, vocabulary: int, spread: bool
) -> TokenizedDataset:
    """Pairs of sequences that share ``prefix`` tokens, each of ``length`` tokens at most.

    All have that length, or with ``spread`` their logarithm is distributed evenly from an eighth of
    it, much as the lengths of chats are.
    """
    generator = torch.Generator().manual_seed(_SEED)
    sequences = torch.randint(1, vocabulary, (count, 2, length), generator=generator)
    sequences[:, 1, :prefix] = sequences[:, 0, :prefix]
    # So that the prefix is no longer than that.
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
    """Bytes of this rank: what lies there between steps, and the most that a step adds.

    The process held ``resident`` bytes before the model was built.
    """
    standing = _standing_bytes(learner)
    growth = _peak_growth(lambda: learner.train_step(0))
    expert_load = _expert_load(learner)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - resident
    saved = [0]
    # In a step of its own: what a hook has seen lives longer.
    with _watching_saved(learner.model, saved), without_overlap(learner._ddp.ddp_config):
        learner.train_step(1)
    return {
        **standing,
        "saved": float(max(saved)),
        "expert_load": expert_load,
        "step": float(growth),
        "total": sum(standing.values()) + growth,
        "resident": float(resident),
    }


def _expert_load(learner: RewardLearner) -> float:
    """As ``Plan`` has it, of the step before, over the layers that compute every token."""
    if not routers(learner.model):
        return 1.0
    load = take_load(learner.model, learner.model.config.num_layers)[:-1]
    rows = load.sum(0).view(learner._layout.ep, -1).sum(1).double()
    return float(rows.max() / rows.mean())


@contextmanager
def without_overlap(config: Any) -> Iterator[None]:
    """Hooks on saved tensors hide from Megatron what it noted on a weight to reduce it early."""
    overlap, config.overlap_grad_reduce = config.overlap_grad_reduce, False
    yield
    config.overlap_grad_reduce = overlap


def _storages(tensors: Any) -> dict[int, torch.UntypedStorage]:
    """The storages of ``tensors``, each once, by address."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}


def _bytes(tensors: Any) -> float:
    return float(sum(storage.nbytes() for storage in _storages(tensors).values()))


def _standing_bytes(learner: RewardLearner) -> dict[str, float]:
    parameters = list(learner.model.parameters())
    weights = _storages(parameters)
    return {
        "weights": _bytes(parameters),
        "gradients": _bytes(p.main_grad for p in parameters if p.requires_grad),
        "optimizer": _bytes(
            t
            for t in learner.optimizer.state_tensors()
            if t.device == parameters[0].device and t.untyped_storage().data_ptr() not in weights
        ),
    }


@contextmanager
def _watching_saved(model: torch.nn.Module, sizes: list[int]) -> Iterator[None]:
    """Add to ``sizes`` the bytes that autograd keeps of each forward pass, weights apart."""
    weights = _storages(model.parameters())
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
    """The most bytes that ``step`` has allocated beside those that were there before it."""
    if torch.cuda.is_available():
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() - before
    with _LiveBytes() as live:
        step()
    return live.peak


class _LiveBytes(TorchDispatchMode):
    """The bytes of all tensors made inside the block that are still there; for the CPU.

    What an operation allocates and frees inside itself is not seen.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, Any] = {}
        self._level = 0
        self.peak = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        # What an operation takes and nobody has seen was there before: it may give it back.
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
    """Wrap what a step calls, to add up seconds by part; a GPU finishes each part first."""
    inside: list[str] = []

    def wrap(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            if inside:  # a recomputed layer has a backward pass inside the backward pass
                return function(*arguments, **options)
            begun = now()
            inside.append(part)
            result = function(*arguments, **options)
            inside.pop()
            seconds[part] += now() - begun
            return result

        return timed

    return wrap


def time_parts(learner: RewardLearner, steps: int) -> dict[str, float]:
    """Seconds of a step and of its parts, means over ``steps``; ``other`` is what is left.

    Of the other ranks' time, ``other`` has the wait for the adjacent pipeline stages, and
    ``reduce`` the wait for the slowest.
    """
    spent = dict.fromkeys(TIMED, 0.0)
    wrap = _stopwatch(spent)
    model, backward = learner.model, torch.autograd.backward
    learner._loader.plan = wrap("data", learner._loader.plan)  # type: ignore[method-assign]
    learner.optimizer.step = wrap("optimizer", learner.optimizer.step)  # type: ignore[method-assign]
    model.forward = wrap("forward", model.forward)
    model.config.finalize_model_grads_func = wrap("reduce", model.config.finalize_model_grads_func)
    torch.autograd.backward = wrap("backward", backward)
    begun = now()
    try:
        for step in range(2, steps + 2):
            learner.train_step(step)
    finally:
        torch.autograd.backward = backward
    total = (now() - begun) / steps
    seconds = {part: spent[part] / steps for part in TIMED}
    return {"step": total, **seconds, "other": total - sum(seconds.values())}


def _time_checkpoint(learner: RewardLearner) -> dict[str, float]:
    """Seconds that a save holds training up, and until it is written, in a folder all ranks see."""

    with tempfile.TemporaryDirectory() as own:
        checkpoints = RunCheckpoints(Path(gather_objects(own)[0]))
        checkpoints.reserve(learner.model, learner.optimizer)
        begun = now()
        checkpoints.save(RunState(1, 1), learner.model, learner.optimizer)
        held = now() - begun
        checkpoints.publish()
        written = now() - begun
        dist.barrier()
    return {"save": held, "written": written}


if __name__ == "__main__":
    start(lambda: sys.exit(__doc__), point=measure_point)
