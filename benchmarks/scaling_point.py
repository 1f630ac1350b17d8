"""Worker of scaling.py: some training steps of a synthetic model, timed by part, and their memory.

python benchmarks/scaling_point.py JOB      (or under torchrun; JOB is JSON, see scaling.py)
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import OptimConfig, Recompute
from nemo_aligner.distributed.launch import launch
from nemo_aligner.distributed.layout import ParallelLayout, initialize_layout
from nemo_aligner.models.lora import train_adapters_alone
from nemo_aligner.models.reward_model import (
    build_reward_model,
    freeze_lower_layers,
    wrap_for_training,
)
from nemo_aligner.models.shape import ModelShape
from nemo_aligner.training.learner import RewardLearner

_SEED = 1234


def main() -> None:
    job = json.loads(sys.argv[1])
    with launch() as world:
        layout = initialize_layout(job["tp"], job["pp"], job["sequence_parallel"], _SEED)
        shape = ModelShape.from_config(job["model"])
        before = _resident_bytes()
        learner = build_synthetic_learner(shape, layout, job)
        measured = measure_memory(learner, before)
        parts = _time_steps(learner, job["steps"]) if job["steps"] else {"step": 0.0}
        if job["save"]:
            parts |= _time_checkpoint(learner)
        found = {
            "tokens": sum(batch.num_tokens for batch in learner._loader.plan(0).packs),
            "seconds": parts,
            "memory": measured,
        }
        everyone = [None] * world.world_size
        dist.all_gather_object(everyone, found)
        if world.is_main:
            print(json.dumps(_summary(cast(Any, everyone), layout)))


def _summary(ranks: list[dict[str, Any]], layout: ParallelLayout) -> dict[str, Any]:
    """Times of the slowest rank, memory of the fullest; ``tokens`` of a step over all ranks."""
    each = len(ranks) // layout.dp
    fullest = max(ranks, key=lambda rank: rank["memory"]["total"])
    slowest = max(ranks, key=lambda rank: rank["seconds"]["step"])
    return {
        "tokens": sum(rank["tokens"] for rank in ranks) // each,
        "seconds": slowest["seconds"],
        "memory": fullest["memory"],
    }


def build_synthetic_learner(
    shape: ModelShape, layout: ParallelLayout, job: dict[str, Any]
) -> RewardLearner:
    """A learner with random weights, on pairs of random tokens."""
    from nemo_aligner.data.training_data import TrainingData, TrainLoader
    from nemo_aligner.losses.pairwise import BradleyTerry
    from nemo_aligner.training.optimizer.optimizer import build_optimizer

    model = build_reward_model(
        shape,
        layout,
        num_attributes=1,
        precision=Precision(job["precision"]),
        recompute=Recompute(job["recompute"]),
        recompute_layers=job["recompute_layers"],
    )
    torch.manual_seed(_SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=0.02)
    freeze_lower_layers(model, job["freeze_layers"], shape.num_layers)
    if shape.lora is not None:
        train_adapters_alone(model)
    wrapped = wrap_for_training(model)
    optim = OptimConfig(cpu_offload=job.get("cpu_offload", False))
    optimizer = build_optimizer(wrapped, optim, 1.0, 1000)
    train = _random_pairs(job["pairs"], job["sequence_length"], job["prefix"], shape.vocab_size)
    budget = job["micro_batch_tokens"]
    cost = shape.query_key_cost()
    loader = TrainLoader(train, job["pairs"], budget, _SEED, layout.dp_rank, layout.dp, cost)
    # The contract is for texts; these are tokens.
    data = TrainingData(train, [], cast(Any, None), BradleyTerry())
    return RewardLearner(wrapped, optimizer, data, loader, layout, budget, cost)


def _random_pairs(count: int, length: int, prefix: int, vocabulary: int) -> Any:
    from nemo_aligner.batch.packed import Records
    from nemo_aligner.config.common import RecordKind
    from nemo_aligner.data.dataset import TokenizedDataset
    from nemo_aligner.data.record_arrays import TokenSequences
    from nemo_aligner.data.records import Origin

    generator = torch.Generator().manual_seed(_SEED)
    sequences = torch.randint(1, vocabulary, (count, 2, length), generator=generator)
    sequences[:, 1, :prefix] = sequences[:, 0, :prefix]
    # So that the prefix is no longer than that.
    sequences[:, 0, prefix], sequences[:, 1, prefix] = 1, 2
    return TokenizedDataset(
        kind=RecordKind.comparison,
        name="train",
        sequences=TokenSequences.of(list(sequences.flatten(0, 1).numpy())),
        records=Records.of(range(count), [2] * count),
        origins=[Origin("random", line + 1) for line in range(count)],
        reply_lengths=torch.full((2 * count,), length - prefix),
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
    resident = _most_resident_bytes() - resident
    saved = _SavedBytes({t.data_ptr() for t in _storages(learner.model.parameters())})
    # In a step of its own: what a hook has seen lives longer.
    with saved.watch(learner.model), without_overlap(learner._ddp.ddp_config):
        learner.train_step(1)
    return {
        **standing,
        "saved": float(saved.largest),
        "step": float(growth),
        "total": sum(standing.values()) + growth,
        "resident": float(resident),
    }


@contextmanager
def without_overlap(config: Any) -> Iterator[None]:
    """Hooks on saved tensors hide from Megatron what it noted on a weight to reduce it early."""
    overlap, config.overlap_grad_reduce = config.overlap_grad_reduce, False
    yield
    config.overlap_grad_reduce = overlap


def _storages(tensors: Any) -> list[torch.UntypedStorage]:
    """The storages of ``tensors``, each once."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return list(found.values())


