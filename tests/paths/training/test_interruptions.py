"""Runs that are killed, stopped and resumed end with the weights of a run that was left alone."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from nemo_aligner.checkpoint.run_lock import lock_run
from tests.distributed.layouts import LORA
from tests.harness import tiny
from tests.harness.once import Once
from tests.training import jobs

Where = tuple[str, str, str]
Numbers = dict[tuple[str, int], float]

STEPS = 6
RUN_STATE = "nemo_aligner.checkpoint.run"
TORCH = "torch.distributed.checkpoint.filesystem"
FORWARD_BACKWARD = "nemo_aligner.training.learner:forward_backward"
WRITE = f"{TORCH}:FileSystemWriter.write_data"
NO_TIME = "trainer.max_time=00:00:00:00"
# Where a run dies, one after the other; whether what it saves is written by the next step or never
# (see interrupted.py); and its newest checkpoint afterwards (0: none). Saves are at steps 2, 4 and
# 6, a checkpoint has its name one step later; the metric is ever the same and the loss on that set
# rises, so the best is step 2.
ACCIDENTS = {
    "while the weights are written": ((f"{TORCH}:_write_item", "", "9"), "prompt", 0),
    "in step 4, while step 2 is still being written": ((FORWARD_BACKWARD, "", "4"), "held", 0),
    "while the save of step 4 waits for that of step 2": (
        ("nemo_aligner.checkpoint.weights.save:PendingSave.finish", "", "1"),
        "held",
        0,
    ),
    "between the weights and their index": (
        (f"{TORCH}:FileSystemWriter.finish", "", "1"),
        "prompt",
        0,
    ),
    "while syncing, before the name": ((f"{RUN_STATE}:sync_to_disk", "", "3"), "prompt", 0),
    "in the backward pass of step 4": ((FORWARD_BACKWARD, "", "4"), "prompt", 2),
    "in step 5, while step 4 is still being written": ((FORWARD_BACKWARD, "", "3"), "held", 2),
    "with its name, before others are removed": (
        (f"{RUN_STATE}:RunCheckpoints._prune", "", "1"),
        "prompt",
        4,
    ),
    "after the last step, which is still being written": (
        ("nemo_aligner.checkpoint.weights.save:PendingSave.finish", "", "1"),
        "held",
        4,
    ),
    "while an older one is deleted": (
        ("shutil:rmtree", "step_00000004.removed", "2"),
        "prompt",
        6,
    ),
    "while the archive is written": (("os:replace", "megatron_gpt.nemo", "1"), "prompt", 6),
}


def settings(base: Path, data: Path, folder: Path, *more: str) -> list[str]:
    heldout = [data / "many.jsonl", data / "one.jsonl"]
    return [
        *tiny.training(base, folder, data / "train.jsonl", heldout),
        "exp_manager.checkpoint_callback_params.monitor=validation-one/ties",
        f"trainer.rm.max_steps={STEPS}",
        "trainer.rm.val_check_interval=2",
        "trainer.rm.save_interval=2",
        *more,
    ]


def train(run: list[str], *more: str, fails: bool = False) -> jobs.Job:
    return jobs.Job("train", [*run, *more], fails=fails)


def interrupted(
    run: list[str],
    accident: str,
    location: Where,
    rank: int = 0,
    writes: str = "prompt",
    environment: dict[str, str] | None = None,
) -> jobs.Job:
    arguments = (accident, *location, str(rank), writes)
    return jobs.Job("train", run, arguments, environment=environment or {}, fails=True)


def newest(folder: Path) -> dict[str, bytes]:
    """The tensors' files of the newest checkpoint, byte by byte."""
    state = max((folder / "checkpoints").glob("step_*")) / "state"
    return {path.name: path.read_bytes() for path in sorted(state.glob("*.distcp"))}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for seed, (name, count) in enumerate({"train": 37, "many": 11, "one": 1}.items()):
        tiny.write_pairs(folder / f"{name}.jsonl", count, seed)
    return folder


@pytest.fixture(scope="module")
def undisturbed(once: Once, base: Path, data: Path) -> Path:
    return once("undisturbed", lambda folder: jobs.run([train(settings(base, data, folder))]))


