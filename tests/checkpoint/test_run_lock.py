"""The lock on a run's folder: holding it, taking it over, and losing it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from nemo_aligner.checkpoint import run_lock
from nemo_aligner.checkpoint.run import RunCheckpoints, RunState
from nemo_aligner.checkpoint.run_lock import Holder, lock_run
from nemo_aligner.distributed.launch import launch
from nemo_aligner.utils.errors import CheckpointError, ConfigError
from tests.harness import tiny

HOLD = """
import sys
from pathlib import Path
from nemo_aligner.checkpoint.run_lock import lock_run
with lock_run(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""
ELSEWHERE = Holder("node7", 4711, "another boot", "99", "2026-01-02 03:04:05 UTC", "88", "t")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a holder on another machine count as dead after a second instead of a minute."""
    monkeypatch.setattr(run_lock, "BEAT_S", 0.05)
    monkeypatch.setattr(run_lock, "DEAD_AFTER_S", 1.0)
    monkeypatch.setattr(run_lock, "_POLL_S", 0.02)


@pytest.fixture
def holding(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process on this machine that holds the lock of ``tmp_path``."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env=tiny.environment()) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        yield other
        other.kill()


def write(folder: Path, holder: Holder) -> Path:
    path = folder / run_lock.LOCK_NAME
    path.write_text(json.dumps(asdict(holder)))
    return path


def test_lock_is_one_jobs_and_gone_after_it(tmp_path: Path) -> None:
    folder = tmp_path / "results" / "run"
    with lock_run(folder) as lock:
        lock.check()
        text = rf"{lock.path}: another job trains in this folder: process {os.getpid()} on "
        with pytest.raises(CheckpointError, match=text), lock_run(folder):
            pass
        lock.check()
    assert not folder.parent.exists()  # because nothing was written there
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").touch()
    with lock_run(folder):
        pass
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]
    (tmp_path / "file").touch()
    pattern = r"exp_manager.explicit_log_dir: .*file/run cannot be written to: "
    with pytest.raises(ConfigError, match=pattern), lock_run(tmp_path / "file" / "run"):
        pass


def test_lock_of_a_killed_process_is_taken_over_at_once(
    tmp_path: Path,
    holding: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run_lock, "_watch_lock", None)  # fails if the lock were watched
    text = rf"another job trains in this folder: process {holding.pid} on \S+, since 20"
    with pytest.raises(CheckpointError, match=text), lock_run(tmp_path):
        pass
    holding.send_signal(signal.SIGKILL)
    # The process is dead, but still a zombie.
    os.waitid(os.P_PID, holding.pid, os.WEXITED | os.WNOWAIT)
    with lock_run(tmp_path):
        pass
    # Another process has the holder's pid by now: this one.
    again = replace(Holder.of_this_process(), started="1", token="x")
    write(tmp_path, again)
    with lock_run(tmp_path):
        pass
    output = capsys.readouterr().out
    assert f"taken over from a job that has ended: process {holding.pid} on " in output
    assert f"taken over from a job that has ended: {again}" in output


def test_lock_of_another_machine_is_taken_over_without_a_sign_of_life(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, ELSEWHERE)
    over = threading.Event()

    def live() -> None:
        while not over.wait(0.1):
            os.utime(path)

    heart = threading.Thread(target=live)
    heart.start()
    name = "process 4711 on node7, Slurm job 88, since 2026-01-02 03:04:05 UTC"
    with pytest.raises(CheckpointError) as caught, lock_run(tmp_path):
        pass
    over.set()
    heart.join()
    assert str(caught.value) == (
        f"{path}: another job trains in this folder: {name}. Wait until it ends, or set "
        "exp_manager.explicit_log_dir to another folder. If that job is certainly gone, delete "
        f"{path}"
    )
    with lock_run(tmp_path):
        pass
    output = capsys.readouterr().out
    assert f"{path}: held by {name}; waiting up to " in output
    assert f"{path}: taken over from a job that has ended: {name}" in output
    # Not updated for long by the file server's clock, so it is taken over without waiting.
    for content in (json.dumps(asdict(ELSEWHERE)), ""):
        path.write_text(content)
        os.utime(path, (1e9, 1e9))
        with lock_run(tmp_path):
            pass
        assert "waiting" not in capsys.readouterr().out


def test_dead_lock_is_taken_by_one_of_several_jobs(tmp_path: Path) -> None:
    for number in range(50):
        path = write(tmp_path, ELSEWHERE)
        os.utime(path, (1e9, 1e9))
        outcomes: list[str] = []
        barrier, over = threading.Barrier(4), threading.Event()

        def take() -> None:
            barrier.wait()  # noqa: B023
            try:
                with lock_run(tmp_path) as lock:
                    outcomes.append("taken")  # noqa: B023
                    over.wait()  # noqa: B023
                    lock.check()
            except CheckpointError:
                outcomes.append("refused")  # noqa: B023
            if outcomes.count("refused") == 3:  # noqa: B023
                over.set()  # noqa: B023

        jobs = [threading.Thread(target=take, daemon=True) for _ in range(4)]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join(20)
        assert sorted(outcomes) == ["refused"] * 3 + ["taken"], number
        assert list(tmp_path.iterdir()) == [], number


class Unsaved:
    """A model or an optimizer that must not be saved."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} of a run that has lost its lock")


