"""Learners on two data parallel ranks: ``buckets.py PRECISION FOLDER`` prints what they did.

One has a bucket for all of its parameters, the others have many; one of those goes on from a
checkpoint, which is copied while training goes on, as late as it may be.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nemo_aligner.checkpoint.runs import RunCheckpoints, RunState
from nemo_aligner.config.common import Precision
from nemo_aligner.parallel.launch import launch
from nemo_aligner.parallel.layout import ParallelLayout, destroy_layout, initialize_layout
from nemo_aligner.training.learner import RewardLearner
from tests.parallel.late_copies import play_late_copies
from tests.training import poisoned


def build(layout: ParallelLayout, precision: str, bucket_size: int | None) -> RewardLearner:
    data = poisoned.dataset()
    return poisoned.build(layout, data, Precision(precision), bucket_size=bucket_size)


def weights(learner: RewardLearner) -> list[torch.Tensor]:
    learner.optimizer.finish_update()
    return [parameter.detach().clone() for parameter in learner.model.parameters()]


def count_reduced(learner: RewardLearner) -> list[int]:
    """Filled with how many buckets are being reduced when the backward pass of a step ends."""
    found: list[int] = []
    config = learner.model.config
    finalize = config.finalize_model_grads_func

    def noting(*arguments: Any, **options: Any) -> Any:
        groups = learner._ddp.bucket_groups
        found.append(sum(group.grad_reduce_handle is not None for group in groups))
        return finalize(*arguments, **options)

    config.finalize_model_grads_func = noting
    return found


def dispatched(learner: RewardLearner) -> int:
    return sum(group.param_gather_dispatched for group in learner._ddp.bucket_groups)


def run(layout: ParallelLayout, precision: str, folder: Path) -> dict[str, Any]:
    checkpoints = RunCheckpoints(folder)
    whole, many, resumed = (build(layout, precision, size) for size in (None, 500, 500))
    reduced = count_reduced(many)
    losses = {"whole": [], "many": []}
    for step in range(2):
        losses["whole"].append(whole.train_step(step)["loss"])
        losses["many"].append(many.train_step(step)["loss"])
    gathered = [dispatched(many)]
    checkpoints.save(RunState(2, 16), many.model, many.optimizer)
    gathered.append(dispatched(many))
    for learner in (whole, many):
        for step in (2, 3):
            learner.train_step(step)
    saved = checkpoints.latest()
    checkpoints.load(saved, resumed.model, resumed.optimizer)
    for step in (2, 3):
        resumed.train_step(step)
    ends = [weights(learner) for learner in (whole, many, resumed)]
    return {
        "buckets": len(many._ddp.bucket_groups),
        "losses": losses,
        "reduced": reduced,
        "gathered": gathered,
        "resumed_is_same": all(map(torch.equal, ends[1], ends[2])),
        "difference": max(float((a - b).abs().max()) for a, b in zip(*ends[:2], strict=True)),
    }


def main(precision: str, folder: str) -> None:
    play_late_copies(setattr)
    with launch(60.0):
        layout = initialize_layout()
        found = run(layout, precision, Path(folder))
        if dist.get_rank() == 0:
            print(json.dumps(found))
        destroy_layout()


if __name__ == "__main__":
    main(*sys.argv[1:])
