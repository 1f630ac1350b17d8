"""The servers that serving.py measures: how each is started, queried over HTTP and stopped."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from common import ROOT, Worker, WorkerFailed, how_it_ended

START_S = 600
STOP_S = 60
SEQ_LENGTH = 1024
_MIB = 1024**2
_MODEL = "reward"


class Server:
    """A server in its own processes.

    Raises:
        WorkerFailed: while waiting for it, the server ended or took too long; the message has its
            exit and the last line of its log.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self._log = log
        self._start = time.monotonic()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )

    def wait_for_file(self, ready: Path) -> str:
        """Wait for the file into which a ready server writes its URL; return the URL."""
        while not ready.is_file():
            self._wait_on()
        return ready.read_text().strip()

    def wait_for_health(self, url: str) -> str:
        """Wait until the server at ``url`` answers a health check, and return ``url``."""
        while True:
            self._wait_on()
            with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
                return url

    def _wait_on(self) -> None:
        time.sleep(0.2)
        code = self._process.poll()
        if code is None and time.monotonic() < self._start + START_S:
            return
        self.stop()
        reason = f"it did not answer within {START_S} s" if code is None else how_it_ended(code)
        raise WorkerFailed(f"it did not start: {reason}\n{self.last_line()}")

    def last_line(self) -> str:
        """Return the last line of the server's log that is not empty, for an error message."""
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line), "its log is empty")

    def resident_mib(self) -> float:
        """Sum the resident memory of the server's processes, in MiB.

        Memory that processes share counts once for each of them.
        """
        total = 0
        for process in self._family():
            with suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total / _MIB

    def stop(self) -> None:
        """Terminate the server, and kill those of its processes that do not end."""
        family = self._family()
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        # If the server died by itself, its children may still run: kill its whole process group.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _family(self) -> list[psutil.Process]:
        try:
            process = psutil.Process(self._process.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


@dataclass(frozen=True)
class Load:
    """The answers of a server to a number of requests that ``Clients.put`` has sent.

    Attributes:
        seconds: time from the first request to the last answer.
        statuses: HTTP status of each request.
        latencies: seconds until each answer; None where it did not come in time.
        rewards: rewards in each answer; None where it has none.
        messages: errors of up to ten requests.
        computed: seconds that our server spent in forward passes meanwhile; None for vLLM.
    """

    seconds: float
    statuses: list[int | None]
    latencies: list[float | None]
    rewards: list[list[float] | None]
    messages: list[str]
    computed: float | None = None

    @property
    def rejected(self) -> int:
        """Number of requests without a reward."""
        return sum(status != 200 for status in self.statuses)


def waiting_seconds(loads: Sequence[Load]) -> list[float]:
    """List how many seconds each request waited for its answer.

    Requests without an answer are left out.
    """
    return [seconds for load in loads for seconds in load.latencies if seconds is not None]


def percentile(loads: Sequence[Load], percent: float) -> float:
    """Compute a percentile of the seconds that a request waited for its answer."""
    return float(np.percentile(waiting_seconds(loads), percent))


class Clients:
    """Clients that send requests to the servers.

    All of them run in one process, separate from this one.
    """

    def __init__(self) -> None:
        self._worker = Worker(sys.executable, "serving_load.py", {}, threads=1)

    def put(
        self, url: str, requests: Sequence[dict[str, str]], clients: int, limit_s: float, count: int
    ) -> Load:
        """Send ``count`` requests to ``url`` from ``clients`` concurrent clients.

        If there are fewer ``requests`` than ``count``, they are sent repeatedly. No request is sent
        or awaited after ``limit_s`` seconds.
        """
        load = {"url": url, "requests": requests, "clients": clients, "limit_s": limit_s}
        return Load(**self._worker.ask({**load, "count": count}))

    def close(self) -> None:
        self._worker.close()


@dataclass(frozen=True)
class Recipe:
    """How to start a server, and how to query it.

    Attributes:
        name: name of the server in tables.
        model: the reward model's file, or its Hugging Face folder for vLLM.
        threads: number of threads that it computes with.
        settings: further arguments of its command.
        python: interpreter of an environment with vLLM; None for a server of ours.
    """

    name: str
    model: Path
    threads: int
    settings: tuple[str, ...] = ()
    python: str | None = None

    @property
    def is_ours(self) -> bool:
        return self.python is None

    def start(self, log: Path) -> tuple[Server, str]:
        """Start the server; return it and its URL.

        Raises:
            WorkerFailed: it does not start.
        """
        if self.is_ours:
            ready = log.with_suffix(".ready")
            ready.unlink(missing_ok=True)
            server = Server(self._our_command(ready), self._environment(), log)
            return server, server.wait_for_file(ready)
        port = free_port()
        try:
            server = Server(self._their_command(port), self._their_environment(), log)
        except OSError as error:
            raise WorkerFailed(f"{self.python}: cannot be run: {error.strerror}") from None
        return server, server.wait_for_health(f"http://127.0.0.1:{port}")

    def request(self, token_ids: Sequence[int]) -> dict[str, str]:
        """Build a request for the reward of one sequence, in the protocol of this server."""
        if self.is_ours:
            return kserve_request(
                [
                    tensor("tokens", "INT64", [list(token_ids)]),
                    tensor("sequence_lengths", "INT64", [[len(token_ids)]]),
                ]
            )
        body = {"model": _MODEL, "input": list(token_ids), "use_activation": False}
        return {"path": "/classify", "body": json.dumps(body)}

    def _our_command(self, ready: Path) -> list[str]:
        arguments = [f"rm_model_file={self.model}", "server.port=0", f"server.ready_file={ready}"]
        return [sys.executable, "-m", "nemo_aligner", "serve", *arguments, *self.settings]

    def _their_command(self, port: int) -> list[str]:
        assert self.python is not None
        return [
            *(self.python, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self.model), "--served-model-name", _MODEL),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--runner", "pooling", "--dtype", "float32", "--enforce-eager"),
            *("--max-model-len", str(SEQ_LENGTH), "--max-num-batched-tokens", "4096"),
            *self.settings,
        ]

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": str(self.threads),
            "PYTHONPATH": str(ROOT),
            "TOKENIZERS_PARALLELISM": "false",
        }

    def _their_environment(self) -> dict[str, str]:
        """Build the environment variables of vLLM's server.

        It gets as many cores as ours. Variables that are already set in this process take
        precedence.
        """
        cores = sorted(os.sched_getaffinity(0))[: self.threads]
        chosen = {
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        environment = {**chosen, **self._environment()}
        del environment["PYTHONPATH"]
        return environment


class Contestants:
    """The servers by name. Each is started when it gets its first requests.

    A vLLM that has failed is not tried again.

    Requests are sent only after a pause of ``rest_s`` seconds, because the previous server may
    still compute after its last answer.
    """

    def __init__(
        self, recipes: Sequence[Recipe], work: Path, clients: Clients, rest_s: float = 0.0
    ) -> None:
        self._recipes = {recipe.name: recipe for recipe in recipes}
        self._work = work
        self._clients = clients
        self._rest_s = rest_s
        self._running: dict[str, tuple[Server, str]] = {}
        self.failures: dict[str, str] = {}

    def ask(
        self, name: str, token_lists: Sequence[list[int]], clients: int, limit_s: float
    ) -> Load | None:
        """Send one request for each of ``token_lists`` to the server ``name``.

        Args:
            clients: number of clients that send at the same time.
            limit_s: seconds after which no more answers are awaited.

        Returns:
            The answers; None if the server has no recipe or has failed.

        Raises:
            WorkerFailed: one of our servers has failed.
        """
        if name in self.failures or name not in self._recipes:
            return None
        recipe = self._recipes[name]
        log = self._work / f"{name.replace(' ', '_')}.log"
        try:
            if name not in self._running:
                print(f"starting {name} ...", flush=True)
                self._running[name] = recipe.start(log)
            requests = [recipe.request(token_ids) for token_ids in token_lists]
            url = self._running[name][1]
            time.sleep(self._rest_s)
            seconds_before = computed_seconds(url) if recipe.is_ours else 0.0
            load = self._clients.put(url, requests, clients, limit_s, len(requests))
            if recipe.is_ours:
                load = replace(load, computed=computed_seconds(url) - seconds_before)
            if load.rejected:
                message = load.messages[0] if load.messages else f"no answer within {limit_s:g} s"
                raise WorkerFailed(f"{load.rejected} requests have no reward: {message}")
        except WorkerFailed as error:
            if recipe.is_ours:
                raise WorkerFailed(f"{error}\nthe server's log: {log}") from None
            self.failures[name] = str(error)
            self._stop(name)
            return None
        return load

    def close(self) -> None:
        """Stop all servers."""
        for name in list(self._running):
            self._stop(name)

    def _stop(self, name: str) -> None:
        if name in self._running:
            self._running.pop(name)[0].stop()


def computed_seconds(url: str) -> float:
    """Return the seconds that one of our servers has spent in forward passes since its start."""
    from nemo_aligner.serving.client import RewardClient

    with closing(RewardClient(url)) as client:
        counts = asyncio.run(client.statistics_async())[url]
    assert counts is not None
    return counts["forward_seconds"]


def start_gateway(backend: str, work: Path) -> tuple[Server, str]:
    """Start the gateway in front of one of our servers; return it and its URL."""
    ready = work / "gateway.ready"
    ready.unlink(missing_ok=True)
    settings = [f"backends=[{backend}]", "gateway.port=0", f"gateway.ready_file={ready}"]
    command = [sys.executable, "-m", "nemo_aligner", "gateway", *settings]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    gateway = Server(command, environment, work / "gateway.log")
    return gateway, gateway.wait_for_file(ready)


def kserve_request(inputs: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Build a JSON request in KServe v2 with these input tensors; it asks only for the rewards."""
    body = {"inputs": inputs, "outputs": [{"name": "rewards"}]}
    return {"path": "/v2/models/reward_model/infer", "body": json.dumps(body)}


def tensor(name: str, datatype: str, rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Build an input tensor of a KServe v2 request from rows of equal length."""
    flat = [value for row in rows for value in row]
    return {"name": name, "datatype": datatype, "shape": [len(rows), len(rows[0])], "data": flat}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
