"""Runs that are killed, stopped and resumed end with the weights of a run that was left alone."""

from __future__ import annotations

import csv
import math
import subprocess
from pathlib import Path

import pytest

from tests import tiny
from tests.once import Once

STEPS = 6
RUN_STATE = "nemo_aligner.checkpoint.runs"
TORCH = "torch.distributed.checkpoint.filesystem"
FORWARD_BACKWARD = "nemo_aligner.training.learner:forward_backward"
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


def arguments(base: Path, data: Path, folder: Path) -> list[str]:
    return [
        f"pretrained_checkpoint.restore_from_path={base}",
        f"model.data.data_prefix.train=[{data / 'train.jsonl'}]",
        f"model.data.data_prefix.validation=[{data / 'many.jsonl'},{data / 'one.jsonl'}]",
        f"exp_manager.explicit_log_dir={folder}",
        "exp_manager.create_tensorboard_logger=false",
        "exp_manager.checkpoint_callback_params.monitor=validation-one/ties",
        "model.data.seq_length=128",
        "model.micro_batch_tokens=160",
        "model.global_batch_size=8",
        "model.optim.lr=1e-3",
        "model.optim.sched.warmup_steps=2",
        f"trainer.rm.max_steps={STEPS}",
        "trainer.rm.max_epochs=10",
        "trainer.rm.val_check_interval=2",
        "trainer.rm.save_interval=2",
    ]


def train(
    settings: list[str], *more: str, processes: int = 1, check: bool = True
) -> subprocess.CompletedProcess[str]:
    return tiny.run_script(
        "examples/train_reward_model.py", *settings, *more, processes=processes, check=check
    )


