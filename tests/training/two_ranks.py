"""What learners do on two ranks: ``two_ranks.py FOLDER`` writes it into FOLDER/found.json."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from nemo_aligner.checkpoint.runs import RunCheckpoints, RunState
from nemo_aligner.config.common import Precision
from nemo_aligner.parallel.collectives import gather_objects, is_main
from nemo_aligner.parallel.launch import launch
from nemo_aligner.parallel.layout import ParallelLayout, destroy_layout, initialize_layout
from nemo_aligner.training.learner import RewardLearner
from tests.data.test_packing import dataset
from tests.parallel.late_copies import play_late_copies
from tests.training import poisoned
from tests.training.optimizer import test_clipping as clipping

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "tp2": {"tp": 2},
    "tp2_sp": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
}


def build(
    layout: ParallelLayout, precision: Precision = Precision.fp32, bucket_size: int | None = 500
) -> RewardLearner:
    return poisoned.build(layout, poisoned.dataset(), precision, bucket_size=bucket_size)


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


def train_in_buckets(layout: ParallelLayout, precision: Precision, folder: Path) -> dict[str, Any]:
    """One learner has a bucket for all of its parameters, the others have many.

    One of those goes on from a checkpoint, which is copied while training goes on, as late as it
    may be.
    """
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


def validate(layout: ParallelLayout) -> list[dict[str, Any]]:
    """A step and a validation for which one of the ranks has no record; what each rank has."""
    at_once, waiting = build(layout), build(layout)
    found = []
    for learner in (at_once, waiting):
        one_record = replace(dataset([9, 5]), name="one")
        learner.data = replace(learner.data, validation=[one_record])
        learner.train_step(0)
        if learner is waiting:
            learner.optimizer.finish_update()
        found.append(learner.validate())
    groups = at_once._ddp.bucket_groups
    return gather_objects(
        {
            "buckets": len(groups),
            "gathered": sum(group.param_gather_dispatched for group in groups),
            "under_way": sum(group.param_gather_handle is not None for group in groups),
            "metrics": found,
        }
    )


def errors(layout: ParallelLayout) -> list[dict[str, str]]:
    """What every rank says of a reward and of a gradient that are not finite."""
    said = {
        "reward": poisoned.error_of(
            poisoned.build(layout, poisoned.dataset((3, 4)), poison_rewards=True)
        )
    }
    learner = poisoned.build(layout, poisoned.dataset((5,)))
    poisoned.poison_gradients(learner.model)
    said["gradient"] = poisoned.error_of(learner)
    return gather_objects(said)


def main(folder: Path) -> None:
    found: dict[str, Any] = {"errors": {}, "buckets": {}}
    # What never comes is an error soon.
    with launch(30.0):
        for name, sizes in LAYOUTS.items():
            found["errors"][name] = errors(initialize_layout(**sizes))
            destroy_layout()
        layout = initialize_layout()
        found["clipping"] = clipping.compare(layout, clipping.LIMIT)
        found["validation"] = validate(layout)
        play_late_copies(setattr)
        for precision in (Precision.fp32, Precision.bf16):
            checkpoints = folder / precision.value
            found["buckets"][precision.value] = train_in_buckets(layout, precision, checkpoints)
        if is_main():
            (folder / "found.json").write_text(json.dumps(found))
        destroy_layout()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
