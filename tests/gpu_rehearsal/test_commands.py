"""Commands on a GPU that has no data: they run, and wait for it where a decision needs it alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu_rehearsal.conftest import Rehearse, Task

Seen = dict[str, Any]
PARAMETERS = 168_000  # and some more

# By phase what the host may wait for in one call of it, and how often; a step has several packs.
REWARDS = "copy to host at models/step.py gather_rewards"
NORM = "copy to host at training/optimizer/gradients.py gradient_norm"
# Megatron asks on the host whether there is anything to divide by.
COUNT = "item at models/step.py _run_schedule"
DECISIONS = {
    "step": {REWARDS: 1, NORM: 1, COUNT: 1},
    "validation": {REWARDS: 1},
    "score": {REWARDS: 1},
    "values": {REWARDS: 1},
    "critic step": {NORM: 1, COUNT: 1, "copy to host at training/critic.py _sum_over_ranks": 1},
    "save": {
        "broadcast_object_list at parallel/collectives.py broadcast_object": 3,
        "synchronize at training/optimizer/host_moments.py wait": 1,
        "all_gather_object at checkpoint/weights/save.py __init__": 1,
        "broadcast_object_list at checkpoint/weights/save.py __init__": 1,
        "gather_object at checkpoint/weights/save.py __init__": 1,
        "scatter_object_list at checkpoint/weights/save.py __init__": 1,
        # The thread that writes, when the copies are there.
        "synchronize at checkpoint/weights/save.py _write": 1,
        # Where torch's AdamW counts its steps; fp16's loss scale.
        "copy to host at training/optimizer/megatron_internals.py _with_counts_on_host": 1,
        "copy to host at training/optimizer/optimizer.py sharded_state_dict": 1,
    },
    "move": {"synchronize at parallel/device.py wait_for_device": 4},
}
# A loss scale is asked for, and whether the gradient has overflowed.
FP16 = {
    "item at training/optimizer/optimizer.py loss_scale": 1,
    "item at training/optimizer/optimizer.py step": 1,
}
NAMES = ["bf16", "resumed", "fp16", "offload", "offload resumed", "recompute", "frozen", "lora"]
SAVING = list(NAMES)
NAMES += ["evaluate", "score", "score with cache", "critic"]
# Tensors that a save copies: of each parameter the weights, and where it is trained fp32 state.
MODEL_AND_STATE = 27


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
        "model.data.seq_length=200",
        "model.micro_batch_tokens=256",
        "model.data.allow_prompt_overlap=true",
        "trainer.rm.val_check_interval=2",
        "trainer.rm.max_epochs=4",
        *more,
    ]
    return command("training.run:train", "training:TrainConfig", settings)


def all_commands(base: Path, pairs: Path, folder: Path) -> dict[str, Task]:
    def train(name: str, *more: str) -> Task:
        return training(base, pairs, folder / name, *more)

    few = "trainer.rm.max_steps=2"
    lora = ["model.lora.rank=4", "model.lora.dropout=0.1", "trainer.precision=bf16"]
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
        "lora": train("lora", *lora, few),
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
    step = DECISIONS["step"] | (FP16 if name == "fp16" else {})
    assert unexpected(seen, DECISIONS | {"step": step}) == []
    # What is timed is done: the update is a part of its step.
    assert seen["settings"].get("unfinished train_step", 0) == 0
    assert seen["settings"]["backend"] == "nccl"
    assert seen["settings"]["device_id"] == "cuda:0"
    assert seen["settings"]["fp32 products"] == "highest"


@pytest.mark.slow(seconds=60)
@pytest.mark.parametrize("name", NAMES)
def test_streams_wait_for_each_other(commands: dict[str, Seen], name: str) -> None:
    """Of a save: that of its copies for what computes, and the next update for them."""
    seen = commands[name]
    assert "error" not in seen, seen["error"]
    assert seen.get("races", {}) == {}
    if name in SAVING:
        assert seen["copies"]["beside"] > MODEL_AND_STATE
        assert seen["copies"].get("in line", 0) == 0


@pytest.mark.slow(seconds=5)
def test_a_wait_that_is_left_out_is_seen(rehearse: Rehearse) -> None:
    left_out = {
        "": [],
        "nemo_aligner.parallel.host_copies.before_writing": ["writes what another stream reads"],
        "tests.gpu_rehearsal.streams.Stream.wait_stream": [
            "reads what another stream writes",
            "writes what another stream reads",
        ],
    }
    tasks = [{"run": "save", "with": {"unheeded": [name] if name else []}} for name in left_out]
    for seen, wanted in zip(rehearse("streams", tasks), left_out.values(), strict=True):
        assert "error" not in seen, seen["error"]
        assert seen["copies"] == {"beside": 1}
        found = sorted(" ".join(race.split()[-5:]) for race in seen["races"])
        assert found == wanted


@pytest.mark.slow(seconds=60)
def test_moments_on_the_host_stay_there_when_a_run_goes_on(commands: dict[str, Seen]) -> None:
    here, there = (
        commands[name]["phases"]["load"]["bytes_to_gpu"] for name in ("resumed", "offload resumed")
    )
    assert here - there > 0.9 * 8 * PARAMETERS


@pytest.mark.slow(seconds=60)
def test_an_optimizer_that_is_away_takes_nothing(commands: dict[str, Seen]) -> None:
    """Its weights in fp32 and moments, and its gradients, while a critic gives values."""
    before, training, after = commands["critic"]["allocated"]
    assert before == after
    assert training - after >= commands["critic"]["optimizer"] + 4 * PARAMETERS
