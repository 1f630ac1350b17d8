"""The code around Triton: ports, log, processes, thread stacks, and patches of PyTriton."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nemo_aligner.config.serving import ServerConfig
from nemo_aligner.serving import triton
from nemo_aligner.serving.endpoints import Endpoint
from nemo_aligner.serving.triton import TritonLog, check_triton, is_running, triton_processes
from nemo_aligner.serving.triton_internals import (
    bind_with_errors,
    call_at_exit,
    hand_output_to,
)
from nemo_aligner.utils.errors import ServingError

TOKEN = "s3cret"


@pytest.fixture
def pytriton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that the extra is installed."""
    plain = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "pytriton" or plain(name))
    monkeypatch.setattr(np, "__version__", "1.26.4")


@pytest.mark.usefixtures("pytriton")
def test_ports_of_triton_are_free_or_an_error(tmp_path: Path) -> None:
    # Below the ports of outgoing connections, one of which could take a neighbouring port.
    first = triton._free_ports(ServerConfig(triton_port=0))
    assert 20_000 <= first < 32_000
    taken = first + 2
    with socket.create_server(("127.0.0.1", taken)):
        for port in (first, taken):
            with pytest.raises(ServingError) as caught:
                check_triton(ServerConfig(triton_port=port))
            expected = f"server.triton_port: 127.0.0.1:{taken} is not free: "
            assert str(caught.value).startswith(expected)
    check_triton(ServerConfig(triton_port=first))
    with pytest.raises(ServingError, match=r"ports that do not overlap"):
        check_triton(ServerConfig(triton_port=first, port=first + 2))
    with pytest.raises(ServingError, match=r"server\.triton_port: 127\.0\.0\.1:65536 is not free"):
        check_triton(ServerConfig(triton_port=65534))
    with pytest.raises(ServingError, match=r"server\.triton_host: 192\.0\.2\.1 has no 3 free"):
        check_triton(ServerConfig(triton_port=0, triton_host="192.0.2.1"))
    with pytest.raises(ServingError, match=r"server\.triton_log_file: .*: it cannot be written: "):
        check_triton(ServerConfig(triton_port=0, triton_log_file=str(tmp_path)))


@pytest.mark.usefixtures("pytriton")
def test_packages_that_triton_needs_are_checked_where_it_is_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = ServerConfig(triton_port=0)
    monkeypatch.setattr(np, "__version__", "2.4.6")
    with pytest.raises(ServingError, match=r"a numpy below 2, and 2\.4\.6 is installed"):
        check_triton(config)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ServingError) as caught:
        check_triton(config)
    assert "[triton]" in str(caught.value)
    assert "or set server.triton_port=null to serve without Triton" in str(caught.value)
    check_triton(ServerConfig())


def test_programs_are_started_with_large_thread_stacks() -> None:
    before = resource.getrlimit(resource.RLIMIT_STACK)
    command = [sys.executable, "-c", "import resource; print(*resource.getrlimit(3))"]
    with triton._large_thread_stacks():
        started = subprocess.run(command, capture_output=True, text=True, check=True)
    soft, hard = map(int, started.stdout.split())
    wish = 256 * 2**20
    assert (soft >= wish or soft == hard, hard) == (True, before[1])
    assert resource.getrlimit(resource.RLIMIT_STACK) == before


class Request(dict[str, Any]):
    """A request in the form that PyTriton passes on."""

    def __init__(self, parameters: Mapping[str, Any] | None) -> None:
        super().__init__(dummy_var=np.zeros(1))
        self.parameters = parameters


def test_token_is_compared_before_an_endpoint_answers() -> None:
    answered: list[Any] = []

    async def answer(inputs: Any) -> Any:
        answered.append(inputs)
        return {}

    async def ask(parameters: Mapping[str, Any] | None, token: str | None) -> Any:
        endpoint = Endpoint("critic_train", [], [], answer)
        loop = asyncio.get_running_loop()
        return await triton._answer_request(endpoint, Request(parameters), token, loop)

    ours, theirs = {"Authorization": f"Bearer {TOKEN}"}, {"triton-access-token": TOKEN}
    for parameters in (ours, theirs):
        assert asyncio.run(ask(parameters, TOKEN)) == {}
    assert asyncio.run(ask(None, None)) == {}
    assert len(answered) == 3
    wrong = {"authorization": f"Basic {TOKEN}"}
    for parameters in (None, {}, wrong, ours | wrong, ours | theirs):
        output = asyncio.run(ask(parameters, TOKEN))
        assert output["error"][0].startswith(b"INVALID_ARG the bearer token is missing or wrong")
    assert len(answered) == 3