def test_resume_after_every_kind_of_kill_ends_with_the_bits_of_a_run_left_alone(
    base: Path, data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    run = settings(base, data, tmp_path)
    killed = [
        interrupted(run, "SIGKILL", location, writes=writes)
        for location, writes, _ in ACCIDENTS.values()
    ]
    *accidents, done, refused = jobs.run(
        [*killed, train(run), train(run, "model.global_batch_size=4", fails=True)]
    )
    previous = 0
    for (moment, (_, _, saved)), accident in zip(ACCIDENTS.items(), accidents, strict=True):
        assert accident.returncode == -9, (moment, accident.stdout, accident.stderr)
        # What the one before had left whole.
        assert goes_on_from(accident) == previous, (moment, accident.stdout)
        previous = saved
    assert goes_on_from(done) == previous
    assert "wrote" in done.stdout
    left = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert left == {"step_00000002", "step_00000006", "megatron_gpt.nemo"}
    assert newest(tmp_path) == newest(undisturbed)
    assert tiny.numbers(tmp_path) == tiny.numbers(undisturbed)

    assert refused.returncode == 1
    assert "model.global_batch_size: the checkpoint has 8, this run 4" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert "loading" not in refused.stdout  # a weight


def goes_on_from(done: jobs.Done) -> int:
    """Of which step the checkpoint is that a run began with."""
    match = re.search(r"resumed\s+from\s+\S+step_(\d{8}),", done.stdout)
    return int(match[1]) if match else 0


def test_resume_of_two_ranks_that_were_stopped_killed_and_moved(
    base: Path, data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    two = "model.tensor_model_parallel_size=2"
    run, full, heard = (settings(base, data, tmp_path / name) for name in ("run", "full", "heard"))
    alone, bits = (settings(base, data, tmp_path / name, two) for name in ("alone", "bits"))
    save = (f"{RUN_STATE}:RunCheckpoints.save", "", "1")
    infer = ("nemo_aligner.training.learner:infer_in_parts", "", "1")
    # Another job, which is this process, trains in a folder.
    with lock_run(tmp_path / "locked"):
        results = jobs.run(
            [
                # Rank 1 alone is told to stop, and alone has the time: both save and leave.
                interrupted(run, "SIGTERM", (FORWARD_BACKWARD, "", "3"), rank=1),
                train(run, NO_TIME),
                interrupted(run, "SIGKILL", save, rank=1),
                interrupted(run, "SIGKILL", (WRITE, "", "1"), rank=1),
                # To another layout, which computes the same up to rounding.
                train(run, two),
                interrupted(full, "ENOSPC", (WRITE, "", "2"), rank=1),
                train(full, "trainer.rm.max_steps=3"),
                # Rank 1 alone hears of it; the first of several parts of the larger set has begun.
                interrupted(heard, "SIGINT", infer, rank=1),
                train(heard, "trainer.rm.max_steps=3"),
                train(alone),
                train(bits, NO_TIME),
                train(bits),
                train(settings(base, data, tmp_path / "locked"), fails=True),
            ],
            processes=2,
        )
    stopped, timed, at_save, at_write, _, no_space, goes_on, ctrl_c, later, _, ended, _, locked = (
        results
    )
    assert stopped.returncode == 0, stopped.stderr
    assert "stopped by SIGTERM after step 3" in stopped.stdout
    assert f"stopped by the time limit ({NO_TIME}) after step 4" in timed.stdout
    assert at_save.returncode != 0
    assert at_write.returncode != 0
    assert goes_on_from(at_write) == 4  # nothing came of the save of step 6
    check_moved(tiny.numbers(tmp_path / "run"), tiny.numbers(undisturbed))

    assert no_space.returncode != 0
    message = "step_00000004.partial/state: cannot be written: rank 1: the disk is full, with "
    assert message in no_space.stderr
    assert not (tmp_path / "full/checkpoints/step_00000004.partial").exists()  # it took space
    assert "CheckpointError: " in no_space.stderr
    assert 'File "nemo_aligner' not in no_space.stderr
    assert "step_00000002, after 16 records" in goes_on.stdout

    assert ctrl_c.returncode == 0, ctrl_c.stderr
    assert "step 2: the validation was interrupted" in ctrl_c.stdout
    assert "stopped by Ctrl-C after step 2, which is saved" in ctrl_c.stdout
    assert goes_on_from(later) == 2

    assert locked.returncode != 0
    message = f"locked/run.lock: another job trains in this folder: process {os.getpid()} on "
    assert locked.stderr.count(message) == 1
    assert not (tmp_path / "locked").exists()

    assert "after step 1" in ended.stdout
    assert newest(tmp_path / "bits") == newest(tmp_path / "alone")


def check_moved(moved: Numbers, expected: Numbers) -> None:
    """A run that is asked to stop at step 4 does not stay to validate, and makes it up."""
    assert moved.keys() >= expected.keys()
    for key, value in moved.items():
        assert value == pytest.approx(expected[key], rel=1e-5, abs=1e-6, nan_ok=True), key


def test_stopped_run_that_still_loads_leaves_nothing(
    base: Path, data: Path, tmp_path: Path
) -> None:
    location = ("nemo_aligner.checkpoint.nemo.reward_model:load_backbone", "", "1")
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    codes = {"SIGINT": 130, "SIGTERM": 143}
    run, files = settings(base, data, tmp_path / "run"), tiny.temporary_files_in(unpacked)
    results = jobs.run([interrupted(run, name, location, environment=files) for name in codes])
    for done, (name, code) in zip(results, codes.items(), strict=True):
        assert done.returncode == code, (name, done.stderr)
        assert "stopped before the first step; there is nothing to save" in done.stderr, name
        assert "Traceback" not in done.stderr, name
    assert list(unpacked.iterdir()) == []
    assert not (tmp_path / "run").exists()


@pytest.mark.smoke
def test_resume_of_a_killed_run_with_lora_is_bit_for_bit_and_on_the_same_weights_alone(
    base: Path, data: Path, tmp_path: Path
) -> None:
    """Killed in step 4, it goes on from step 2. Its base is quantized."""
    other = tiny.write_base_nemo(tmp_path / "other.nemo", initializer_range=0.11)
    lora = (*LORA, "model.lora.base_precision=int8")
    uninterrupted, killed = (settings(base, data, tmp_path / name, *lora) for name in ("a", "b"))
    changed = f"pretrained_checkpoint.restore_from_path={other}"
    _, done, refused, resumed = jobs.run(
        [
            train(uninterrupted),
            interrupted(killed, "SIGKILL", (FORWARD_BACKWARD, "", "4")),
            train(killed, changed, fails=True),
            train(killed),
        ]
    )
    assert done.returncode == -9
    assert refused.returncode == 1
    assert "frozen weights: the checkpoint has" in refused.stderr
    assert "step_00000002, after 16 records" in resumed.stdout
    assert newest(tmp_path / "b") == newest(tmp_path / "a")
    assert tiny.numbers(tmp_path / "b") == tiny.numbers(tmp_path / "a")
