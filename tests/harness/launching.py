"""Run scripts on one rank or several, forked from prepared processes or started fresh."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.harness.once import TURNS

ROOT = Path(__file__).resolve().parents[2]
LOCAL_RANKS = str(ROOT / "tests/harness/local_ranks.py")
HOST = "127.0.0.1"
GRACE_SECS = 30  # torchrun gives the other ranks as long after one has failed
Done = subprocess.CompletedProcess[str]

# Environment variables that torchrun sets in the sixth of eight processes, the second of its node.
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "1234",
}


class PreparedRank:
    """A process that has imported the libraries and forks for each script, one at a time."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/harness/prepared_process.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # buffered, select would not see a line that was read ahead
            env=environment,
            cwd=ROOT,
        )
        self._script = 0

    def fileno(self) -> int:
        """File descriptor for select; it is readable once the script has ended."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def send(self, job: dict[str, Any]) -> None:
        """Send a job; its script begins as soon as the libraries are imported."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")

    def begun(self) -> None:
        """Wait until the script of the last job has begun."""
        self._script = self._read_answer()["pid"]

    def returncode(self) -> int:
        """Wait until the script has ended; return its exit code."""
        return self._read_answer()["returncode"]

    def stop(self, order: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            os.kill(self._script, order)

    def end(self) -> None:
        """End the process and a script that is still running."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _read_answer(self) -> dict[str, int]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a prepared process has ended: {self._process.wait()}")
        return json.loads(line)


class Prepared:
    """Prepared processes, one for each rank, made when first needed and reused.

    This saves two seconds of CPU time per rank and torchrun's own process. A script runs in a fork
    of a single-threaded process that has imported other packages but none of ours. Each rank has
    its own hash seed, as under torchrun, so the order of a set differs between ranks.
    """

    def __init__(self) -> None:
        self.is_used = sys.platform == "linux"
        self._environment: dict[str, str] | None = None
        self._ranks: list[PreparedRank] = []
        atexit.register(self.end)

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether the prepared processes can run a script that needs ``environment``."""
        if self._environment is None:
            self._environment = _read_by_libraries(environment)
        return self.is_used and _read_by_libraries(environment) == self._environment

    def run(
        self,
        command: list[str],
        environment: dict[str, str],
        processes: int,
        timeout: float,
        folder: Path,
    ) -> Done:
        """Run a command like ``subprocess.run`` with python or torchrun, with the same errors."""
        assert self._environment is not None
        while len(self._ranks) < processes:
            self._ranks.append(PreparedRank(self._environment))
        ranks = self._ranks[:processes]
        with tempfile.TemporaryDirectory() as temporary:
            files = {name: f"{temporary}/{name}" for name in ("stdout", "stderr")}
            job = {"command": command, "folder": str(folder), **files}
            try:
                for rank, rank_variables in zip(
                    ranks, _environments(environment, processes), strict=True
                ):
                    rank.send({**job, "environment": rank_variables})
                for rank in ranks:
                    rank.begun()
                codes, is_late = _wait(ranks, timeout)
            except BaseException:
                self.end()
                raise
            outputs = [Path(file).read_text() for file in files.values()]
        if is_late:
            raise subprocess.TimeoutExpired(command, timeout, *outputs)
        code = codes[0] if processes == 1 else int(any(codes))
        return subprocess.CompletedProcess(command, code, *outputs)

    def end(self) -> None:
        """End all processes; the next run makes new ones."""
        while self._ranks:
            self._ranks.pop().end()


PREPARED = Prepared()


def launch_script(
    command: list[str],
    environment: dict[str, str],
    processes: int = 1,
    timeout: float = 300.0,
    fresh: bool = False,
    folder: Path = ROOT,
) -> Done:
    """Run a script on ``processes`` ranks. With several, xdist workers take turns.

    With ``fresh``, python or torchrun starts it, as a user would. ``timeout`` counts in seconds
    from this worker's turn. ``folder`` is the working directory.

    Raises:
        subprocess.TimeoutExpired: the script took too long and was killed.
    """
    with TURNS.one() if processes > 1 else contextlib.nullcontext():
        if not fresh and PREPARED.fits(environment):
            return PREPARED.run(command, environment, processes, timeout, folder)
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        return subprocess.run(
            [sys.executable, *(torchrun if processes > 1 else []), *command],
            capture_output=True,
            text=True,
            timeout=timeout,
            env=environment,
            cwd=folder,
        )


def run_code(code: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Done:
    """Run a program in a fresh Python, by default with only the package on its path and no GPU."""
    bare = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "PATH": ""}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=bare if environment is None else environment,
    )


def start_local_ranks(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start ``command`` on two ranks by the package's own launcher, without torchrun."""
    return subprocess.Popen(
        [sys.executable, LOCAL_RANKS, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    )


def run_local_ranks(command: list[str], environment: dict[str, str]) -> Done:
    """Run ``command`` on two ranks by the package's launcher, which runs in a prepared process."""
    return launch_script([LOCAL_RANKS, *command], environment, timeout=120)


def free_port() -> int:
    """A free port outside the range that the kernel assigns to others."""
    while True:
        port = random.SystemRandom().randint(10_000, 20_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((HOST, port))
            return port


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Environment variables that a launcher sets for a rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
    }


def _wait(ranks: list[PreparedRank], timeout: float) -> tuple[list[int], bool]:
    """Wait for all ranks; return their exit codes, and whether they took too long.

    If one fails, the others are stopped, as torchrun does.
    """
    running, codes = list(ranks), list[int]()
    end = time.monotonic() + timeout
    while running and not any(codes) and (ended := _wait_for_ended(running, end)):
        codes += ended
    is_late = bool(running) and not any(codes)
    if not is_late:
        _stop(running, signal.SIGTERM)
        end = min(end, time.monotonic() + GRACE_SECS)
        while running and (ended := _wait_for_ended(running, end)):
            codes += ended
    _stop(running, signal.SIGKILL)
    while running:
        codes += _wait_for_ended(running)
    return codes, is_late


def _wait_for_ended(running: list[PreparedRank], end: float | None = None) -> list[int]:
    """Wait for the next ranks to end; remove them from ``running`` and return their exit codes.

    The result is empty if the time ``end`` comes first.
    """
    left = None if end is None else max(0.0, end - time.monotonic())
    ready = select.select(running, [], [], left)[0]
    running[:] = [rank for rank in running if rank not in ready]
    return [rank.returncode() for rank in ready]


def _stop(ranks: list[PreparedRank], order: signal.Signals) -> None:
    for rank in ranks:
        rank.stop(order)


def _environments(environment: dict[str, str], processes: int) -> list[dict[str, str]]:
    if processes == 1:
        return [environment]
    port = free_port()
    return [{**environment, **rank_environment(rank, processes, port)} for rank in range(processes)]


def _read_by_libraries(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the test's name, which changes, and without variables of ours.

    A prepared process has imported nothing of ours, and its fork gets the whole environment.
    """
    ours = ("PYTEST_CURRENT_TEST", "NEMO_ALIGNER_")
    return {key: value for key, value in environment.items() if not key.startswith(ours)}