def _bytes(tensors: Any) -> float:
    return float(sum(storage.nbytes() for storage in _storages(tensors)))


def _standing_bytes(learner: RewardLearner) -> dict[str, float]:
    parameters = list(learner.model.parameters())
    weights = {storage.data_ptr() for storage in _storages(parameters)}
    inner = [part.optimizer for part in learner.optimizer._optimizer.chained_optimizers]
    held = [value for part in inner for state in part.state.values() for value in state.values()]
    held += [p for part in inner for group in part.param_groups for p in group["params"]]
    return {
        "weights": _bytes(parameters),
        "gradients": _bytes(p.main_grad for p in parameters if p.requires_grad),
        "optimizer": _bytes(
            t
            for t in held
            if isinstance(t, torch.Tensor)
            and t.device == parameters[0].device
            and t.untyped_storage().data_ptr() not in weights
        ),
    }


class _SavedBytes:
    """What autograd keeps of one forward pass: the storages of all saved tensors, each once."""

    def __init__(self, weights: set[int]) -> None:
        self._weights = weights
        self.largest = 0

    @contextmanager
    def watch(self, model: torch.nn.Module) -> Iterator[None]:
        forward = model.forward

        def watched(*arguments: Any, **options: Any) -> Any:
            stores: dict[int, torch.UntypedStorage] = {}

            def note(tensor: torch.Tensor) -> torch.Tensor:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._weights:
                    stores[storage.data_ptr()] = storage
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                output = forward(*arguments, **options)
            self.largest = max(self.largest, sum(store.nbytes() for store in stores.values()))
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


def _resident_bytes() -> int:
    """What this process holds of the machine's memory."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


def _most_resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


_PARTS = ("data", "forward", "backward", "reduce", "optimizer")


class _Stopwatch:
    """Seconds by part, taken by wrapping what the step calls; a GPU finishes each part first."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(_PARTS, 0.0)
        self._is_inside = False

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            if self._is_inside:  # a recomputed layer has a backward pass inside the backward pass
                return function(*arguments, **options)
            start, self._is_inside = now(), True
            result = function(*arguments, **options)
            self._is_inside = False
            self.seconds[part] += now() - start
            return result

        return timed


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _time_steps(learner: RewardLearner, steps: int) -> dict[str, float]:
    """Seconds of a step and of its parts, means over ``steps``; ``other`` is what is left.

    Of the other ranks' time, ``other`` has the wait for the adjacent pipeline stages, and
    ``reduce`` the wait for the slowest.
    """
    watch = _Stopwatch()
    model, backward = learner.model, torch.autograd.backward
    learner._loader.plan = watch.wrap("data", learner._loader.plan)  # type: ignore[method-assign]
    learner.optimizer.step = watch.wrap("optimizer", learner.optimizer.step)  # type: ignore[method-assign]
    model.forward = watch.wrap("forward", model.forward)
    model.config.finalize_model_grads_func = watch.wrap(
        "reduce", model.config.finalize_model_grads_func
    )
    torch.autograd.backward = watch.wrap("backward", backward)
    start = now()
    try:
        for step in range(2, steps + 2):
            learner.train_step(step)
    finally:
        torch.autograd.backward = backward
    total = now() - start
    seconds = {part: spent / steps for part, spent in watch.seconds.items()}
    step_seconds = total / steps
    return {"step": step_seconds, **seconds, "other": step_seconds - sum(seconds.values())}


def _time_checkpoint(learner: RewardLearner) -> dict[str, float]:
    """Seconds that a save holds training up, and until it is written, in a folder all ranks see."""
    from nemo_aligner.checkpoint.run import RunCheckpoints, RunState
    from nemo_aligner.distributed.collectives import gather_objects

    with tempfile.TemporaryDirectory() as own:
        checkpoints = RunCheckpoints(Path(gather_objects(own)[0]))
        checkpoints.reserve(learner.model, learner.optimizer)
        start = now()
        checkpoints.save(RunState(1, 1), learner.model, learner.optimizer)
        held = now() - start
        checkpoints.publish()
        written = now() - start
        dist.barrier()
    return {"save": held, "written": written}


if __name__ == "__main__":
    main()
