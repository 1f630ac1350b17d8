"""What learners do on two ranks: ``two_ranks.py FOLDER`` writes it into FOLDER/found.json."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_aligner.checkpoint.run import RunCheckpoints, RunState
from nemo_aligner.config.common import Precision
from nemo_aligner.distributed.collectives import gather_objects
from nemo_aligner.distributed.launch import launch
from nemo_aligner.distributed.layout import ParallelLayout, destroy_layout, initialize_layout
from nemo_aligner.models.reward_model import build_reward_model
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.training_wrap import wrap_for_training
from nemo_aligner.training import learner as learner_module
from nemo_aligner.training.learner import RewardLearner
from nemo_aligner.training.optimizer import Optimizer, build_optimizer
from nemo_aligner.utils.processes import is_main
from tests.data.test_packing import dataset
from tests.distributed.late_copies import play_late_copies
from tests.training import balanced, poisoned
from tests.training import test_optimizer_clipping as clipping

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tp": 2},
    "tp2_sp": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
}

WIDE = ModelShape.from_config(
    {
        "num_layers": 2,
        "hidden_size": 256,
        "ffn_hidden_size": 1024,
        "num_attention_heads": 4,
        "vocab_size": 4096,
        "max_position_embeddings": 64,
        "activation": "fast-swiglu",  # stored as two tensors
        "bias": False,
    }
)


def build(
    layout: ParallelLayout, precision: Precision = Precision.fp32, bucket_size: int | None = 500
) -> RewardLearner:
    return poisoned.build(layout, poisoned.dataset(), precision, bucket_size=bucket_size)


def weights(learner: RewardLearner) -> list[torch.Tensor]:
    learner.optimizer.finish_update()
    return [parameter.detach().clone() for parameter in learner.model.parameters()]


def count_reduced(learner: RewardLearner) -> list[int]:
    """Filled with how many buckets are being reduced when the backward pass of a step ends."""
    counts: list[int] = []
    config = learner.model.config
    finalize = config.finalize_model_grads_func

    def noting(*arguments: Any, **options: Any) -> Any:
        groups = learner._ddp.bucket_groups
        counts.append(sum(group.grad_reduce_handle is not None for group in groups))
        return finalize(*arguments, **options)

    config.finalize_model_grads_func = noting
    return counts


def dispatched(learner: RewardLearner) -> int:
    return sum(group.param_gather_dispatched for group in learner._ddp.bucket_groups)


def train_in_buckets(layout: ParallelLayout, precision: Precision, folder: Path) -> dict[str, Any]:
    """One learner has a bucket for all of its parameters, the others have many.

    One of those goes on from a checkpoint, which is copied while training goes on, as late as it
    may be.
    """
    checkpoints = RunCheckpoints(folder)
    unsplit, many, resumed = (build(layout, precision, size) for size in (None, 500, 500))
    reduced = count_reduced(many)
    losses = {"whole": [], "many": []}
    for step in range(2):
        losses["whole"].append(unsplit.train_step(step)["loss"])
        losses["many"].append(many.train_step(step)["loss"])
    gathered = [dispatched(many)]
    checkpoints.save(RunState(2, 16), many.model, many.optimizer)
    gathered.append(dispatched(many))
    for learner in (unsplit, many):
        for step in (2, 3):
            learner.train_step(step)
    saved = checkpoints.latest()
    checkpoints.load(saved, resumed.model, resumed.optimizer)
    for step in (2, 3):
        resumed.train_step(step)
    ends = [weights(learner) for learner in (unsplit, many, resumed)]
    return {
        "buckets": len(many._ddp.bucket_groups),
        "losses": losses,
        "reduced": reduced,
        "gathered": gathered,
        "resumed_is_same": all(map(torch.equal, ends[1], ends[2])),
        "difference": max(float((a - b).abs().max()) for a, b in zip(*ends[:2], strict=True)),
    }


def validate(layout: ParallelLayout) -> list[dict[str, Any]]:
    """A step and a validation for which one of the ranks has no record; what each rank has."""
    describe = learner_module.describe_rewards

    def describe_and_round(*arguments: Any) -> dict[str, float]:
        """Round otherwise on each rank, as different processors do."""
        metrics = describe(*arguments)
        return {name: value * (1 + dist.get_rank() * 2**-50) for name, value in metrics.items()}

    learner_module.describe_rewards = describe_and_round
    at_once, waiting = build(layout), build(layout)
    all_metrics = []
    for learner in (at_once, waiting):
        one_record = replace(dataset([9, 5]), name="one")
        learner.data = replace(learner.data, validation=[one_record])
        learner.train_step(0)
        if learner is waiting:
            learner.optimizer.finish_update()
        all_metrics.append(learner.validate())
    groups = at_once._ddp.bucket_groups
    return gather_objects(
        {
            "buckets": len(groups),
            "gathered": sum(group.param_gather_dispatched for group in groups),
            "under_way": sum(group.param_gather_handle is not None for group in groups),
            "metrics": all_metrics,
        }
    )


def errors(layout: ParallelLayout) -> list[dict[str, str]]:
    """What every rank says of a reward and of a gradient that are not finite."""
    messages = {
        "reward": poisoned.error_of(
            poisoned.build(layout, poisoned.dataset((3, 4)), poison_rewards=True)
        )
    }
    learner = poisoned.build(layout, poisoned.dataset((5,)))
    poisoned.poison_gradients(learner.model)
    messages["gradient"] = poisoned.error_of(learner)
    return gather_objects(messages)


class Allocated(TorchDispatchMode):
    """How many bytes of new tensors in host memory are asked for."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        makes = func.overloadpacket.__name__ in ("empty", "empty_like", "empty_strided", "zeros")
        if makes and result.device.type == "cpu":
            self.num_bytes += result.nbytes
        return result


