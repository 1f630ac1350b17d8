"""A step and a validation on two ranks, of which one has no record to validate on: prints both."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from nemo_aligner.parallel.launch import launch
from nemo_aligner.parallel.layout import ParallelLayout, destroy_layout, initialize_layout
from nemo_aligner.training.learner import RewardLearner
from tests.data.test_packing import dataset
from tests.training import poisoned


def build(layout: ParallelLayout) -> RewardLearner:
    learner = poisoned.build(layout, poisoned.dataset(), bucket_size=500)
    one_record = replace(dataset([9, 5]), name="one")
    learner.data = replace(learner.data, validation=[one_record])
    return learner


def run(layout: ParallelLayout) -> dict[str, Any]:
    at_once, waiting = build(layout), build(layout)
    found = []
    for learner in (at_once, waiting):
        learner.train_step(0)
        if learner is waiting:
            learner.optimizer.finish_update()
        found.append(learner.validate())
    groups = at_once._ddp.bucket_groups
    return {
        "buckets": len(groups),
        "gathered": sum(group.param_gather_dispatched for group in groups),
        "under_way": sum(group.param_gather_handle is not None for group in groups),
        "metrics": found,
    }


def main() -> None:
    # What never comes is an error soon.
    with launch(20.0):
        layout = initialize_layout()
        found: list[Any] = [None] * layout.dp
        dist.all_gather_object(found, run(layout))
        if dist.get_rank() == 0:
            print(json.dumps(found))
        destroy_layout()


if __name__ == "__main__":
    main()
