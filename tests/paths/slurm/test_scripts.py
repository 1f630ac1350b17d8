"""The Slurm scripts with a stand-in for Slurm: ranks, a job's time limit, arrays."""

from __future__ import annotations

import json
import os
import random
import socket
import stat
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from nemo_aligner.training.metric_files import read_metrics
from nemo_aligner.utils.processes import find_process
from tests.harness import tiny
from tests.paths.slurm.real_slurm import MISSING, PATH, cluster

SLURM = tiny.ROOT / "scripts/slurm"
SHELL = [*tiny.ROOT.glob("scripts/*.sh"), *SLURM.iterdir(), tiny.ROOT / ".ci/run"]
# A task that records how it was started and acts as FAKE_TASK says.
TASK = """
import json, os, signal, sys, time
from pathlib import Path
kept = {key: os.environ[key] for key in os.environ if key.startswith(("SLURM_", "MASTER_"))}
line = json.dumps({"arguments": sys.argv[1:], "environment": kept})
is_first = kept["SLURM_PROCID"] == "0"
def stop(number, frame):
    time.sleep(0.5 if is_first else 0)
    sys.exit(int(os.environ["FAKE_TASK_ASKED"]) if is_first else 0)
signal.signal(signal.SIGUSR1, stop)
with Path(os.environ["FAKE_SLURM_FOLDER"], "tasks").open("a") as tasks:
    tasks.write(line + "\\n")
if "SLURM_RESTART_COUNT" not in kept and "FAKE_TASK_ASKED" in os.environ:
    time.sleep(60)
sys.exit(int(os.environ.get("FAKE_TASK_CODE", "0")))
"""


class FakeSlurm:
    """A folder to submit from, with the scripts, and with ``fakes`` of Slurm's programs."""

    def __init__(self, folder: Path, fakes: bool = True) -> None:
        self.folder, self.programs = folder, folder / "programs"
        self.programs.mkdir()
        fake = Path(__file__).with_name("fake_slurm.py")
        for name in ("sbatch", "srun", "scontrol") if fakes else ():
            self.add_program(name, fake, name)
        self.add_program("nemo-aligner", tiny.ROOT / "nemo_aligner/__main__.py")
        for name in ("scripts", "conf"):
            (folder / name).symlink_to(tiny.ROOT / name)

    def add_program(self, name: str, *command: str | Path) -> None:
        path = self.programs / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} {" ".join(map(str, command))} "$@"\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def add_fake_task(self) -> None:
        (self.folder / "task.py").write_text(TASK)
        self.add_program("nemo-aligner", self.folder / "task.py")

    def sbatch(
        self, *arguments: str, nodes: str = "127.0.0.[1-2]", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        variables = tiny.environment(
            FAKE_SLURM_FOLDER=str(self.folder),
            FAKE_SLURM_NODELIST=nodes,
            FAKE_SLURM_JOB_ID=str(job_with_free_port()),
            **environment,
        )
        variables["PATH"] = f"{self.programs}:{variables['PATH']}"
        return subprocess.run(
            ["sbatch", *arguments],
            cwd=self.folder,
            env=variables,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def tasks(self) -> list[dict[str, Any]]:
        """The records of all tasks, in the order of jobs and ranks."""
        lines = [json.loads(line) for line in (self.folder / "tasks").read_text().splitlines()]
        return sorted(lines, key=lambda line: rank_and_job(line["environment"]))

    def log(self) -> str:
        (path,) = self.folder.glob("*.log")
        return path.read_text()


def rank_and_job(environment: dict[str, str]) -> tuple[int, int, int]:
    restarts = int(environment.get("SLURM_RESTART_COUNT", "0"))
    return int(environment["SLURM_JOB_ID"]), restarts, int(environment["SLURM_PROCID"])


def job_with_free_port() -> int:
    """The number of a job whose ranks meet on a free port."""
    while True:
        job = random.SystemRandom().randint(1, 10**6)
        with closing(socket.socket()) as probe:
            if probe.connect_ex(("127.0.0.1", 29400 + job % 1000)) != 0:
                return job


@pytest.fixture
def slurm(tmp_path: Path) -> FakeSlurm:
    return FakeSlurm(tmp_path)


def test_shell_scripts_have_nothing_that_shellcheck_finds() -> None:
    options = ["--external-sources", "--source-path=SCRIPTDIR", "--shell=bash"]
    done = subprocess.run(
        [str(Path(sys.executable).with_name("shellcheck")), *options, *map(str, SHELL)],
        capture_output=True,
        text=True,
        cwd=tiny.ROOT,
    )
    assert len(SHELL) > 5
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("script", "per_node", "nodes", "first", "ranks"),
    [
        ("train_reward_model.sbatch", 2, "gpu[003-004,9],cpu1", "gpu003", 4),
        ("train_reward_model.sbatch", 1, "gpu[07,09]", "gpu07", 2),
        ("train_on_one_node.sbatch", 3, "gpu003", "gpu003", 3),
    ],
)
def test_task_of_slurm_is_a_rank(
    slurm: FakeSlurm, script: str, per_node: int, nodes: str, first: str, ranks: int
) -> None:
    slurm.add_fake_task()
    option = f"--ntasks-per-node={per_node}"
    done = slurm.sbatch(option, f"scripts/slurm/{script}", "a=b c", "d=[e]", nodes=nodes)
    assert done.returncode == 0, slurm.log()
    tasks = slurm.tasks()
    processes = [find_process(task["environment"]) for task in tasks]
    assert [(process.rank, process.local_rank, process.world_size) for process in processes] == [
        (rank, rank % per_node, ranks) for rank in range(ranks)
    ]
    assert {process.master and process.master[0] for process in processes} == {first}
    arguments = ["train", "--config", "conf/train_reward_model.yaml", "a=b c", "d=[e]"]
    assert [task["arguments"] for task in tasks] == [arguments] * ranks


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("", "--kill-on-bad-exit=1 nemo-aligner train a=b"),
        (
            "rm.sif",
            "--kill-on-bad-exit=1 apptainer exec --nv --bind {folder},/data:/d,/big --pwd {folder} "
            "rm.sif nemo-aligner train a=b",
        ),
        (
            "registry.example/rm:1",
            "--kill-on-bad-exit=1 --container-image=registry.example/rm:1 "
            "--container-mounts={folder}:{folder},/data:/d,/big:/big --container-workdir={folder} "
            "nemo-aligner train a=b",
        ),
    ],
    ids=["no image", "apptainer", "pyxis"],
)
def test_task_runs_in_the_container_with_its_cpus(
    tmp_path: Path, image: str, expected: str
) -> None:
    srun = tmp_path / "srun"
    srun.write_text(
        '#!/bin/sh\necho "$OMP_NUM_THREADS $SRUN_CPUS_PER_TASK ${PYTHONNOUSERSITE:-0} $*"\n'
    )
    srun.chmod(0o755)
    variables = tiny.environment(
        PATH=f"{tmp_path}:/usr/bin:/bin",
        CONTAINER_IMAGE=image,
        CONTAINER_MOUNTS="/data:/d,/big",
        SLURM_CPUS_PER_TASK="6",
    )
    variables.pop("OMP_NUM_THREADS")
    variables.pop("PYTHONNOUSERSITE", None)
    command = ["bash", "-ec", f"source {SLURM}/job.sh; launch train a=b"]
    shown = subprocess.check_output(command, cwd=tmp_path, env=variables, text=True)
    # In a container, packages of the user's home are not imported.
    assert shown.strip() == f"6 6 {int(bool(image))} {expected.format(folder=tmp_path)}"