def bytes_read() -> int:
    """What this process has read of files until now."""
    counters = Path("/proc/self/io").read_text().split()
    return int(counters[counters.index("rchar:") + 1])


def resume(layout: ParallelLayout, folder: Path) -> list[dict[str, int]]:
    """What each rank reads and allocates to load the optimizer's state, beside what it has of it.

    It has the half of all. Of files the model's weights are not counted.
    """

    def build_both() -> tuple[Any, Optimizer]:
        model = build_reward_model(WIDE, layout, num_attributes=1, precision=Precision.fp32)
        wrapped = wrap_for_training(model, bucket_size=None)
        return model, build_optimizer(wrapped, clipping.CONFIG, 1.0, total_steps=2)

    checkpoints = RunCheckpoints(folder)
    (model, optimizer), (other_model, other) = build_both(), build_both()
    torch.manual_seed(layout.dp_rank)
    for tensor in optimizer.state_tensors():
        tensor.normal_()
    checkpoints.save(RunState(1, 8), model, optimizer)
    saved = checkpoints.latest()
    previous = bytes_read()
    checkpoints.load_model([saved], other_model)
    of_model = bytes_read() - previous
    with Allocated() as allocated:
        previous = bytes_read()
        checkpoints.load(saved, other_model, other)
        of_all = bytes_read() - previous
    return gather_objects(
        {
            "own": sum(tensor.nbytes for tensor in optimizer.state_tensors()),
            "read": of_all - of_model,
            "allocated": allocated.num_bytes,
            "same": all(map(torch.equal, other.state_tensors(), optimizer.state_tensors())),
        }
    )


def main(folder: Path) -> None:
    results: dict[str, Any] = {"errors": {}, "buckets": {}, "auxiliary": {}}
    # What never comes is an error soon.
    with launch(30.0):
        for name, sizes in LAYOUTS.items():
            layout = initialize_layout(**sizes)
            results["errors"][name] = errors(layout)
            if layout.pp == 1:
                learner = balanced.build(folder / "experts.nemo", layout)
                results["auxiliary"][name] = learner.train_step(0)["grad_norm"]
            destroy_layout()
        layout = initialize_layout()
        results["clipping"] = clipping.compare(layout, clipping.LIMIT)
        results["validation"] = validate(layout)
        results["resume"] = resume(layout, folder / "resume")
        play_late_copies(setattr)
        for precision in (Precision.fp32, Precision.bf16):
            checkpoints = folder / precision.value
            results["buckets"][precision.value] = train_in_buckets(layout, precision, checkpoints)
        if is_main():
            (folder / "found.json").write_text(json.dumps(results))
        destroy_layout()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