def interrupt(
    settings: list[str],
    accident: str,
    where: tuple[str, str, str],
    rank: int = 0,
    processes: int = 1,
    writes: str = "prompt",
    env: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    return tiny.run_script(
        "tests/training/interrupted.py",
        accident,
        *where,
        str(rank),
        writes,
        *settings,
        processes=processes,
        check=False,
        env=env,
    )


def newest(folder: Path) -> dict[str, bytes]:
    """The tensors' files of the newest checkpoint, byte by byte."""
    state = max((folder / "checkpoints").glob("step_*")) / "state"
    return {path.name: path.read_bytes() for path in sorted(state.glob("*.distcp"))}


def metrics(folder: Path) -> dict[tuple[int, str], float]:
    """Every number logged by (step, name), without times; a name is logged once a step."""
    found: dict[tuple[int, str], float] = {}
    with (folder / "csv" / "metrics.csv").open(newline="") as lines:
        for row in csv.DictReader(lines):
            step = int(row.pop("step"))
            for name, value in row.items():
                if value and not name.startswith("timing/") and "per_second" not in name:
                    assert (step, name) not in found
                    # A NaN equals no number, but this one is itself.
                    found[step, name] = math.nan if value == "nan" else float(value)
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_base_nemo(tmp_path_factory.mktemp("base") / "base.nemo")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    tiny.write_pairs(folder / "train.jsonl", 37)
    tiny.write_pairs(folder / "many.jsonl", 11, seed=1)
    tiny.write_pairs(folder / "one.jsonl", 1, seed=2)
    return folder


@pytest.fixture(scope="module")
def undisturbed(once: Once, base: Path, data: Path) -> Path:
    return once("undisturbed", lambda folder: train(arguments(base, data, folder)))


@pytest.mark.slow(seconds=100)
def test_killed_again_and_again(base: Path, data: Path, undisturbed: Path, tmp_path: Path) -> None:
    settings = arguments(base, data, tmp_path)
    checkpoints = tmp_path / "checkpoints"
    before = 0
    for moment, (where, writes, saved) in ACCIDENTS.items():
        done = interrupt(settings, "SIGKILL", where, writes=writes)
        assert done.returncode == -9, (moment, done.stdout, done.stderr)
        assert ("resumed" in done.stdout) == (before > 0), (moment, done.stdout)
        whole = sorted(checkpoints.glob("step_????????"))
        assert [int(path.name[5:]) for path in whole][-1:] == ([saved] if saved else []), moment
        before = saved
    done = train(settings)
    assert "wrote" in done.stdout
    left = {path.name for path in checkpoints.iterdir()}
    assert left == {"step_00000002", "step_00000006", "megatron_gpt.nemo"}
    assert newest(tmp_path) == newest(undisturbed)
    assert metrics(tmp_path) == metrics(undisturbed)

    refused = train(settings, "model.global_batch_size=4", check=False)
    assert refused.returncode == 1
    assert "model.global_batch_size: the checkpoint has 8, this run 4" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert "loading" not in refused.stdout  # a weight


@pytest.mark.slow(seconds=60)
def test_two_ranks_stopped_killed_and_moved(
    base: Path, data: Path, undisturbed: Path, tmp_path: Path
) -> None:
    settings = arguments(base, data, tmp_path)
    # Rank 1 alone is told to stop, and alone has the time: both save and leave, with success.
    done = interrupt(
        settings,
        "SIGTERM",
        (FORWARD_BACKWARD, "", "3"),
        rank=1,
        processes=2,
    )
    assert done.returncode == 0, done.stderr
    assert "stopped by SIGTERM after step 3" in done.stdout
    done = train(settings, "trainer.max_time=00:00:00:00", processes=2)
    assert "stopped by the time limit (trainer.max_time=00:00:00:00) after step 4" in done.stdout
    for where in (f"{RUN_STATE}:RunCheckpoints.save", f"{TORCH}:FileSystemWriter.write_data"):
        done = interrupt(settings, "SIGKILL", (where, "", "1"), rank=1, processes=2)
        assert done.returncode != 0
    assert not list((tmp_path / "checkpoints").glob("step_00000006"))
    # To another layout, which computes the same up to rounding.
    train(settings, "model.tensor_model_parallel_size=2", processes=2)
    got, wanted = metrics(tmp_path), metrics(undisturbed)
    # A run that is asked to stop at step 4 does not stay to validate.
    missing = {key for key in wanted if key not in got}
    assert missing == {key for key in wanted if key[0] == 4 and key[1].startswith("validation")}
    for key, value in got.items():
        assert value == pytest.approx(wanted[key], rel=1e-5, abs=1e-6, nan_ok=True), key


@pytest.mark.slow
@pytest.mark.parametrize(("accident", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_run_that_is_stopped_while_it_loads_leaves_nothing(
    base: Path, data: Path, tmp_path: Path, accident: str, code: int
) -> None:
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    done = interrupt(
        arguments(base, data, tmp_path / "run"),
        accident,
        ("nemo_aligner.checkpoint.nemo.reward_model:load_backbone", "", "1"),
        env=tiny.temporary_files_in(unpacked),
    )
    assert done.returncode == code, done.stderr
    assert "stopped before the first step; there is nothing to save" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(unpacked.iterdir()) == []
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_ctrl_c_in_a_validation_leaves_it_and_saves(base: Path, data: Path, tmp_path: Path) -> None:
    settings = arguments(base, data, tmp_path)
    # Rank 1 alone hears of it; the first of several parts of the larger set has begun.
    where = ("nemo_aligner.training.learner:infer_in_parts", "", "1")
    done = interrupt(settings, "SIGINT", where, rank=1, processes=2)
    assert done.returncode == 0, done.stderr
    assert "step 2: the validation was left, and has no result" in done.stdout
    assert "stopped by Ctrl-C after step 2, which is saved" in done.stdout
    assert "resumed from" in train(settings, processes=2).stdout


@pytest.mark.slow
def test_two_ranks_resume_bit_for_bit(base: Path, data: Path, tmp_path: Path) -> None:
    runs = [arguments(base, data, tmp_path / name) for name in ("left_alone", "stopped")]
    layout = "model.tensor_model_parallel_size=2"
    train(runs[0], layout, processes=2)
    done = train(runs[1], layout, "trainer.max_time=00:00:00:00", processes=2)
    assert "after step 1" in done.stdout
    train(runs[1], layout, processes=2)
    assert newest(tmp_path / "stopped") == newest(tmp_path / "left_alone")


@pytest.mark.slow
def test_a_full_disk_ends_the_run_and_leaves_what_was_saved(
    base: Path, data: Path, tmp_path: Path
) -> None:
    settings = arguments(base, data, tmp_path)
    where = (f"{TORCH}:FileSystemWriter.write_data", "", "2")
    done = interrupt(settings, "ENOSPC", where, rank=1, processes=2)
    assert done.returncode != 0
    assert "step_00000004.partial/state: rank 1: [Errno 28] No space left" in done.stderr
    assert "CheckpointError: " in done.stderr
    assert 'File "nemo_aligner' not in done.stderr
    done = train(settings, processes=2)
    assert "resumed from" in done.stdout
    assert "step_00000002, after 16 records" in done.stdout
