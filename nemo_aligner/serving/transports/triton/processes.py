"""What a server has on its machine: Triton's processes, its log, and its port."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from nemo_aligner.errors import ServingError
from nemo_aligner.temporary import make_temporary, remove_temporary

# As the kernel names them, in 15 letters.
_TRITON_PROCESSES = {
    "tritonserver": "Triton's server",
    "triton_python_backend_stub"[:15]: "Triton's Python stub",
}
# It waits for the end of its input, which this process holds open, and where it is told nothing,
# that has died. PyTriton's helpers notice it a moment later, and may make shared memory until then.
_GUARD = """
trap "" INT TERM HUP QUIT
read -r word
[ -n "$word" ] || { kill -KILL "-$0" 2>/dev/null; sleep 1; }
rm -rf -- "$1" /dev/shm/pytrtion"$2"-*
"""
# Of Triton's log, beside an error.
_SHOWN_LINES, _KEPT_CHARACTERS = 20, 8000
_ANY_PORT = range(20_000, 32_000)


def triton_processes(root: int) -> dict[int, str]:
    """Triton's processes among the descendants of ``root``: pid -> name."""
    parents, names = {}, {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, tail = status.read_text().rpartition(")")
        except OSError:
            continue  # it ended meanwhile
        pid, _, name = head.partition(" (")
        parents[int(pid)], names[int(pid)] = int(tail.split()[1]), name
    return {
        child: _TRITON_PROCESSES[name]
        for child, name in names.items()
        if name in _TRITON_PROCESSES and _descends(child, root, parents)
    }


def _descends(pid: int, root: int, parents: Mapping[int, int]) -> bool:
    while pid in parents and pid != root:
        pid = parents[pid]
    return pid == root


class Guard:
    """Ends Triton, whose processes are those of session ``server``, when this process ends.

    However that ends: Triton stands in a session of its own, keeps those waiting whom nobody will
    answer, and leaves its files behind.
    """

    def __init__(self, server: int, workspace: Path) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, str(server), str(workspace), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )

    def dismiss(self) -> None:
        """Triton has ended."""
        self._process.communicate(b"ended\n")


class TritonLog:
    """A file with what Triton prints, and the end of that.

    ``path`` is appended to; None is a file in the system's temporary folder that is gone when this
    process is.
    """

    def __init__(self, path: str | None) -> None:
        """Raises ServingError: it cannot be written."""
        try:
            self._folder = make_temporary("nemo_aligner_triton_") if path is None else None
            self.path = Path(path or "triton.log")
            if self._folder is not None:
                self.path = self._folder / self.path
            self._file = self.path.open("a", buffering=1, encoding="utf-8")
        except OSError as error:
            raise ServingError(
                f"server.triton_log_file: {path or 'a temporary file'}: it cannot be written: "
                f"{error.strerror or error}"
            ) from error
        self._last: deque[str] = deque(maxlen=_KEPT_CHARACTERS)

    def write(self, text: str | bytes) -> None:
        """Add what Triton has printed, which comes in pieces; a full disk ends no server."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", errors="replace")
        self._last.extend(text)
        with contextlib.suppress(OSError, ValueError):
            self._file.write(text)

    def ending(self) -> str:
        """Its last lines under a heading, for an error."""
        lines = [line for line in "".join(self._last).splitlines() if line.strip()]
        if not lines:
            return "Triton's log is empty"
        kept = f" ({self.path})" if self._folder is None else ""
        return "\n  ".join([f"the end of Triton's log{kept}:", *lines[-_SHOWN_LINES:]])

    def close(self) -> None:
        """Nothing more is written; a temporary one is removed."""
        with contextlib.suppress(OSError):
            self._file.close()
        if self._folder is not None:
            remove_temporary(self._folder)


def is_running(pid: int) -> bool:
    """Whether ``pid`` is a process that has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def free_port(host: str, port: int) -> int:
    """``port``, or any free one for 0; Triton itself would wait two minutes for a taken one.

    Raises:
        ServingError: it is taken, or ``host`` is no address of this machine.
    """
    if port != 0:
        reason = _why_taken(host, port)
        if reason is not None:
            raise ServingError(f"server.port: {host}:{port} is not free: {reason}")
        return port
    # Not one that the kernel hands out to connections: it could be gone before Triton has it.
    for candidate in random.SystemRandom().sample(_ANY_PORT, 100):
        if _why_taken(host, candidate) is None:
            return candidate
    raise ServingError(f"server.host: {host}: no free port was found for server.port 0")


def _why_taken(host: str, port: int) -> OSError | None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None