def test_run_that_has_lost_its_lock_writes_nothing(tmp_path: Path) -> None:
    with launch(), lock_run(tmp_path) as lock:
        checkpoints = RunCheckpoints(tmp_path / "checkpoints", lock=lock)
        lock.path.unlink()
        checkpoints.check_lock()  # somebody deleted the file, so it is created again
        assert lock.path.exists()
        assert not checkpoints.has_lost_lock
        path = write(tmp_path, ELSEWHERE)
        os.utime(path, (1e9, 1e9))
        with pytest.raises(CheckpointError, match="lost its folder to process 4711 on node7"):
            checkpoints.save(RunState(1, 8), Unsaved(), Unsaved())
        with pytest.raises(CheckpointError, match="lost its folder to process 4711 on node7"):
            checkpoints.amend(RunState(1, 8))
        lock._heart.join(0.5)
        assert checkpoints.has_lost_lock  # the thread that updates the file has noticed
        assert path.stat().st_mtime == 1e9  # and the thread does not update another job's lock
        assert not (tmp_path / "checkpoints").exists()
    assert path.exists()


def test_run_that_was_suspended_does_not_get_its_lock_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with launch(), lock_run(tmp_path) as lock:
        checkpoints = RunCheckpoints(tmp_path / "checkpoints", lock=lock)
        # The file of a job that lives was deleted by somebody, and is created again at any time.
        lock.path.unlink()
        deleted = time.time()
        while lock._updated < deleted:
            time.sleep(0.01)
        checkpoints.check_lock()
        # While the job is suspended, no thread updates the file. Another job takes it over, trains
        # and removes it.
        lock._over.set()
        lock._heart.join()
        lock.path.unlink()
        monkeypatch.setattr(run_lock, "DEAD_AFTER_S", 0.1)
        time.sleep(0.2)
        with pytest.raises(CheckpointError, match="lost its folder to another job, because"):
            checkpoints.save(RunState(1, 8), Unsaved(), Unsaved())
        assert checkpoints.has_lost_lock
        assert list(tmp_path.iterdir()) == []


def test_lock_that_is_lost_stays_lost_after_the_other_job(tmp_path: Path) -> None:
    with launch(), lock_run(tmp_path) as lock:
        checkpoints = RunCheckpoints(tmp_path / "checkpoints", lock=lock)
        path = write(tmp_path, ELSEWHERE)
        lock._heart.join(20)
        path.unlink()  # the other job ends at once
        with pytest.raises(CheckpointError, match="lost its folder to another job, because"):
            checkpoints.check_lock()
        assert checkpoints.has_lost_lock
        assert list(tmp_path.iterdir()) == []
