"""Run NVIDIA Triton next to the HTTP front: it serves the same endpoints, also over gRPC.

``nemo-aligner serve`` answers through its own front (``server.py``). With ``server.triton_port`` it
also starts Triton through PyTriton, for clients that need gRPC, perf_analyzer or Triton's metrics.
For each model, Triton passes one request at a time to this process, where the endpoint answers it
in the event loop of the front.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib.util
import os
import random
import resource
import shutil
import socket
import subprocess
import sysconfig
import threading
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nemo_aligner.config.describe import install_command
from nemo_aligner.config.serving import ServerConfig
from nemo_aligner.serving.endpoints import Endpoint
from nemo_aligner.serving.failures import NO_TOKEN, FailureKind, RequestError, failure_of
from nemo_aligner.serving.protocols.kserve_body import Tensors
from nemo_aligner.serving.tokens import has_token, is_loopback
from nemo_aligner.serving.triton_internals import (
    bind_with_errors,
    call_at_exit,
    hand_output_to,
    server_pid,
    start_in_own_session,
    start_process,
    workspace_of,
)
from nemo_aligner.utils.errors import ServingError
from nemo_aligner.utils.processes import make_temporary, remove_temporary

# Number of Triton's ports: HTTP, gRPC and metrics (8000, 8001 and 8002 by default).
_NUM_PORTS = 3
# Ports below the range that the kernel uses for outgoing connections. Such a connection could take
# a port between the check and the start of Triton.
_ANY_PORT = range(20_000, 32_000)
_NO_TRITON = "or set server.triton_port=null to serve without Triton"
# Functions of Triton that need PyTriton's access token, which is random and stays in this process.
# They load models, map shared memory and write files, which clients do not need.
_CLOSED_FUNCTIONS = ["shared-memory", "model-repository", "trace", "logging"]
# Headers that may carry the server's token: our own, and the one that PyTriton's clients send.
_TOKEN_HEADER, _PYTRITON_HEADER = "authorization", "triton-access-token"


def check_triton(config: ServerConfig) -> None:
    """Check that Triton can start, before a model is loaded.

    Raises:
        ServingError: PyTriton is not installed, numpy is too new, a port is taken, or the log
            cannot be written.
    """
    if config.triton_port is None:
        return
    if importlib.util.find_spec("pytriton") is None:
        raise ServingError(
            f"server.triton_port: got {config.triton_port}, but nvidia-pytriton is not installed. "
            "It needs a numpy below 2, so install it into a separate environment "
            f"({install_command('triton')}), {_NO_TRITON}."
        )
    if int(np.__version__.split(".")[0]) >= 2:
        # PyTriton 0.7 starts with numpy 2, and fails at the first request.
        raise ServingError(
            f"server.triton_port: got {config.triton_port}, but nvidia-pytriton 0.7 needs a numpy "
            f"below 2, and {np.__version__} is installed. Run pip install 'numpy<2', {_NO_TRITON}."
        )
    port = _free_ports(config)
    if port <= config.port < port + _NUM_PORTS:
        raise ServingError(
            f"server.triton_port: Triton takes the ports {port} to {port + _NUM_PORTS - 1}, and "
            f"server.port is {config.port}. Choose ports that do not overlap."
        )
    TritonLog(config.triton_log_file).close()


def _free_ports(config: ServerConfig) -> int:
    """Choose Triton's ports, check that they are free, and return the first one.

    Without the check, Triton would wait two minutes for a port that is taken.

    Raises:
        ServingError: a port is taken, or ``triton_host`` is not an address of this machine.
    """
    host, first = config.triton_host, config.triton_port
    if first:
        for port in range(first, first + _NUM_PORTS):
            problem = _try_to_listen(host, port)
            if problem is not None:
                raise ServingError(
                    f"server.triton_port: {host}:{port} is not free: {problem}. Set the first of "
                    f"{_NUM_PORTS} free ports, or 0 for any."
                )
        return first
    for first in random.SystemRandom().sample(_ANY_PORT, 100):
        if all(_try_to_listen(host, first + offset) is None for offset in range(_NUM_PORTS)):
            return first
    raise ServingError(
        f"server.triton_host: {host} has no {_NUM_PORTS} free ports. Set it to an address of this "
        "machine."
    )


def _try_to_listen(host: str, port: int) -> Exception | None:
    """Try to listen on a port; return the error, or None if the port is free."""
    with socket.socket() as probe:
        # Set SO_REUSEADDR as servers do, so that closing connections of an earlier server do not
        # block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            return error
    return None


class TritonFront:
    """A running Triton server, whose models are the endpoints."""

    def __init__(self, triton: Any, log: TritonLog, config: ServerConfig, port: int) -> None:
        self.url = f"http://{config.triton_host}:{port}"
        self._triton, self._log = triton, log
        self._guard = Guard(server_pid(triton), workspace_of(triton))
        # Each endpoint needs Triton's server and a Python stub process, so the end of any of them
        # is a failure.
        self._processes = triton_processes(os.getpid())
        self._config, self._port = config, port

    @staticmethod
    def start(
        endpoints: Sequence[Endpoint],
        config: ServerConfig,
        token: str | None,
        loop: asyncio.AbstractEventLoop,
    ) -> TritonFront:
        """Start Triton and wait until all endpoints are ready.

        Call it in a thread that lives until ``stop`` has returned: Linux ends Triton together with
        the thread that started it.

        Args:
            endpoints: each becomes a model of Triton with its name.
            config: ports, address and log of Triton; ``triton_port`` is not None.
            token: bearer token that inference requests must have; None if none is required.
            loop: the running event loop in which the endpoints answer.

        Raises:
            ServingError: Triton does not become ready.
        """
        # Check the ports again: another process may have taken them while the model was loaded.
        port = _free_ports(config)
        log = TritonLog(config.triton_log_file)
        print(f"Starting Triton, whose log is {log.path}", flush=True)
        try:
            triton = _build_triton(config, port, token)
            for endpoint in endpoints:
                _bind(triton, endpoint, token, loop)
            _run(triton, log)
        except BaseException:
            log.close()
            raise
        return TritonFront(triton, log, config, port)

    @property
    def startup_log(self) -> list[str]:
        """Lines for the server's log after Triton has started."""
        host = self._config.triton_host
        lines = [
            f"Triton serves the same models at {self.url}, and over gRPC at "
            f"{host}:{self._port + 1}; its metrics are at http://{host}:{self._port + 2}/metrics"
        ]
        if not is_loopback(host):
            lines.append(
                f"Warning: server.triton_host={host} lets other machines reach Triton 2.51, whose "
                "HTTP server has CVE-2025-23310 and CVE-2025-23311: a chunked request from anyone "
                "who reaches the port can end this process, before a token is compared. Let others "
                "use the HTTP front (server.host, server.port), and keep Triton on 127.0.0.1."
            )
        return lines

    def failure(self) -> str | None:
        """Return why Triton cannot answer any more; None while it can."""
        for pid, name in self._processes.items():
            if not is_running(pid):
                return f"{name} (pid {pid}) died; {self._log.ending()}"
        if self._triton.is_alive():
            return None
        return f"Triton is not alive; {self._log.ending()}"

    def stop(self) -> None:
        """Reject new requests, answer the ones in flight, and end Triton.

        The event loop must run until this returns. Requests get ``exit_timeout_secs`` to finish.
        """
        self._triton.stop()

    def close(self) -> None:
        """End the guard process and close the log; call this after ``stop``."""
        # The guard process must live until here: while Triton drains, this process may still be
        # killed, and then the guard ends Triton.
        self._guard.dismiss()
        self._log.close()


