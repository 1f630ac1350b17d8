"""``critic.py ARCHIVE LAYOUTS RESULT``: a critic's values, and the rewards of all beginnings."""

from __future__ import annotations

import sys
from typing import Any

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tp": 2},
    "tp2_sp": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
}
SEQUENCES = [list(range(3, 3 + length)) for length in (5, 21, 1, 12)]


def main(archive: str, names: str, result: str) -> None:
    import torch

    from nemo_aligner.batch import Group, PackedBatch, Records
    from nemo_aligner.checkpoint.nemo.reward_model import load_critic, load_reward_model
    from nemo_aligner.models.step import infer, infer_values
    from nemo_aligner.parallel.launch import launch
    from nemo_aligner.parallel.layout import destroy_layout, initialize_layout

    beginnings = [sequence[:end] for sequence in SEQUENCES for end in range(1, len(sequence) + 1)]
    alike = [[*range(30, 50), 7], [*range(30, 50), 8, 9]]
    batches = [
        PackedBatch.pack(SEQUENCES),
        PackedBatch.pack(alike, Records.of([0], [2]), groups=[Group(2, 20)]),
    ]
    found = {}
    with launch(timeout_seconds=60):
        for name in names.split(","):
            layout = initialize_layout(**LAYOUTS[name])
            model = load_reward_model(archive, layout).model
            rewards = infer(model, [PackedBatch.pack(beginnings)], layout)
            with_prefix = infer(model, batches[1:], layout)
            values = infer_values(load_critic(archive, layout).model, batches, layout)
            if layout.is_last_stage and layout.tp_rank == 0:
                found[name] = {"rewards": rewards, "with_prefix": with_prefix, "values": values}
            destroy_layout()
        torch.save(found, f"{result}.{torch.distributed.get_rank()}")


if __name__ == "__main__":
    main(*sys.argv[1:])
