"""Rewards in bf16 at some layouts: ``stream_layouts.py ARCHIVE...`` prints them, under torchrun."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained
from nemo_aligner.config.common import Precision
from nemo_aligner.models.step import gather_rewards, infer
from nemo_aligner.parallel.launch import launch
from nemo_aligner.parallel.layout import ParallelLayout, destroy_layout, initialize_layout
from tests.models.family_layouts import LAYOUTS, batches


def rewards(archive: Path, layout: ParallelLayout, precision: Precision) -> list[float]:
    model = load_pretrained(archive, layout, num_attributes=1, precision=precision).model
    found = infer(model, batches(), layout)
    return gather_rewards(found, batches(), (6, 1), layout).flatten().tolist()


def main(*archives: str) -> None:
    with launch(60.0) as world:
        found: dict[str, dict[str, list[float]]] = {}
        for name, sizes in LAYOUTS.items():
            layout = initialize_layout(*sizes)
            found[name] = {
                path.stem: rewards(path, layout, Precision.bf16) for path in map(Path, archives)
            }
            destroy_layout()
        if world.is_main:
            print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
