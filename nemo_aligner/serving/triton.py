"""Triton on rank 0 and the worker loop on the other ranks, from start to shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch.distributed as dist

from nemo_aligner.config.serving import ServerConfig
from nemo_aligner.serving.engine.executor import ModelRanks
from nemo_aligner.serving.failures import NO_TOKEN, FailureKind, RequestError, failure_of
from nemo_aligner.serving.protocols.kserve import Tensors
from nemo_aligner.serving.service import Endpoint, Servable, Service, in_order
from nemo_aligner.serving.tokens import find_token, has_token, say_who_may_ask
from nemo_aligner.serving.triton_internals import (
    bind_unbatched,
    call_at_exit,
    hand_output_to,
    server_pid,
    start_in_own_session,
    workspace_of,
)
from nemo_aligner.utils.errors import AlignerError, ConfigError, ServingError
from nemo_aligner.utils.processes import make_temporary, remove_temporary

_WATCH_SECS = 0.2  # a dead rank or Triton is noticed this late at most
_LAST_WORDS_SECS = 1.0  # for the requests at hand to get their error, when the server has to die


def check_front(config: ServerConfig) -> None:
    """Collective: refuse on all ranks what rank 0 cannot serve with, before a model is loaded.

    Raises:
        ServingError: the port is taken, the host is no address of rank 0's machine, the token
            cannot be read there, Triton's log cannot be written, or numpy is too new.
    """
    said: list[str | None] = [None]
    if dist.get_rank() == 0:
        try:
            check_numpy()
            free_port(config.host, config.port)
            _read_token(config)
            TritonLog(config.triton_log_file).close()
        except (ConfigError, ServingError) as error:
            said = [str(error)]
    dist.broadcast_object_list(said, src=0)
    if said[0] is not None:
        raise ServingError(said[0])


def check_numpy() -> None:
    """Refuse a numpy that PyTriton 0.7 starts with, and then fails on at the first request.

    Raises:
        ServingError: it is numpy 2 or later.
    """
    if int(np.__version__.split(".")[0]) >= 2:
        raise ServingError(
            f"numpy: got {np.__version__}, wanted <2, which nvidia-pytriton 0.7 needs to read "
            "requests: pip install 'numpy<2'"
        )


def _read_token(config: ServerConfig) -> str | None:
    return find_token(config.token_file, config.token_variable, "server.token")


def serve(servables: Sequence[Servable], config: ServerConfig) -> int:
    """Answer requests to all of ``servables`` until SIGTERM or SIGINT; every rank calls it.

    Returns:
        The exit code, 0 after a drained stop. A server that cannot go on (a rank, Triton or its
        Python stub died) answers what it holds with an error and ends the process with 1.

    Raises:
        ServingError: it cannot start, on rank 0; the others are released.
    """
    ranks = ModelRanks(
        {name: call for each in servables for name, call in each.operations.items()},
        lambda: _reset_caches(servables),
        config.heartbeat_secs,
        config.worker_timeout_secs,
    )
    if ranks.rank != 0:
        # The launcher signals every rank; rank 0 drains first, and the others compute for it.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        ranks.run_worker()
        ranks.stop()
        return 0
    # An error at the start, such as a model that cannot run, must not leave workers waiting.
    try:
        return _run_leader(servables, ranks, config)
    except AlignerError:
        if ranks.failure is None:  # the others have nothing to say to it
            ranks.stop()
        raise


def _reset_caches(servables: Sequence[Servable]) -> None:
    for each in servables:
        each.reset_cache()


def _run_leader(servables: Sequence[Servable], ranks: ModelRanks, config: ServerConfig) -> int:
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: stopping.append(received))
    ranks.run_leader(lambda: _answer(servables, ranks, config, lambda: bool(stopping)))
    ranks.stop()
    print("Stopped", flush=True)
    return 0


def _answer(
    servables: Sequence[Servable],
    ranks: ModelRanks,
    config: ServerConfig,
    shall_stop: Callable[[], bool],
) -> None:
    """Run Triton until asked to stop; the model computes in the main thread."""
    # Again: the port may have been taken while the model was loaded.
    port = free_port(config.host, config.port)
    services = [each.start(ranks) for each in servables]
    endpoints = in_order(services)
    token = _read_token(config)
    triton = build_triton(endpoints, config, port, token)
    log = TritonLog(config.triton_log_file)
    print(f"Starting Triton, whose log is {log.path}", flush=True)
    guard = _start(triton, log)
    url = f"http://{config.host}:{port}"
    watch = _Watch(triton, log, ranks, services, config.report_every_secs)
    with ready_file(config.ready_file, url):
        names = ", ".join(endpoint.name for endpoint in endpoints)
        print(f"Serving {names} at {url} (pid {os.getpid()})", flush=True)
        say_who_may_ask(config.host, token, "server.token")
        for line in (line for each in services for line in each.startup_log):
            print(line, flush=True)
        watch.until(shall_stop)
        print("Draining: in-flight requests are answered, new ones are refused", flush=True)
        stop = threading.Thread(target=triton.stop, name="drain", daemon=True)
        stop.start()
        # Where a rank dies its launcher stops the others: what is in flight has no answer then.
        watch.until(lambda: not stop.is_alive(), triton_may_end=True)
    guard.dismiss()  # only now: while Triton drains this process may still be killed
    watch.report()
    for each in services:
        each.close()
    log.close()


def _start(triton: Any, log: TritonLog) -> Guard:
    """Run Triton until its model is ready; PyTriton would wait two minutes for one that is dead.

    Raises:
        ServingError: it runs, and does not become ready.
    """
    from pytriton.client.exceptions import PyTritonClientError
    from pytriton.exceptions import PyTritonError

    hand_output_to(triton, log.write)
    started = threading.Event()

    def ended() -> None:
        if not started.is_set():
            shutil.rmtree(workspace_of(triton), ignore_errors=True)
            _die(f"Triton did not start; {log.ending()}")

    call_at_exit(triton, ended)
    try:
        triton.run()
    except (PyTritonError, PyTritonClientError, TimeoutError) as error:
        raise ServingError(f"Triton did not start: {error}; {log.ending()}") from error
    started.set()
    return Guard(server_pid(triton), workspace_of(triton))


class _Watch:
    """Watches everything that the server needs, ends it if any part dies, and prints its load."""

    def __init__(
        self,
        triton: Any,
        log: TritonLog,
        ranks: ModelRanks,
        services: Sequence[Service],
        report_every_secs: float,
    ) -> None:
        self._triton, self._log, self._ranks = triton, log, ranks
        # Every endpoint needs both of Triton's processes, the server and its Python stub.
        self._processes = triton_processes(os.getpid())
        self._services = services
        self._report_every_secs = report_every_secs
        self._reported = time.monotonic()

    def until(self, is_over: Callable[[], bool], triton_may_end: bool = False) -> None:
        """Wait; or leave with exit code 1, and the reason."""
        while not is_over():
            failure = self._ranks.failure or (None if triton_may_end else self._dead_triton())
            if failure is not None:
                _die(failure)
            waited = time.monotonic() - self._reported
            if self._report_every_secs and waited >= self._report_every_secs:
                self.report()
            time.sleep(_WATCH_SECS)
        if self._ranks.failure is not None:
            _die(self._ranks.failure)

    def report(self) -> None:
        """Print the load since the last report, of each service that has had work."""
        self._reported = time.monotonic()
        for line in [service.report() for service in self._services]:
            if line is not None and self._report_every_secs:
                print(line, flush=True)

    def _dead_triton(self) -> str | None:
        for pid, name in self._processes.items():
            if not is_running(pid):
                return f"{name} (pid {pid}) died; {self._log.ending()}"
        if self._triton.is_alive():
            return None
        return f"Triton is not alive; {self._log.ending()}"


def _die(failure: str) -> NoReturn:
    """Exit at once with code 1; Triton's guard and the other ranks notice and do the same."""
    print(f"The server cannot go on: {failure}", file=sys.stderr, flush=True)
    time.sleep(_LAST_WORDS_SECS)
    os._exit(1)


