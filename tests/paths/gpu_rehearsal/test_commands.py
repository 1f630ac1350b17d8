"""Commands on a GPU without data run, and wait for it only where a decision needs a value."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.harness import tiny
from tests.harness.once import Once
from tests.paths.gpu_rehearsal.conftest import Rehearse, Task

Seen = dict[str, Any]
PARAMETERS = 94_000  # and a few others
# Tensors that a save copies: the weights of each parameter, and fp32 state where it is trained.
MODEL_AND_STATE = 15

# By phase: what the host may wait for in one call, in which file, and how often.
# A step has several packs.
REWARDS = "copy to host at models/step.py"
NORM = "copy to host at training/optimizer.py"
DECISIONS = {
    "step": {REWARDS: 1, NORM: 1},
    # All ranks decide by rank 0's metrics.
    "validation": {REWARDS: 1, "broadcast_object_list at distributed/collectives.py": 1},
    # All packs of a call are queued before the host waits for any of them.
    "begin": {},
    "score": {"synchronize at utils/host_transfer.py": 1},
    "values": {REWARDS: 1},
    "critic step": {NORM: 1, "copy to host at training/critic.py": 1},
    "save": {
        "broadcast_object_list at distributed/collectives.py": 3,
        "synchronize at training/adamw.py": 1,
        "all_gather_object at checkpoint/weights/save.py": 1,
        "broadcast_object_list at checkpoint/weights/save.py": 1,
        "gather_object at checkpoint/weights/save.py": 1,
        "scatter_object_list at checkpoint/weights/save.py": 1,
        # The writing thread, once the copies are complete.
        "synchronize at checkpoint/weights/save.py": 1,
    },
    "move": {"synchronize at distributed/collectives.py": 4},
}
# A copy that starts while weights are computed; and which wait is missing, if any.
LEFT_OUT = {
    "": [],
    "nemo_aligner.utils.host_transfer.wait_for_host_copies": ["writes what another stream reads"],
    "tests.paths.gpu_rehearsal.streams.Stream.wait_stream": [
        "reads what another stream writes",
        "writes what another stream reads",
    ],
}


def ended_well(results: dict[str, Seen]) -> dict[str, Seen]:
    errors = {name: seen["error"] for name, seen in results.items() if "error" in seen}
    assert not errors, "\n".join(f"{name}: {error}" for name, error in errors.items())
    return results


def unexpected(seen: Seen, allowed: dict[str, dict[str, int]]) -> list[str]:
    """Waits of the host that are not ``allowed``: file, line and count."""
    problems = []
    for phase, limits in allowed.items():
        spent: Counter[str] = Counter()
        for wait, count in seen["phases"].get(phase, {"waits": {}})["waits"].items():
            operation, _, place = wait.partition(" at ")
            kind = f"{operation} at {place.split()[0]}"
            spent[kind] += count
            if spent[kind] > limits.get(kind, 0):
                problems.append(f"{phase}: {count} times {wait}")
    return problems


def command(function: str, config: str, settings: list[str]) -> Task:
    names = {"function": f"nemo_aligner.{function}", "config": f"nemo_aligner.config.{config}"}
    return {"run": "command", "with": {**names, "settings": settings}}


def write_data(folder: Path) -> None:
    tiny.write_base_nemo(folder / "base.nemo", num_hidden_layers=2)
    # A step of six records makes several packs.
    tiny.write_pairs(folder / "pairs.jsonl", 12)


def all_tasks(folder: Path) -> dict[str, Task]:
    base, pairs = folder / "base.nemo", folder / "pairs.jsonl"

    def train(name: str, *more: str) -> Task:
        settings = [
            *tiny.training(base, folder / name, pairs, pairs),
            "model.global_batch_size=6",
            "model.data.seq_length=200",
            "model.micro_batch_tokens=256",
            "trainer.rm.val_check_interval=2",
            "trainer.rm.max_epochs=4",
            *more,
        ]
        return command("training.run:train", "training:TrainConfig", settings)

    bf16, two, three = (
        "trainer.precision=bf16",
        "trainer.rm.max_steps=2",
        "trainer.rm.max_steps=3",
    )
    offload = [
        bf16,
        "model.optim.cpu_offload=true",
        "model.freeze_layers=1",
        "model.activations_checkpoint_granularity=full",
    ]
    lora = [
        "trainer.precision=fp16",
        "model.lora.rank=4",
        "model.lora.dropout=0.1",
        "model.lora.base_precision=nf4",
    ]
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
        "bf16": train("bf16", bf16, two),
        "bf16 resumed": train("bf16", bf16, three),
        "offload, frozen, recomputed": train("offload", *offload, two),
        "offload resumed": train("offload", *offload, three),
        "fp16, lora": train("lora", *lora, two),
        "evaluate": command("evaluation.run:evaluate", "evaluation:EvaluateConfig", data),
        "score": {"run": "score", "with": {**scoring, "cached_tokens": 0}},
        "score with cache": {"run": "score", "with": {**scoring, "cached_tokens": 512}},
        "critic": {"run": "critic", "with": {"settings": critic}},
        **{
            f"left out {name}": {"run": "save", "with": {"unheeded": [name] if name else []}}
            for name in LEFT_OUT
        },
    }


SAVING = ["bf16", "bf16 resumed", "offload, frozen, recomputed", "offload resumed", "fp16, lora"]


@pytest.fixture(scope="module")
def seen(rehearse: Rehearse, once: Once) -> dict[str, Seen]:
    tasks = all_tasks(once("rehearsed_data", write_data))
    # fp32 matmuls in TF32, as some container images request.
    results = rehearse("commands", list(tasks.values()), TORCH_ALLOW_TF32_CUBLAS_OVERRIDE="1")
    return ended_well(dict(zip(tasks, results, strict=True)))


def commands(seen: dict[str, Seen]) -> dict[str, Seen]:
    return {name: of_it for name, of_it in seen.items() if not name.startswith("left out")}


def test_rehearsed_commands_wait_only_where_a_decision_needs_it(seen: dict[str, Seen]) -> None:
    # A single rank creates no communicators.
    settings = {"backend": "one_rank", "device_id": "None", "fp32 matmuls": "highest"}
    for name, of_it in commands(seen).items():
        assert unexpected(of_it, DECISIONS) == [], name
        # The host does not wait for a step's update, which it has only queued.
        assert of_it["settings"].get("unfinished train_step", 1) > 0, name
        assert settings.items() <= of_it["settings"].items(), (name, of_it["settings"])
        if name in SAVING:
            assert {"step", "validation", "save"} <= set(of_it["phases"]), name


def test_rehearsed_streams_wait_for_each_other(seen: dict[str, Seen]) -> None:
    """In a save, copies wait for the computation, and the next update waits for the copies."""
    races = {name: of_it["races"] for name, of_it in commands(seen).items() if of_it.get("races")}
    assert not races
    for name in SAVING:
        copies = seen[name]["copies"]
        assert copies["beside"] > MODEL_AND_STATE, name
        assert copies.get("in line", 0) == 0, name
    # Leaving out a wait must be reported as a race.
    for name, expected in LEFT_OUT.items():
        of_it = seen[f"left out {name}"]
        assert of_it["copies"] == {"beside": 1}
        assert sorted(" ".join(race.split()[-5:]) for race in of_it["races"]) == expected, name


def test_moments_on_the_host_stay_there_when_a_run_goes_on(seen: dict[str, Seen]) -> None:
    here, there = (
        seen[name]["phases"]["load"]["bytes_to_gpu"] for name in ("bf16 resumed", "offload resumed")
    )
    # Moments, and fp32 weights of what is frozen there: embeddings and one of two layers.
    assert here - there > 10 * PARAMETERS


def test_critic_optimizer_that_is_away_takes_nothing(seen: dict[str, Seen]) -> None:
    """While a critic computes values, its fp32 weights, moments and gradients are off the GPU."""
    at_start, training, at_end = seen["critic"]["allocated"]
    assert at_start == at_end
    assert training - at_end >= seen["critic"]["optimizer"] + 4 * PARAMETERS