# The code below starts Triton.

# Triton 2.51 puts 16 bytes for each chunk of a request on the stack of an HTTP thread
# (CVE-2025-23310, CVE-2025-23311). This stack size suffices for a request of 16 million chunks,
# each of which costs Triton another 1 KB elsewhere. The stack is only address space: memory is used
# only for the part of it that is touched.
_STACK_BYTES = 256 * 2**20


def _build_triton(config: ServerConfig, port: int, token: str | None) -> Any:
    """Create PyTriton's ``Triton`` object; it has no models yet, and is not started."""
    # Triton's Python stub needs the libpython of this interpreter, and finds it only through this
    # variable.
    libraries = [sysconfig.get_config_var("LIBDIR"), os.environ.get("LD_LIBRARY_PATH")]
    os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, libraries))
    # Pass tensors within messages: PyTriton's tensor store in shared memory is another process, and
    # needs four calls per request, which take 2 ms.
    os.environ["PYTRITON_NO_TENSORSTORE"] = "1"

    from pytriton.triton import Triton, TritonConfig, TritonSecurityConfig

    start_in_own_session()
    forwarded = None if token is None else f"(?i)({_TOKEN_HEADER}|{_PYTRITON_HEADER})"
    return Triton(
        config=TritonConfig(
            http_address=config.triton_host,
            http_port=port,
            http_header_forward_pattern=forwarded,
            grpc_address=config.triton_host,
            grpc_port=port + 1,
            grpc_header_forward_pattern=forwarded,
            metrics_address=config.triton_host,
            metrics_port=port + 2,
            exit_timeout_secs=config.exit_timeout_secs,
        ),
        # Random access token instead of the server's: PyTriton passes it to Triton on a command
        # line, which every user of the machine can read. ``_answer_request`` checks the server's
        # token.
        security_config=TritonSecurityConfig(restricted_endpoints=list(_CLOSED_FUNCTIONS)),
    )