# Endpoints as models of Triton.

_TOKEN_HEADER = "authorization"


def build_triton(
    endpoints: Sequence[Endpoint], config: ServerConfig, port: int, token: str | None
) -> Any:
    """PyTriton's server with a model bound for each endpoint, not yet running.

    With a ``token`` each of them requires it. Triton's other functions over HTTP, such as loading
    models or reading shared memory, are protected by PyTriton's own token.

    Raises:
        ServingError: another version of PyTriton than is known here.
    """
    # The stub loads the libpython of the running interpreter, and finds it only by this variable.
    libraries = [sysconfig.get_config_var("LIBDIR"), os.environ.get("LD_LIBRARY_PATH")]
    os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, libraries))
    # Tensors pass between PyTriton and its proxy within their messages. Its store of shared memory
    # is a process of its own, which is asked four times for each request: 2 of 6 ms.
    os.environ["PYTRITON_NO_TENSORSTORE"] = "1"

    from pytriton.triton import Triton, TritonConfig

    start_in_own_session()
    triton = Triton(
        config=TritonConfig(
            http_address=config.host,
            http_port=port,
            http_header_forward_pattern=None if token is None else f"(?i){_TOKEN_HEADER}",
            # Ports that no client of ours asks.
            allow_grpc=False,
            allow_metrics=False,
            exit_timeout_secs=config.exit_timeout_secs,
        )
    )
    for endpoint in endpoints:
        _bind(triton, endpoint, token)
    return triton


