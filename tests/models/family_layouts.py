"""A step of training at some layouts: ``family_layouts.py ARCHIVE...`` under torchrun prints it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from nemo_aligner.batch import Group, PackedBatch
from nemo_aligner.checkpoint.reward_model import load_pretrained
from nemo_aligner.config.schema import OptimConfig, Precision, SchedulerConfig
from nemo_aligner.models.reward_model import wrap_for_training
from nemo_aligner.models.step import forward_backward, gather_rewards, infer, record_ids_of
from nemo_aligner.parallel.launch import launch
from nemo_aligner.parallel.layout import ParallelLayout, destroy_layout, initialize_layout
from nemo_aligner.training.objective import RankingObjective
from nemo_aligner.training.optimizer import build_optimizer
from tests.families import SEQUENCES

LAYOUTS: dict[str, tuple[int, int, bool]] = {
    "TP=2": (2, 1, False),
    "TP=2+SP": (2, 1, True),
    "PP=2": (1, 2, False),
}


def batches() -> list[PackedBatch]:
    """Three pairs; those of the first pack, 69 tokens, share a beginning."""
    first = PackedBatch.pack(SEQUENCES[:2], [0], 2, groups=[Group(2, 30)])
    return [first, PackedBatch.pack(SEQUENCES[2:], [1, 2], 2)]


def step(archive: Path, layout: ParallelLayout) -> dict[str, Any]:
    """Rewards before a step and after it, and the norm of its gradient."""
    model = load_pretrained(archive, layout, num_attributes=1, precision=Precision.fp32).model
    wrapped = wrap_for_training(model)
    config = OptimConfig(lr=0.01, sched=SchedulerConfig(warmup_steps=1))
    optimizer = build_optimizer(wrapped, config, 1.0, 10)
    places = record_ids_of(batches())

    def everyone(rewards: Any) -> list[float]:
        return gather_rewards(rewards, places, (3, 2, 1), layout).flatten().tolist()

    wrapped.train()
    wrapped.zero_grad_buffer()
    optimizer.zero_grad()
    before = forward_backward(wrapped, batches(), layout, RankingObjective().loss)
    update = optimizer.step()
    assert update.applied
    optimizer.finish_update()
    after = infer(wrapped, batches(), layout)
    return {
        "before": everyone(before),
        "grad_norm": update.grad_norm,
        "after": everyone(after),
    }


def main(*archives: str) -> None:
    with launch(60.0) as world:
        found: dict[str, dict[str, Any]] = {}
        for name, sizes in LAYOUTS.items():
            layout = initialize_layout(*sizes)
            found[name] = {archive: step(Path(archive), layout) for archive in archives}
            destroy_layout()
        if world.is_main:
            print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
