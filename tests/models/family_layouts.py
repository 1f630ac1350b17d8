"""A step at some layouts, and rewards in bf16: ``family_layouts.py FOLDER ARCHIVE...`` prints them.

Under torchrun; the weights after the step are saved in FOLDER/LAYOUT/ARCHIVE.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from nemo_aligner.batch import Group, PackedBatch, Records
from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained
from nemo_aligner.checkpoint.weights.save import save_weights
from nemo_aligner.checkpoint.weights.store import load_weights
from nemo_aligner.config.common import Precision
from nemo_aligner.config.model import OptimConfig, Recompute, SchedulerConfig
from nemo_aligner.models.step import forward_backward, gather_rewards, infer
from nemo_aligner.models.trainable import wrap_for_training
from nemo_aligner.objectives.bradley_terry import BradleyTerry
from nemo_aligner.parallel.collectives import on_main
from nemo_aligner.parallel.launch import launch
from nemo_aligner.parallel.layout import ParallelLayout, destroy_layout, initialize_layout
from nemo_aligner.training.optimizer.build import build_optimizer
from tests.families import SEQUENCES

LAYOUTS: dict[str, tuple[int, int, bool]] = {
    "TP=2": (2, 1, False),
    "TP=2+SP": (2, 1, True),
    "PP=2": (1, 2, False),
}


def batches() -> list[PackedBatch]:
    """Three pairs; those of the first pack, 69 tokens, have a common prefix."""
    first = PackedBatch.pack(SEQUENCES[:2], Records.of([0], [2]), groups=[Group(2, 30)])
    return [first, PackedBatch.pack(SEQUENCES[2:], Records.of([1, 2], [2, 2]), range(2, 6))]


def load(
    archive: Path,
    layout: ParallelLayout,
    precision: Precision = Precision.fp32,
    recompute: Recompute = Recompute.none,
) -> Any:
    kinds = {"precision": precision, "recompute": recompute}
    return load_pretrained(archive, layout, num_attributes=1, **kinds).model


def everyone(rewards: Any, layout: ParallelLayout) -> list[float]:
    return gather_rewards(rewards, batches(), (6, 1), layout).flatten().tolist()


def step(
    archive: Path,
    layout: ParallelLayout,
    recompute: Recompute = Recompute.none,
    save: Path | None = None,
) -> dict[str, Any]:
    """Rewards before a step and after it, and the norm of its gradient."""
    model = load(archive, layout, recompute=recompute)
    wrapped = wrap_for_training(model)
    config = OptimConfig(lr=0.01, sched=SchedulerConfig(warmup_steps=1))
    optimizer = build_optimizer(wrapped, config, 1.0, 10)
    wrapped.train()
    wrapped.zero_grad_buffer()
    optimizer.zero_grad()
    before = forward_backward(wrapped, batches(), layout, BradleyTerry().loss)
    update = optimizer.step()
    assert update.applied
    optimizer.finish_update()
    after = infer(wrapped, batches(), layout)
    if save is not None:
        on_main(lambda: save.parent.mkdir(exist_ok=True))
        save_weights(model.sharded_state_dict(prefix="model."), save)
    return {
        "before": everyone(before, layout),
        "grad_norm": update.grad_norm,
        "after": everyone(after, layout),
    }


def rewards(
    archive: Path,
    layout: ParallelLayout,
    precision: Precision = Precision.fp32,
    weights: Path | None = None,
) -> list[float]:
    """Of the model in ``archive``, or by the ``weights`` that ``step`` saved of it."""
    model = load(archive, layout, precision)
    if weights is not None:
        state = load_weights(model.sharded_state_dict(prefix="model."), weights)
        model.load_state_dict({key.removeprefix("model."): state[key] for key in state})
    return everyone(infer(model, batches(), layout), layout)


def main(folder: str, *archives: str) -> None:
    with launch(60.0) as world:
        found: dict[str, dict[str, Any]] = {}
        for name, sizes in LAYOUTS.items():
            layout = initialize_layout(*sizes)
            found[name] = {}
            for archive in map(Path, archives):
                save = Path(folder, name, archive.stem)
                in_bf16 = rewards(archive, layout, Precision.bf16)
                trained = step(archive, layout, save=save)
                found[name][archive.stem] = {**trained, "bf16": in_bf16}
            destroy_layout()
        if world.is_main:
            print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
