"""Servers in separate processes, for tests that query or kill them."""

from __future__ import annotations

import contextlib
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.harness import tiny
from tests.harness.launching import ROOT, Script, free_port, rank_environment, start_script
from tests.harness.once import TURNS

START_SECS = 120
FAKE = "tests/serving/fake_server.py"
SERVE = "serve"  # the verb of nemo-aligner
MAIN = str(ROOT / "nemo_aligner/__main__.py")
QUICK = ("heartbeat_secs=0.5", "exit_timeout_secs=10")


@dataclass
class Server:
    """A running server: its URL and its processes, rank 0 first."""

    url: str
    ranks: list[Script] | list[subprocess.Popen[bytes]]
    log: Path
    mark: str
    home: Path
    temporary: Path

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def post(
        self, body: dict[str, Any] | bytes, timeout: float = 30.0
    ) -> tuple[int, dict[str, Any]]:
        """Send plain JSON over HTTP; return the status and the answer."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/v2/models/reward_model/infer", data=data)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def processes(self, name: str = "") -> list[int]:
        """Find the server's remaining processes with ``name`` in their command line."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                ours = self.mark.encode() in (folder / "environ").read_bytes()
                if ours and name.encode() in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
        return found

    def wait(self, timeout: float) -> list[int]:
        """Wait for all ranks and return their exit codes; fail after ``timeout`` seconds."""
        end = time.monotonic() + timeout
        return [rank.wait(max(0.1, end - time.monotonic())) for rank in self.ranks]

    def stop(self, number: int = signal.SIGTERM, timeout: float = 30.0) -> list[int]:
        """Signal every rank, like a launcher."""
        for rank in self.ranks:
            rank.send_signal(number)
        return self.wait(timeout)

    def assert_nothing_is_left(self, within: float = 5) -> None:
        """Assert that no process and no file of Triton is left."""
        end = time.monotonic() + within
        while self.processes() and time.monotonic() < end:
            time.sleep(0.1)
        assert self.processes() == []
        assert list(self.home.iterdir()) == []
        assert list(self.temporary.glob("nemo_aligner_triton_*")) == []
        assert self.segments() == []

    def segments(self) -> list[str]:
        """List the server's segments of shared memory."""
        patterns = [f"/dev/shm/pytrtion{rank.pid}-*" for rank in self.ranks]
        return [found for pattern in patterns for found in glob.glob(pattern)]


@contextlib.contextmanager
def running(
    folder: Path,
    script: str,
    *arguments: str,
    ranks: int = 1,
    torchrun: bool = False,
    current: Path = ROOT,
    variables: Mapping[str, str] = MappingProxyType({}),
    python: str | None = None,
) -> Iterator[Server]:
    """Start ``script`` with a ready file, and make sure that it is gone afterwards.

    Prepared processes run it (see ``tests/harness/launching.py``), unless ``variables``, which are
    added to its environment, are read by libraries. With ``torchrun`` or ``python``, that starts
    it, as a user would. ``folder`` is for its files, ``current`` is its working directory.
    """
    turn = TURNS.one() if ranks > 1 else contextlib.nullcontext()
    section = "gateway." if arguments[:1] == ("gateway",) else "server."
    program = [MAIN, SERVE] if script == SERVE else [str(ROOT / script)]
    command = [*program, *arguments, f"{'' if script == FAKE else section}ready_file="]
    if torchrun:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command[:0], ranks, python = launcher, 1, python or sys.executable
    with turn, _running(folder, command, ranks, current, variables, python) as server:
        yield server


@contextlib.contextmanager
def gateway(
    folder: Path, *settings: str, python: str | None = None, **variables: str
) -> Iterator[Server]:
    """Run a gateway in another process on a free port; it is gone afterwards.

    ``variables`` are added to its environment, and ``python`` starts it, as a user would.
    """
    command = [MAIN, "gateway", "gateway.port=0", *settings, "gateway.ready_file="]
    with _running(folder, command, added=variables, python=python) as started:
        yield started


@contextlib.contextmanager
def _running(
    folder: Path,
    command: list[str],
    ranks: int = 1,
    current: Path = ROOT,
    added: Mapping[str, str] = MappingProxyType({}),
    python: str | None = None,
) -> Iterator[Server]:
    """Run ``command``, which ends with the name of the setting for the ready file."""
    ready, log, mark = folder / "ready", folder / "log", uuid.uuid4().hex
    # Short paths, because those of sockets have at most 108 characters.
    home, temporary = (Path(tempfile.mkdtemp(prefix=name)) for name in ("triton", "served"))
    files = {"TEST_MARK": mark, "PYTRITON_HOME": str(home), "TMPDIR": str(temporary)}
    environment = tiny.environment(**{**files, **added})
    port = free_port()
    of_ranks = [{} if ranks == 1 else rank_environment(rank, ranks, port) for rank in range(ranks)]
    command = [*command[:-1], f"{command[-1]}{ready}"]
    log.write_bytes(b"")
    server = Server("", [], log, mark, home, temporary)
    server.ranks = start_script(command, environment, of_ranks, log, current, python)
    try:
        server.url = wait_for(ready, server)
        yield server
    finally:
        for pid in server.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for rank_process in server.ranks:
            rank_process.wait()
        # Its clean-up was killed, too, and a later process may get the same number.
        for segment in server.segments():
            os.unlink(segment)
        shutil.rmtree(home)
        shutil.rmtree(temporary, ignore_errors=True)


def wait_for(ready: Path, server: Server) -> str:
    end = time.monotonic() + START_SECS
    while time.monotonic() < end and all(rank.poll() is None for rank in server.ranks):
        if ready.exists():
            return ready.read_text().strip()
        time.sleep(0.1)
    raise AssertionError(f"the server did not start:\n{server.output()[-6000:]}")


def json_request(name: str, datatype: str, rows: list[list[Any]]) -> dict[str, Any]:
    """Build one input of a KServe v2 request as plain JSON."""
    flat = [value for row in rows for value in row]
    return {"name": name, "datatype": datatype, "shape": [len(rows), len(rows[0])], "data": flat}


def tokens_request(rows: list[list[int]], *lengths: int) -> list[dict[str, Any]]:
    """Build the inputs for token ids; without lengths, each row has its full length."""
    lengths = lengths or tuple(map(len, rows))
    return [
        json_request("tokens", "INT64", rows),
        json_request("sequence_lengths", "INT64", [[length] for length in lengths]),
    ]


def check_refused(
    post: Callable[[dict[str, Any]], tuple[int, dict[str, Any]]],
    cases: Sequence[tuple[list[dict[str, Any]], str]],
) -> None:
    """Assert that each request gets a 400 with its one-line message."""
    wrong = []
    for inputs, message in cases:
        status, answer = post({"inputs": inputs})
        error = answer["error"]
        if status != 400 or message not in error or "Traceback" in error or "\n" in error:
            wrong.append((message, status, answer))
    assert not wrong


def batches(server: Server) -> list[tuple[int, int]]:
    """Read the sequences and tokens of every call from a fake server's log."""
    lines = [line.split() for line in server.output().splitlines() if line.startswith("BATCH")]
    return [(int(sequences), int(tokens)) for _, sequences, tokens in lines]
