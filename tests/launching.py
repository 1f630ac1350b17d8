"""Scripts in processes of their own, on one rank or several, from a prepared process or fresh."""

from __future__ import annotations

import atexit
import contextlib
import json
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.once import TURNS

ROOT = Path(__file__).resolve().parent.parent
HOST = "127.0.0.1"
Done = subprocess.CompletedProcess[str]


class Prepared:
    """A process that has imported the libraries and forks into scripts, made when first needed.

    A script begins two seconds of CPU time sooner on each rank, and torchrun's own process is
    spared. It is a fork of one thread that has imported others' packages and none of ours. All
    ranks hash strings alike, which ranks of torchrun do not: what is to see that starts fresh.
    """

    def __init__(self) -> None:
        self.is_used = sys.platform == "linux"
        self._process: subprocess.Popen[str] | None = None
        self._environment: dict[str, str] = {}

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether the libraries would be the same if they were imported in ``environment``."""
        if not self.is_used:
            return False
        if self._process is None:
            self._start(_lasting(environment))
        return _lasting(environment) == self._environment

    def run(
        self, command: list[str], environment: dict[str, str], processes: int, timeout: float
    ) -> Done:
        """As ``subprocess.run`` does by plain python, or by torchrun; its errors, too."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.TemporaryDirectory() as folder:
            files = {name: f"{folder}/{name}" for name in ("stdout", "stderr")}
            job = {
                "command": command,
                "environments": _environments(environment, processes),
                "folder": str(ROOT),
                "timeout": timeout,
                **files,
            }
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            if not line:
                raise RuntimeError(f"the prepared process is gone: {self._process.wait()}")
            answer = json.loads(line)
            said = [Path(file).read_text() for file in files.values()]
        if answer["is_late"]:
            raise subprocess.TimeoutExpired(command, timeout, *said)
        return subprocess.CompletedProcess(command, answer["returncode"], *said)

    def _start(self, environment: dict[str, str]) -> None:
        self._environment = environment
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/prepared_process.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        atexit.register(self._end)

    def _end(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


PREPARED = Prepared()


def launch_script(
    command: list[str],
    environment: dict[str, str],
    processes: int = 1,
    timeout: float = 300.0,
    fresh: bool = False,
) -> Done:
    """Run a script on so many ranks; workers of a test run take turns with several.

    ``fresh``: by python or torchrun, as a user does. ``timeout`` counts from the turn on.

    Raises:
        subprocess.TimeoutExpired: it took longer than ``timeout`` seconds, and was killed.
    """
    with TURNS.one() if processes > 1 else contextlib.nullcontext():
        if not fresh and PREPARED.fits(environment):
            return PREPARED.run(command, environment, processes, timeout)
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        return subprocess.run(
            [sys.executable, *(torchrun if processes > 1 else []), *command],
            capture_output=True,
            text=True,
            timeout=timeout,
            env=environment,
            cwd=ROOT,
        )


def free_port() -> int:
    """A free port that the kernel hands out to nobody meanwhile."""
    while True:
        port = random.SystemRandom().randint(10_000, 20_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((HOST, port))
            return port


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What a launcher tells each rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
    }


def _environments(environment: dict[str, str], processes: int) -> list[dict[str, str]]:
    if processes == 1:
        return [environment]
    port = free_port()
    return [{**environment, **rank_environment(rank, processes, port)} for rank in range(processes)]


def _lasting(environment: Mapping[str, str]) -> dict[str, str]:
    """Without what changes with every test."""
    return {key: value for key, value in environment.items() if key != "PYTEST_CURRENT_TEST"}