def _run(triton: Any, log: TritonLog) -> None:
    """Run Triton until its models are ready.

    If Triton dies during its start, PyTriton still waits for two minutes, and holds the lock that
    its own clean-up needs. So PyTriton waits in another thread, which is abandoned if Triton dies.

    Raises:
        ServingError: Triton does not become ready.
    """
    hand_output_to(triton, log.write)
    is_over = threading.Event()
    errors: list[Exception] = []
    is_ready = False

    def wait_for_models() -> None:
        nonlocal is_ready
        try:
            triton.connect()
            is_ready = True
        except Exception as error:
            errors.append(error)
        is_over.set()

    def note_exit() -> bool:
        is_over.set()
        return is_ready

    call_at_exit(triton, note_exit)
    with _large_thread_stacks():
        start_process(triton)
    threading.Thread(target=wait_for_models, name="triton-start", daemon=True).start()
    is_over.wait()
    if not is_ready:
        atexit.unregister(triton.stop)
        with contextlib.suppress(Exception):
            os.killpg(server_pid(triton), 9)
        shutil.rmtree(workspace_of(triton), ignore_errors=True)
        reason = f": {errors[0]}" if errors else ""
        raise ServingError(f"Triton did not start{reason}; {log.ending()}")


@contextlib.contextmanager
def _large_thread_stacks() -> Iterator[None]:
    """Give the threads of programs that start in the block a stack of ``_STACK_BYTES``.

    The C library takes the size from the resource limit when a program starts. If the limit is
    "unlimited", it uses its default of 2 MiB instead.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    unlimited = resource.RLIM_INFINITY
    size = _STACK_BYTES if soft == unlimited else max(soft, _STACK_BYTES)
    size = size if hard == unlimited else min(size, hard)
    resource.setrlimit(resource.RLIMIT_STACK, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, (soft, hard))


# The code below makes each endpoint a model of Triton.


def _bind(
    triton: Any, endpoint: Endpoint, token: str | None, loop: asyncio.AbstractEventLoop
) -> None:
    from pytriton.model_config import ModelConfig, Tensor

    async def infer(requests: list[Any]) -> list[Tensors]:
        answers = [_answer_request(endpoint, request, token, loop) for request in requests]
        return await asyncio.gather(*answers)

    bind_with_errors(
        triton,
        model_name=endpoint.name,
        infer_func=infer,
        inputs=[Tensor(**vars(spec)) for spec in endpoint.inputs],
        outputs=[Tensor(**vars(spec)) for spec in endpoint.outputs],
        # batcher=None: each call has one request, because this server has its own batcher.
        config=ModelConfig(
            batching=endpoint.max_rows > 0, max_batch_size=endpoint.max_rows, batcher=None
        ),
    )


async def _answer_request(
    endpoint: Endpoint, request: Any, token: str | None, loop: asyncio.AbstractEventLoop
) -> Tensors:
    """Answer a request of Triton by the endpoint in ``loop``.

    A failure becomes the output ``error``.
    """
    try:
        if token is not None and not _sends_token(request, token):
            raise RequestError(NO_TOKEN, FailureKind.unauthorized)
        answer: Coroutine[Any, Any, Tensors] = endpoint.answer(dict(request.items()))
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answer, loop))
    except Exception as error:
        failure = failure_of(error)
        text = f"{failure.kind.triton_code} {failure.message}"
        return {"error": np.array([text.encode()], dtype=np.object_)}


def _sends_token(request: Any, token: str) -> bool:
    """Return whether a request has the token in a header; Triton passes headers as parameters."""
    headers = [(name.lower(), str(value)) for name, value in (request.parameters or {}).items()]
    sent = [value.encode() for name, value in headers if name == _TOKEN_HEADER]
    sent += [b"Bearer " + value.encode() for name, value in headers if name == _PYTRITON_HEADER]
    return has_token(sent, token)


# The code below finds Triton's processes, ends them, and reads their log.

# Process names as the kernel reports them, cut to 15 characters.
_TRITON_PROCESSES = {
    "tritonserver": "Triton's server",
    "triton_python_backend_stub"[:15]: "Triton's Python stub",
}
# The script of the guard process, which ends Triton if this process dies. It blocks until its input
# ends. If it has read a word by then, Triton was stopped properly. Otherwise this process has died,
# so the script kills Triton, and waits a second, because PyTriton's helpers may create shared
# memory until they notice the death.
_GUARD = """
trap "" INT TERM HUP QUIT
read -r word
[ -n "$word" ] || { kill -KILL "-$0" 2>/dev/null; sleep 1; }
rm -rf -- "$1" /dev/shm/pytrtion"$2"-*
"""
# Lines of Triton's log that an error shows, and characters of the log that are kept in memory.
_SHOWN_LINES, _KEPT_CHARACTERS = 20, 8000


def triton_processes(root: int) -> dict[int, str]:
    """Find Triton's processes among the descendants of ``root``: pid -> name."""
    parents, names = {}, {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            head, _, tail = status.read_text().rpartition(")")
        except OSError:
            continue  # the process has ended since it was listed
        pid, _, name = head.partition(" (")
        parents[int(pid)], names[int(pid)] = int(tail.split()[1]), name
    return {
        child: _TRITON_PROCESSES[name]
        for child, name in names.items()
        if name in _TRITON_PROCESSES and _is_descendant(child, root, parents)
    }


def _is_descendant(pid: int, root: int, parents: Mapping[int, int]) -> bool:
    while pid in parents and pid != root:
        pid = parents[pid]
    return pid == root


def is_running(pid: int) -> bool:
    """Return whether the process ``pid`` exists and has not ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


class Guard:
    """A process that ends Triton (session ``server``) when this process ends, even if it is killed.

    Triton runs in another session, so it would otherwise survive, keep its clients waiting and
    leave its files behind.
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
        """Remove the files that Triton left, and end the guard process; Triton must have ended."""
        self._process.communicate(b"ended\n")


class TritonLog:
    """Triton's output: a log file, and its last lines in memory.

    Output is appended to the file ``path``. If it is None, the log is in the system's temporary
    folder, and is removed when this process ends.
    """

    def __init__(self, path: str | None) -> None:
        """Open the log; raise ServingError if the file cannot be written."""
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
        """Append a piece of Triton's output; errors such as a full disk are ignored."""
        if isinstance(text, bytes):
            text = text.decode("utf-8", errors="replace")
        self._last.extend(text)
        with contextlib.suppress(OSError, ValueError):
            self._file.write(text)

    def ending(self) -> str:
        """Return the last lines of the log with a heading, for an error message."""
        lines = [line for line in "".join(self._last).splitlines() if line.strip()]
        if not lines:
            return "Triton's log is empty"
        path = f" ({self.path})" if self._folder is None else ""
        return "\n  ".join([f"the end of Triton's log{path}:", *lines[-_SHOWN_LINES:]])

    def close(self) -> None:
        """Close the log; a temporary file is removed."""
        with contextlib.suppress(OSError):
            self._file.close()
        if self._folder is not None:
            remove_temporary(self._folder)
