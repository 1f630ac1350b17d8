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
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from tests.harness.once import TURNS

ROOT = Path(__file__).resolve().parents[2]
LOCAL_RANKS = str(ROOT / "tests/harness/local_ranks.py")
HOST = "127.0.0.1"
MOST_PREPARED = 2  # prepared processes of a worker
GRACE_SECS = 30  # torchrun gives the other ranks as long after one has failed
ROOM = " " * 8192  # for the command and environment of a script in /proc
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


class Script:
    """A running script in a fork, with the members of ``subprocess.Popen`` that tests use."""

    def __init__(self, process: PreparedProcess, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._process = process

    def fileno(self) -> int:
        """File descriptor for select; it is readable once this or another script has ended."""
        return self._process.fileno()

    def poll(self) -> int | None:
        while self.returncode is None and self._process.read_end(0):
            pass
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        end = None if timeout is None else time.monotonic() + timeout
        while self.returncode is None:
            left = None if end is None else end - time.monotonic()
            if not self._process.read_end(left if left is None else max(0.0, left)):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended since
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class PreparedProcess:
    """A process that has imported the libraries and forks for each script."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/harness/prepared_process.py"), ROOM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # buffered, select would not see a line that was read ahead
            # pyarrow's allocator would start a thread, and a process with threads cannot fork.
            env={
                **environment,
                "ROOM": ROOM,
                "JE_ARROW_MALLOC_CONF": "background_thread:false",
            },
            cwd=ROOT,
        )
        self._scripts: dict[int, Script] = {}  # those that run, by process id

    def fileno(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def begin(self, job: dict[str, Any]) -> Script:
        """Send a job, wait until its script has begun, and return it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        script = None
        while script is None:  # the libraries are still being imported, or others have ended
            script = self._read_answer()
        return script

    def read_end(self, timeout: float | None) -> bool:
        """Wait up to ``timeout`` seconds until a script has ended; return whether one has."""
        is_readable = bool(select.select([self], [], [], timeout)[0])
        if is_readable:
            self._read_answer()
        return is_readable

    def end(self) -> None:
        """End the process and the scripts that are still running."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _read_answer(self) -> Script | None:
        """Read that a script has begun, which is returned, or has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a prepared process has ended: {self._process.wait()}")
        answer = json.loads(line)
        pid, code = answer["pid"], answer.get("returncode")
        if code is None:
            return self._scripts.setdefault(pid, Script(self, pid))
        self._scripts.pop(pid).returncode = code
        return None


class Prepared:
    """Prepared processes, made when first needed and reused.

    This saves eight seconds of CPU time per rank and torchrun's own process. A script runs in a
    fork of a single-threaded process that has imported this package and others. Two such processes
    serve all ranks in turn. They have different hash seeds, so the order of a set differs between
    even and odd ranks; under torchrun it differs between all.
    """

    def __init__(self) -> None:
        self.is_used = sys.platform == "linux"
        self._environment: dict[str, str] | None = None
        self._processes: list[PreparedProcess] = []
        atexit.register(self.end)

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether the prepared processes can run a script that needs ``environment``."""
        if self._environment is None:
            self._environment = _read_by_libraries(environment)
        return self.is_used and _read_by_libraries(environment) == self._environment

    def start(
        self, command: list[str], environments: list[dict[str, str]], folder: Path, **files: str
    ) -> list[Script]:
        """Start a command on a rank for each environment; ``files``: stdout and stderr."""
        assert self._environment is not None
        while len(self._processes) < min(len(environments), MOST_PREPARED):
            self._processes.append(PreparedProcess(self._environment))
        job = {"command": command, "folder": str(folder), **files}
        try:
            return [
                process.begin({**job, "environment": environment})
                for process, environment in zip(cycle(self._processes), environments, strict=False)
            ]
        except BaseException:
            self.end()
            raise

    def run(
        self,
        command: list[str],
        environment: dict[str, str],
        processes: int,
        timeout: float,
        folder: Path,
    ) -> Done:
        """Run a command like ``subprocess.run`` with python or torchrun, with the same errors."""
        with tempfile.TemporaryDirectory() as temporary:
            files = {name: f"{temporary}/{name}" for name in ("stdout", "stderr")}
            scripts = self.start(command, _environments(environment, processes), folder, **files)
            try:
                is_late = _wait(scripts, timeout)
            finally:
                for script in scripts:
                    script.kill()
                codes = [script.wait() for script in scripts]
            outputs = [Path(file).read_text() for file in files.values()]
        if is_late:
            raise subprocess.TimeoutExpired(command, timeout, *outputs)
        code = codes[0] if processes == 1 else int(any(codes))
        return subprocess.CompletedProcess(command, code, *outputs)

    def end(self) -> None:
        """End all processes; the next run makes new ones."""
        while self._processes:
            self._processes.pop().end()


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


def start_script(
    command: list[str],
    environment: dict[str, str],
    ranks: Sequence[dict[str, str]],
    output: Path,
    folder: Path = ROOT,
    python: str | None = None,
) -> list[Script] | list[subprocess.Popen[bytes]]:
    """Start a script and return its processes: one for each of ``ranks``, which are variables.

    What they print is appended to the file ``output``. With ``python``, that starts them, as a user
    would.
    """
    environments = [{**environment, **of_rank} for of_rank in ranks]
    if python is None and PREPARED.fits(environment):
        files = {"stdout": str(output), "stderr": str(output)}
        return PREPARED.start(command, environments, folder, **files)
    with output.open("ab") as file:
        return [
            subprocess.Popen(
                [python or sys.executable, *command],
                stdout=file,
                stderr=file,
                cwd=folder,
                env=of_rank,
            )
            for of_rank in environments
        ]


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


def _wait(scripts: list[Script], timeout: float) -> bool:
    """Wait for all ranks; return whether they took too long.

    If one fails, the others are stopped, as torchrun does.
    """
    end = time.monotonic() + timeout
    while not any(script.returncode for script in scripts) and _wait_for_an_end(scripts, end):
        pass
    has_failed = any(script.returncode for script in scripts)
    if has_failed:
        for script in scripts:
            script.send_signal(signal.SIGTERM)
        end = min(end, time.monotonic() + GRACE_SECS)
        while _wait_for_an_end(scripts, end):
            pass
    return not has_failed and any(script.returncode is None for script in scripts)


def _wait_for_an_end(scripts: list[Script], end: float) -> bool:
    """Wait until one of them has ended; return whether one has before the time ``end``."""
    running = [script for script in scripts if script.returncode is None]
    ready = select.select(running, [], [], max(0.0, end - time.monotonic()))[0] if running else []
    for script in ready:
        script.poll()
    return bool(ready)


def _environments(environment: dict[str, str], processes: int) -> list[dict[str, str]]:
    if processes == 1:
        return [environment]
    port = free_port()
    return [{**environment, **rank_environment(rank, processes, port)} for rank in range(processes)]


def _read_by_libraries(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without variables that no library reads when it is imported.

    No module of ours reads one when it is imported, and the fork gets the whole environment. It
    forgets TMPDIR. The test's name changes, and the last three are for servers.
    """
    others = (
        "NEMO_ALIGNER_", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "PYTEST_CURRENT_TEST", "TEST_MARK",
        "PYTRITON_HOME", "REWARD_TOKEN",
    )  # fmt: skip
    return {key: value for key, value in environment.items() if not key.startswith(others)}
