"""The parts of Slurm that the scripts use: ``fake_slurm.py sbatch|srun|scontrol ARGUMENTS``.

``sbatch`` runs a copy of the script until it has ended without being requeued; jobs of an array run
one after the other. With ``FAKE_SLURM_TIME_IS_UP=FILE:LINES`` the job's signal is sent in its first
run as soon as FILE has that many lines. With ``FAKE_SLURM_PREEMPTED=FILE:LINES`` the job is killed
in its second run and requeued. ``FAKE_SLURM_NODELIST`` has the names of the nodes. What each job
was told is written to ``FAKE_SLURM_FOLDER``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

FOLDER = Path(os.environ["FAKE_SLURM_FOLDER"])
POLL_S = 0.02


def submit(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("sbatch")
    for option in ("job-name", "time", "signal", "open-mode", "output", "array", "mem"):
        parser.add_argument(f"--{option}")
    for option in ("nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task"):
        parser.add_argument(f"--{option}", type=int)
    for option in ("requeue", "exclusive"):
        parser.add_argument(f"--{option}", action="store_true")
    parser.add_argument("script", type=Path)
    parser.add_argument("rest", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    lines = options.script.read_text().splitlines()
    header = [line.split()[1] for line in lines if line.startswith("#SBATCH ")]
    # The command line takes precedence.
    options = parser.parse_args([*header, *arguments])
    first, _, last = (options.array or "0-0").partition("-")
    tasks = range(int(first), int(last or first) + 1)
    return max(run_job(options, index, task) for index, task in enumerate(tasks))


def run_job(options: argparse.Namespace, index: int, task: int) -> int:
    first_id = int(os.environ["FAKE_SLURM_JOB_ID"])
    job_id = str(first_id + index)
    script = FOLDER / f"slurm_script_{job_id}"
    shutil.copy(options.script, script)
    environment = {
        **os.environ,
        "SLURM_JOB_ID": job_id,
        "SLURM_JOB_NAME": options.job_name,
        "SLURM_SUBMIT_DIR": os.getcwd(),
        "SLURM_JOB_NODELIST": os.environ["FAKE_SLURM_NODELIST"],
        "SLURM_NNODES": str(options.nodes),
        "SLURM_CPUS_PER_TASK": str(options.cpus_per_task),
        "SLURM_NTASKS_PER_NODE": str(options.ntasks_per_node),
        "SLURM_NTASKS": str(options.nodes * options.ntasks_per_node),
    }
    if options.array:
        environment |= {"SLURM_ARRAY_JOB_ID": str(first_id), "SLURM_ARRAY_TASK_ID": str(task)}
    names = {"%x": options.job_name, "%j": job_id, "%A": str(first_id), "%a": str(task)}
    output = options.output
    for placeholder, name in names.items():
        output = output.replace(placeholder, name)
    requeued, restarts = FOLDER / f"requeued_{job_id}", 0
    while True:
        mode = "a" if options.open_mode == "append" else "w"
        with open(output, mode) as log:
            job = subprocess.Popen(
                ["bash", str(script), *options.rest],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=FOLDER,
                start_new_session=True,
            )
            code = wait(job, options.signal, restarts, requeued)
        if not requeued.exists():
            return code
        assert options.requeue, "a job without --requeue was put into the queue again"
        requeued.unlink()
        restarts += 1
        environment["SLURM_RESTART_COUNT"] = str(restarts)


def wait(job: subprocess.Popen[bytes], order: str, restarts: int, requeued: Path) -> int:
    receiver, _, name = order.partition("@")[0].partition(":")
    assert receiver == "B", "only the job's shell is told"
    is_up = has_come("FAKE_SLURM_TIME_IS_UP") if restarts == 0 else never
    is_preempted = has_come("FAKE_SLURM_PREEMPTED") if restarts == 1 else never
    while job.poll() is None:
        if is_up():
            job.send_signal(signal.Signals[f"SIG{name}"])
            return job.wait()
        if is_preempted():
            os.killpg(job.pid, signal.SIGKILL)
            requeued.touch()
        time.sleep(POLL_S)
    return job.returncode


def has_come(variable: str) -> Callable[[], bool]:
    """Whether the file that a variable names has as many lines as the variable says."""
    file, _, count = os.environ.get(variable, "").rpartition(":")
    path = Path(file)
    return lambda: bool(file) and path.is_file() and path.read_text().count("\n") >= int(count)


def never() -> bool:
    return False


def run_step(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("srun")
    parser.add_argument("--kill-on-bad-exit", type=int, default=0)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    count, per_node = (int(os.environ[f"SLURM_NTASKS{end}"]) for end in ("", "_PER_NODE"))
    tasks: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: object) -> None:
        for task in tasks:
            task.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, pass_on)
    for rank in range(count):
        environment = {
            **os.environ,
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": str(count),
            "SLURM_STEP_TASKS_PER_NODE": f"{per_node}(x{os.environ['SLURM_NNODES']})",
            "SLURM_STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % per_node),
        }
        tasks.append(subprocess.Popen(options.command, env=environment))
    ended = False
    while any(task.poll() is None for task in tasks):
        if options.kill_on_bad_exit and not ended and any(task.returncode for task in tasks):
            pass_on(signal.SIGTERM, None)
            ended = True
        time.sleep(POLL_S)
    return max(128 - task.returncode if task.returncode < 0 else task.returncode for task in tasks)


def control(arguments: Sequence[str]) -> int:
    order, job_id = arguments
    assert order == "requeue", order
    (FOLDER / f"requeued_{job_id}").touch()
    return 0


if __name__ == "__main__":
    program = {"sbatch": submit, "srun": run_step, "scontrol": control}[sys.argv[1]]
    sys.exit(program(sys.argv[2:]))