def test_processes_of_triton_are_found_by_name_among_descendants_until_they_end(
    tmp_path: Path,
) -> None:
    program = tmp_path / "tritonserver"
    program.symlink_to("/bin/sleep")
    shell = subprocess.Popen(["/bin/sh", "-c", f"{program} 60 & echo $!; wait"], stdout=-1)
    try:
        assert shell.stdout is not None
        pid = int(shell.stdout.readline())
        while (name := Path(f"/proc/{pid}/comm").read_text().strip()) != "tritonserver":
            assert name == "sh"  # not yet replaced by the program
        assert triton_processes(shell.pid) == {pid: "Triton's server"}
        assert pid in triton_processes(os.getpid())
        assert triton_processes(pid + 1) == {}
        assert is_running(shell.pid)
    finally:
        os.kill(pid, 9)
        shell.communicate()
    assert not is_running(shell.pid)


def test_log_of_triton_is_a_file_whose_end_stands_beside_errors(tmp_path: Path) -> None:
    chosen = tmp_path / "chosen.log"
    chosen.write_text("of an earlier server\n")
    for path in (str(chosen), None):
        log = TritonLog(path)
        assert log.ending() == "Triton's log is empty"
        for piece in (
            "fir",
            "st\n\n",
            b"second: \xff\n",
            *(f"line {n}\n" for n in range(18)),
            "cut",
        ):
            log.write(piece)
        heading, *lines = log.ending().splitlines()
        assert heading == f"the end of Triton's log{f' ({chosen})' if path else ''}:"
        assert (len(lines), lines[0], lines[-1]) == (
            20,
            "  second: \N{REPLACEMENT CHARACTER}",
            "  cut",
        )
        log.close()
        assert log.path.exists() == (path is not None)
        log.write("after its end\n")
    assert chosen.read_text().startswith("of an earlier server\nfirst\n\nsecond")


def test_output_of_triton_is_handed_on_from_before_its_start() -> None:
    printed: list[str] = []
    server = SimpleNamespace()

    def initialize() -> None:
        server._triton_server = SimpleNamespace(_record_logs=print)

    server._initialize_server = initialize
    hand_output_to(server, printed.append)
    server._initialize_server()
    server._triton_server._record_logs("a line")
    assert printed == ["a line"]


MODEL_FILE = b"""
def _wrap_response(response: Response, requested_outputs_names, model_outputs_dict):
    return "tensors"
"""


class FakeTriton:
    def __init__(self, model_file: bytes) -> None:
        self._model_file = model_file
        self._model_manager = SimpleNamespace(models=[])

    def bind(self, model_name: str) -> None:
        files = {"file:1/model.py": self._model_file, "file:1/other.py": b"other"}
        model = SimpleNamespace(get_proxy_model_files=lambda: dict(files))
        self._model_manager.models.append(model)

    def models(self) -> list[Any]:
        return self._model_manager.models


def test_model_file_gets_errors_for_the_model_that_is_bound_so() -> None:
    server = FakeTriton(MODEL_FILE)
    server.bind(model_name="before")
    bind_with_errors(server, model_name="with errors")
    before, with_errors = server.models()
    assert before.get_proxy_model_files()["file:1/model.py"] == MODEL_FILE
    files = with_errors.get_proxy_model_files()
    assert files["file:1/other.py"] == b"other"

    class TritonError(str):
        BUSY = 14

        def __new__(cls, message: str, code: int) -> Any:
            return str.__new__(cls, f"{code}: {message}")

    utils = SimpleNamespace(TritonError=TritonError, InferenceResponse=dict)
    module: dict[str, Any] = {"pb_utils": utils, "Response": Any}
    exec(files["file:1/model.py"], module)
    error = np.array([b"BUSY come again later"], dtype=np.object_)
    answers = [
        module["_wrap_response"](SimpleNamespace(data=data), [], {})
        for data in (None, {"rewards": error}, {"error": error})
    ]
    assert answers == [
        "tensors",
        "tensors",
        {"output_tensors": [], "error": "14: come again later"},
    ]


def test_pytriton_of_another_version_is_refused() -> None:
    server = FakeTriton(MODEL_FILE.replace(b"_wrap_response", b"renamed"))
    bind_with_errors(server, model_name="with errors")
    with pytest.raises(ServingError, match=r"model\.py differs from that of version 0\.7"):
        server.models()[0].get_proxy_model_files()


def test_pytriton_cleans_up_after_an_exit_where_it_may() -> None:
    statuses: list[Any] = []
    may_clean_up = iter([False, True])
    server = SimpleNamespace(_on_tritonserver_exit=lambda *status: statuses.append(status))
    call_at_exit(server, lambda: next(may_clean_up))
    server._on_tritonserver_exit(False, 1)
    assert statuses == []
    server._on_tritonserver_exit(False, 2)
    assert statuses == [(False, 2)]