def test_array_of_jobs_has_a_seed_and_a_folder_for_each(slurm: FakeSlurm) -> None:
    slurm.add_fake_task()
    done = slurm.sbatch("--array=3-5", "--job-name=mine", "scripts/slurm/train_seeds.sbatch", "a=b")
    assert done.returncode == 0, done.stderr
    arguments = [task["arguments"][3:] for task in slurm.tasks()]
    assert arguments == [
        ["a=b", f"model.seed={seed}", f"exp_manager.explicit_log_dir=results/mine/seed_{seed}"]
        for seed in (3, 4, 5)
    ]
    assert sorted(path.name[:4] for path in slurm.folder.glob("*.log")) == ["mine"] * 3


@pytest.mark.parametrize(
    ("order", "code", "starts"),
    [
        # In turn: steps are left; the model was written in time; an error during the save.
        ("138", 0, 2),
        ("0", 0, 1),
        ("1", 1, 1),
    ],
)
def test_job_whose_time_is_up_goes_on_where_something_is_left(
    slurm: FakeSlurm, order: str, code: int, starts: int
) -> None:
    """A task's error also ends the job."""
    slurm.add_fake_task()
    done = slurm.sbatch(
        "--ntasks-per-node=1",
        "scripts/slurm/train_reward_model.sbatch",
        FAKE_SLURM_TIME_IS_UP=f"{slurm.folder / 'tasks'}:2",
        FAKE_TASK_ASKED=order,
    )
    assert (done.returncode, len(slurm.tasks())) == (code, 2 * starts), slurm.log()
    assert ("goes back into the queue" in slurm.log()) == (starts == 2)
    if order == "1":
        failed = slurm.sbatch("scripts/slurm/train_on_one_node.sbatch", FAKE_TASK_CODE="1")
        assert failed.returncode in (1, 143)  # which of them comes first is random