def _bind(triton: Any, endpoint: Endpoint, token: str | None) -> None:
    from pytriton.model_config import ModelConfig, Tensor

    is_batched = endpoint.max_rows > 0
    bind_unbatched(
        triton,
        model_name=endpoint.name,
        infer_func=_infer_function(endpoint, token),
        inputs=[Tensor(**vars(spec)) for spec in endpoint.inputs],
        outputs=[Tensor(**vars(spec)) for spec in endpoint.outputs],
        # Without Triton's batcher, which ends a batch where the set of inputs changes, waits half a
        # second where it misses a wake-up, and gives a batch to one who answers all of it at once.
        config=ModelConfig(batching=is_batched, max_batch_size=endpoint.max_rows, batcher=None),
    )


def _infer_function(endpoint: Endpoint, token: str | None) -> Callable[[list[Any]], Any]:
    async def answer(request: Any) -> Tensors:
        try:
            if token is not None and not has_token(_sent_tokens(request), token):
                raise RequestError(NO_TOKEN, FailureKind.unauthorized)
            return await endpoint.answer(dict(request.items()))
        except Exception as error:
            # The others of the batch have answers of their own, which PyTriton would not give them.
            return _encode_failure(failure_of(error))

    async def infer(requests: list[Any]) -> list[Tensors]:
        return await asyncio.gather(*map(answer, requests))

    return infer


def _sent_tokens(request: Any) -> list[bytes]:
    """Authorization headers of a request, which Triton adds to its parameters as they were sent."""
    parameters = request.parameters or {}
    return [
        str(value).encode() for name, value in parameters.items() if name.lower() == _TOKEN_HEADER
    ]


def _encode_failure(failure: RequestError) -> Tensors:
    """Encode a failure as ``CODE message``, of which ``triton_proxy.py`` makes Triton's error."""
    text = f"{failure.kind.triton_code} {failure.message}"
    return {"error": np.array([text.encode()], dtype=np.object_)}


# Triton's processes, log and port on this machine.

# Names as the kernel has them, in 15 letters.
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
# Of Triton's log, shown with an error.
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

    However that ends: Triton runs in a session of its own, and would keep clients waiting and leave
    its files behind.
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
    """Triton's output: a file, and its last lines in memory.

    ``path`` is appended to; None is a file in the system's temporary folder that is gone when this
    process is.
    """

    def __init__(self, path: str | None) -> None:
        """Raise ServingError if it cannot be written."""
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
    """Tell whether ``pid`` is a process that has not ended."""
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


# The ready file.


@contextmanager
def ready_file(path: str | None, url: str) -> Iterator[None]:
    """While the server answers, ``path`` holds its URL."""
    if path is None:
        yield
        return
    target = Path(path)
    # Renamed once it is whole: who waits for the file reads it as soon as it is there.
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    partial.write_text(url + "\n")
    partial.replace(target)
    try:
        yield
    finally:
        target.unlink(missing_ok=True)
