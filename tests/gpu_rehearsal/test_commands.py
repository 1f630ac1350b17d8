"""Commands on a GPU that has no data: they run, and wait for it where a decision needs it alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu_rehearsal.conftest import Rehearse, Task

Seen = dict[str, Any]

# By phase what the host may wait for in one call of it, and how often; a step has several packs.
DECISIONS = {
    "step": {
        "copy to host at models/step.py gather_rewards": 1,
        "copy to host at training/optimizer/gradients.py gradient_norm": 1,
    },
    "validation": {"copy to host at models/step.py gather_rewards": 1},
    "score": {"copy to host at models/step.py gather_rewards": 1},
    "values": {"copy to host at models/step.py gather_rewards": 1},
    "critic step": {},
    "save": {},
    "move": {},
}
NAMES = ["bf16", "resumed", "fp16", "offload", "offload resumed", "recompute", "frozen", "fp32"]
NAMES += ["evaluate", "score", "score with cache", "critic"]


def unexpected(seen: Seen, allowed: dict[str, dict[str, int]]) -> list[str]:
    """What the host waited for and is not ``allowed``, with file, line, and how often."""
    found = []
    for phase, limits in allowed.items():
        spent: dict[str, int] = {}
        for wait, count in seen["phases"].get(phase, {"waits": {}})["waits"].items():
            place = wait.split(", line")[0]
            spent[place] = spent.get(place, 0) + count
            if spent[place] > limits.get(place, 0):
                found.append(f"{phase}: {count} times {wait}")
    return found


def command(function: str, config: str, settings: list[str]) -> Task:
    names = {"function": f"nemo_aligner.{function}", "config": f"nemo_aligner.config.{config}"}
    return {"run": "command", "with": {**names, "settings": settings}}


def training(base: Path, pairs: Path, folder: Path, *more: str) -> Task:
    settings = [
        f"pretrained_checkpoint.restore_from_path={base}",
        f"model.data.data_prefix.train=[{pairs}]",
        f"model.data.data_prefix.validation=[{pairs}]",
        f"exp_manager.explicit_log_dir={folder}",
        "exp_manager.create_tensorboard_logger=false",
        "model.global_batch_size=12",
        "model.micro_batch_tokens=256",
        "trainer.rm.val_check_interval=2",
        "trainer.rm.max_epochs=4",
        *more,
    ]
    return command("training.run:train", "training:TrainConfig", settings)


def all_commands(base: Path, pairs: Path, folder: Path) -> dict[str, Task]:
    def train(name: str, *more: str) -> Task:
        return training(base, pairs, folder / name, *more)

    few = "trainer.rm.max_steps=2"
    offload = ["model.optim.cpu_offload=true", "trainer.precision=bf16"]
    archive = folder / "bf16" / "checkpoints" / "megatron_gpt.nemo"
    scoring = {"archive": str(archive), "precision": "bf16"}
    critic = [
        f"pretrained_checkpoint.restore_from_path={archive}",
        f"exp_manager.explicit_log_dir={folder / 'critic'}",
        "exp_manager.create_tensorboard_logger=false",
        "model.global_batch_size=4",
        "model.micro_batch_tokens=256",
        "model.offload_adam_states=true",
    ]
    data = [f"rm_model_file={archive}", f"data.path={pairs}", "model.micro_batch_tokens=256"]
    return {
        "bf16": train("bf16", "trainer.precision=bf16", few),
        "resumed": train("bf16", "trainer.precision=bf16", "trainer.rm.max_steps=4"),
        "fp16": train("fp16", "trainer.precision=fp16", few),
        "offload": train("offload", *offload, few),
        "offload resumed": train("offload", *offload, "trainer.rm.max_steps=4"),
        "recompute": train("recompute", "model.activations_checkpoint_granularity=full", few),
        "frozen": train("frozen", "model.freeze_layers=2", "trainer.precision=bf16", few),
        "fp32": train("fp32", "trainer.precision=fp32", few),
        "evaluate": command("evaluation.run:evaluate", "evaluation:EvaluateConfig", data),
        "score": {"run": "score", "with": {**scoring, "cached_tokens": 0}},
        "score with cache": {"run": "score", "with": {**scoring, "cached_tokens": 512}},
        "critic": {"run": "critic", "with": {"settings": critic}},
    }


@pytest.fixture(scope="module")
def commands(
    rehearse: Rehearse, base: Path, pairs: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Seen]:
    tasks = all_commands(base, pairs, tmp_path_factory.mktemp("commands"))
    # Rounded fp32 products, as some images ask for.
    found = rehearse("commands", list(tasks.values()), TORCH_ALLOW_TF32_CUBLAS_OVERRIDE="1")
    return dict(zip(tasks, found, strict=True))


@pytest.mark.slow(seconds=60)
@pytest.mark.parametrize("name", NAMES)
def test_a_command_runs_and_waits_only_where_a_decision_needs_it(
    commands: dict[str, Seen], name: str
) -> None:
    seen = commands[name]
    assert "error" not in seen, seen["error"]
    assert unexpected(seen, DECISIONS) == []
