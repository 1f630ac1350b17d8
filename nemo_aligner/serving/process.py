"""A server as a process of its own, for as long as a block lasts."""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from nemo_aligner.errors import ServingError
from nemo_aligner.subcommand import environment, verb_command

START_S = 300
STOP_S = 60
_SHOWN_OF_LOG = 3000


@contextmanager
def served(settings: Sequence[str], log: Path) -> Iterator[str]:
    """The URL of a server with these settings, on a free port of this machine.

    What it prints goes to ``log``.

    Raises:
        ServingError: it does not start; the message ends with the end of its log.
    """
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder, "ready")
        own = ["server.port=0", f"server.ready_file={ready}"]
        with log.open("wb") as output:
            server = subprocess.Popen(
                verb_command("serve", *settings, *own),
                stdout=output,
                stderr=output,
                env=environment(),
            )
        try:
            yield _wait_for(server, ready, log)
        finally:
            _stop(server)


def _wait_for(server: subprocess.Popen[bytes], ready: Path, log: Path) -> str:
    end = time.monotonic() + START_S
    while not ready.exists():
        if server.poll() is not None or time.monotonic() > end:
            said = log.read_text(errors="replace")[-_SHOWN_OF_LOG:]
            raise ServingError(f"the server did not start; the end of {log}:\n{said}")
        time.sleep(0.2)
    return ready.read_text().strip()


def _stop(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