def run_settings(folder: Path) -> list[str]:
    """Settings of a small run of 24 steps, without its folder."""
    base = tiny.write_base_nemo(folder / "base.nemo")
    pairs = tiny.write_pairs(folder / "train.jsonl", 40)
    return [
        f"pretrained_checkpoint.restore_from_path={base}",
        f"model.data.data_prefix.train={pairs}",
        "exp_manager.create_tensorboard_logger=false",
        "model.data.seq_length=128",
        "model.micro_batch_tokens=256",
        "model.global_batch_size=8",
        "trainer.precision=fp32",
        "trainer.rm.max_steps=24",
        "trainer.rm.max_epochs=10",
    ]


def check_resumed_run(log: str, resumed: Path, settings: list[str]) -> None:
    """Compare a run that was stopped in time and preempted with one that was left alone."""
    alone = resumed.with_name("alone")
    tiny.run_verb(
        "train",
        "--config",
        "conf/train_reward_model.yaml",
        *settings,
        f"exp_manager.explicit_log_dir={alone}",
        processes=2,
    )
    assert "stopped by SIGUSR1 after step" in log
    assert "goes back into the queue" in log
    assert log.count("resumed from") == 2
    assert weights(resumed) == weights(alone)
    assert numbers(resumed) == numbers(alone)


def test_job_that_is_stopped_and_preempted_ends_as_one_that_was_not(
    slurm: FakeSlurm, tmp_path: Path
) -> None:
    settings, requeued = run_settings(tmp_path), tmp_path / "requeued"
    done = slurm.sbatch(
        "--nodes=2",
        "--ntasks-per-node=1",
        "scripts/slurm/train_reward_model.sbatch",
        *settings,
        f"exp_manager.explicit_log_dir={requeued}",
        FAKE_SLURM_TIME_IS_UP=f"{requeued / 'metrics.jsonl'}:3",
        FAKE_SLURM_PREEMPTED=f"{requeued / 'metrics.jsonl'}:10",
    )
    log = slurm.log()
    assert done.returncode == 0, log
    check_resumed_run(log, requeued, settings)


@pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed: {MISSING} (slurm-wlm)")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may start a node of Slurm")
def test_job_of_slurm_itself_is_stopped_requeued_and_cancelled(
    tmp_path: Path,
) -> None:
    """Two tasks on one node: SIGUSR1 to the job's shell, a requeue by an administrator, scancel."""
    programs = FakeSlurm(tmp_path, fakes=False).programs
    settings, requeued = run_settings(tmp_path), tmp_path / "requeued"
    options = ["--parsable", "--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=1"]
    options += ["--gpus-per-node=2", "scripts/slurm/train_reward_model.sbatch", *settings]

    def submit(folder: Path, *more: str) -> str:
        variables = tiny.environment(PATH=f"{programs}:{PATH}")
        words = [*options, f"exp_manager.explicit_log_dir={folder}", *more]
        return running.run("sbatch", *words, folder=tmp_path, **variables).strip()

    with cluster(tmp_path / "cluster") as running:
        job = submit(requeued)
        wait_for_lines(requeued / "metrics.jsonl", 3)
        running.run("scancel", "--signal=USR1", "--batch", job)
        running.start_again(job)
        wait_for_lines(requeued / "metrics.jsonl", 10)
        running.run("scontrol", "requeue", job)
        running.start_again(job)
        assert running.wait_for(job, "COMPLETED", "FAILED") == "COMPLETED"
        assert running.job(job)["Restarts"] == "2"
        cancelled = tmp_path / "cancelled"
        job = submit(cancelled, "trainer.rm.max_steps=2000", "trainer.rm.max_epochs=1000")
        wait_for_lines(cancelled / "metrics.jsonl", 3)
        running.run("scancel", job)
        running.wait_for(job, "CANCELLED")
        assert [*(cancelled / "checkpoints").glob("step_*")]
    logs = sorted(tmp_path.glob("*.log"), key=lambda path: path.stat().st_mtime)
    check_resumed_run(logs[0].read_text(), requeued, settings)


def wait_for_lines(path: Path, count: int, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not path.is_file() or path.read_text().count("\n") < count:
        assert time.monotonic() < end, path
        time.sleep(0.1)


def weights(folder: Path) -> dict[str, bytes]:
    """The files with tensors of the newest checkpoint, as bytes."""
    state = max((folder / "checkpoints").glob("step_*")) / "state"
    return {path.name: path.read_bytes() for path in sorted(state.glob("*.distcp"))}


def numbers(folder: Path) -> dict[tuple[int, str], float | None]:
    """The logged metrics by step and name, without times."""
    return {
        (row["step"], name): value
        for row in read_metrics(folder / "metrics.jsonl")
        for name, value in row.items()
        if name.startswith("train/") and "per_second" not in name
    }
