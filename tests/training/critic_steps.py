"""``critic_steps.py ARCHIVE FOLDER LAYOUTS``: a critic learns, is saved, and goes on elsewhere.

Each of LAYOUTS trains on the calls of ``rollouts()``, and saves; then again, with a restart after
the first. FOLDER/LAYOUT then has the run, FOLDER/LAYOUT.pt what was seen.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from nemo_aligner.data.rollout import Rollout
from nemo_aligner.utils.errors import TrainingError

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "tp2": {"tp": 2},
    "tp2_sp": {"tp": 2, "sequence_parallel": True},
    "pp2": {"pp": 2},
    "dp2": {},
    "cp2": {"cp": 2},
    "ep2": {"ep": 2},
}
SETTINGS = [
    "model.global_batch_size=4",
    "model.micro_batch_tokens=64",
    "model.loss_clip_val=0.3",
    "model.optim.lr=0.01",
    "model.optim.eps=1e-3",
    "model.optim.weight_decay=0.05",
    "model.optim.sched.name=constant",
    "model.optim.sched.warmup_steps=2",
    "model.optim.sched.min_lr=0",
    "trainer.ppo.gradient_clip_val=0.5",
    "exp_manager.create_tensorboard_logger=false",
    "exp_manager.create_csv_logger=false",
]
ROWS, WIDTH = 7, 20
PROBES = [list(range(3, 3 + length)) for length in (1, 17, 9)]


def make_rollout(seed: int) -> Rollout:
    """Prompts that have no mask, replies that do, padding; a row without any mask."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(3, 300, (ROWS, WIDTH))
    mask = np.zeros((ROWS, WIDTH - 1), dtype=np.float32)
    for row in range(ROWS):
        length = int(rng.integers(6, WIDTH + 1))
        tokens[row, length:] = 0
        mask[row, 3 : length - 1] = 1
    mask[2] = 0
    returns, noise = rng.normal(size=(2, *mask.shape)).astype(np.float32)
    return Rollout(tokens, returns, returns + 0.5 * noise, mask)


def rollouts() -> list[Rollout]:
    return [make_rollout(seed) for seed in range(3)]


def open_run(archive: str, folder: Path, layout: Any, *more: str) -> Any:
    from nemo_aligner.config.load import load_config
    from nemo_aligner.config.serving import ServeCriticConfig
    from nemo_aligner.training.critic import open_critic

    folders = [
        f"pretrained_checkpoint.restore_from_path={archive}",
        f"exp_manager.explicit_log_dir={folder}",
    ]
    return open_critic(load_config(ServeCriticConfig, [*SETTINGS, *folders, *more]), layout)


class SwappedOut:
    """A run whose critic gives way to a reward model, here one weight, right after training."""

    def __init__(self, run: Any) -> None:
        from torch import nn

        from nemo_aligner.config.load import load_config
        from nemo_aligner.config.serving import ServeCriticConfig
        from nemo_aligner.serving.critic import CriticBackend

        config = load_config(ServeCriticConfig, ["trainer.ppo.offload_idle_model=true"])
        scorer: Any = SimpleNamespace(model=nn.Linear(1, 1))
        self._backend = CriticBackend(run, config, scorer)

    def train(self, rollout: Rollout) -> list[Any]:
        from nemo_aligner.serving.engine.rows import Row

        steps = self._backend._train(*vars(rollout).values())
        for _ in range(2):  # also the second return has to bring the updated weights
            self._backend.make_room_for_rewards()
            self._backend._compute_only_values([Row.of(probe) for probe in PROBES])
        return steps

    def save(self) -> str:
        return self._backend._save()


def learn(archive: str, folder: Path, layout: Any, restarts: bool) -> dict[str, Any]:
    run, steps = open_run(archive, folder, layout), []
    probes = [np.array(probe) for probe in PROBES]
    previous = run.learner.values(probes)
    if restarts:
        for number, rollout in enumerate(rollouts()):
            steps += run.learner.train(rollout)
            if number == 0:
                run.save()
                run = open_run(archive, folder, layout)
        path = run.save()
    else:
        swapped = SwappedOut(run)
        for rollout in rollouts():
            steps += swapped.train(rollout)
        path = swapped.save()
    # One sequence, which only one data parallel rank has, after a step that ended by an error.
    bad = replace(rollouts()[1], returns=np.full((ROWS, WIDTH - 1), 3e38, dtype=np.float32))
    values = run.learner.values(probes)
    with suppress(TrainingError):
        run.learner.train(bad)
    return {
        "before": previous,
        "steps": [
            (step.step, step.loss, step.num_tokens, step.grad_norm, step.lr) for step in steps
        ],
        "after": values,
        "after_error": run.learner.values(probes[:1]),
        "path": str(path),
        "samples": run.learner.consumed_samples,
    }


def main(archive: str, folder: str, names: str) -> None:
    import torch

    from nemo_aligner.distributed.launch import launch
    from nemo_aligner.distributed.layout import destroy_layout, initialize_layout
    from nemo_aligner.utils.processes import is_main

    with launch(timeout_seconds=60):
        for name in names.split(","):
            layout = initialize_layout(**LAYOUTS[name])
            outcomes = [
                learn(archive, Path(folder, f"{name}{kind}"), layout, restarts=bool(kind))
                for kind in ("", "_restarted")
            ]
            if is_main():
                torch.save(outcomes, Path(folder, f"{name}.pt"))
            destroy_layout()


if __name__ == "__main__":
    main(*sys.argv[1:])
