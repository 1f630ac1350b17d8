"""A cluster of Slurm itself on this machine: one node of two CPUs and two pretended GPUs."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.harness.launching import free_port

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")
# slurmctld and slurmd are among root's programs in Debian.
PATH = f"{os.environ['PATH']}:/usr/sbin"
MISSING = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
# auth/none and linuxproc: no munge daemon and no cgroups are needed.
SETTINGS = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
SlurmctldPort={control_port}
SlurmdPort={node_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
MpiDefault=none
ReturnToService=2
KillWait=10
SchedulerParameters=batch_sched_delay=1,sched_interval=1
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=2000 Gres=gpu:2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """A running cluster, and its programs."""

    def __init__(self, variables: dict[str, str]) -> None:
        self._variables = variables

    def run(self, *command: str, folder: Path | None = None, **variables: str) -> str:
        """Run a program of Slurm and return its output."""
        done = subprocess.run(
            command,
            cwd=folder,
            env={**self._variables, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    def job(self, job: str) -> dict[str, str]:
        """What ``scontrol show job`` says of a job."""
        words = self.run("scontrol", "show", "job", "-o", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, job: str, *states: str, seconds: float = 120.0) -> str:
        """Wait until a job has one of these states; return it."""
        end = time.monotonic() + seconds
        while (state := self.job(job)["JobState"]) not in states:
            assert time.monotonic() < end, (state, states, self.job(job))
            time.sleep(0.2)
        return state

    def wait_until_idle(self, seconds: float = 60.0) -> None:
        """Wait until the node has ended every job, and knows that it has."""
        end = time.monotonic() + seconds
        while (state := self.run("sinfo", "--noheader", "--format=%t").strip()) != "idle":
            assert time.monotonic() < end, state
            time.sleep(0.2)

    def start_again(self, job: str) -> None:
        """Start a requeued job, for which Slurm itself would wait two minutes."""
        self.wait_for(job, "PENDING")
        self.wait_until_idle()
        # slurmd rejects credentials that are not newer, in whole seconds, than those it revoked.
        time.sleep(2)
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now")


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Start slurmctld and slurmd, and end them with all that they have started."""
    (folder / "state").mkdir(parents=True)
    (folder / "spool").mkdir()
    settings = folder / "slurm.conf"
    settings.write_text(
        SETTINGS.format(
            host=socket.gethostname(),
            folder=folder,
            control_port=free_port(),
            node_port=free_port(),
        )
    )
    # Any character device serves: no task opens it.
    (folder / "gres.conf").write_text("Name=gpu File=/dev/tty0\nName=gpu File=/dev/tty1\n")
    variables = {**os.environ, "SLURM_CONF": str(settings), "PATH": PATH}
    running = Cluster(variables)
    daemons = []
    try:
        for name in ("slurmctld", "slurmd"):
            with (folder / f"{name}.log").open("w") as log:
                command = [name, "-D"]
                daemons.append(subprocess.Popen(command, env=variables, stdout=log, stderr=log))
        running.wait_until_idle()
        yield running
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(timeout=30)
