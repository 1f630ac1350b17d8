"""What stands around Triton: ports, a ready file, processes, and changes inside PyTriton."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nemo_aligner.config.serving import ServerConfig
from nemo_aligner.serving.triton import (
    TritonLog,
    check_front,
    free_port,
    is_running,
    ready_file,
    triton_processes,
)
from nemo_aligner.serving.triton_internals import bind_unbatched, call_at_exit, hand_output_to
from nemo_aligner.utils.errors import ServingError

PROXY = b"""
class BatchResponsesHandler:
    pass

def _wrap_response(response):
    pass

class TritonRequestsServer:
    def push(self, requests_id, triton_requests):
        pass
"""


class FakeTriton:
    def __init__(self, proxy: bytes) -> None:
        self._proxy = proxy
        self._model_manager = SimpleNamespace(models=[])

    def bind(self, model_name: str) -> None:
        files = {"file:1/model.py": self._proxy, "file:1/other.py": b"other"}
        model = SimpleNamespace(get_proxy_model_files=lambda: dict(files))
        self._model_manager.models.append(model)

    def models(self) -> list[Any]:
        return self._model_manager.models


def test_port_is_the_one_asked_for_or_a_free_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = holder.getsockname()[1]
        with pytest.raises(ServingError, match=rf"server.port: 127.0.0.1:{taken} is not free: "):
            free_port("127.0.0.1", taken)
    assert free_port("127.0.0.1", taken) == taken
    assert 20_000 <= free_port("127.0.0.1", 0) < 32_000
    with pytest.raises(ServingError, match=r"server.host: 192.0.2.1: no free port was found"):
        free_port("192.0.2.1", 0)


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
    kept = tmp_path / "kept.log"
    kept.write_text("of an earlier server\n")
    for path in (str(kept), None):
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
        assert heading == f"the end of Triton's log{f' ({kept})' if path else ''}:"
        assert (len(lines), lines[0], lines[-1]) == (
            20,
            "  second: \N{REPLACEMENT CHARACTER}",
            "  cut",
        )
        log.close()
        assert log.path.exists() == (path is not None)
        log.write("after its end\n")
    assert kept.read_text().startswith("of an earlier server\nfirst\n\nsecond")
    with pytest.raises(ServingError, match=r"server\.triton_log_file: .*: it cannot be written: "):
        TritonLog(str(tmp_path))


def test_output_of_triton_is_handed_on_from_before_its_start() -> None:
    said: list[str] = []
    triton = SimpleNamespace()

    def initialize() -> None:
        triton._triton_server = SimpleNamespace(_record_logs=print)

    triton._initialize_server = initialize
    hand_output_to(triton, said.append)
    triton._initialize_server()
    triton._triton_server._record_logs("a line")
    assert said == ["a line"]


def test_ready_file_is_there_while_the_server_answers_and_never_half_written(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ready"
    with ready_file(str(path), "http://here"):
        assert path.read_text() == "http://here\n"
        assert list(tmp_path.iterdir()) == [path]
    assert not path.exists()
    with ready_file(None, "http://here"):
        assert list(tmp_path.iterdir()) == []


def test_numpy_that_pytriton_cannot_read_requests_with_is_refused_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, layout: Any
) -> None:
    check_front(ServerConfig(port=0))
    monkeypatch.setattr(np, "__version__", "2.4.6")
    with pytest.raises(ServingError, match=r"^numpy: got 2\.4\.6, wanted <2.*install 'numpy<2'$"):
        check_front(ServerConfig(port=0))


def test_pytritons_proxy_is_ours_for_the_model_that_is_bound_so() -> None:
    triton = FakeTriton(PROXY)
    triton.bind(model_name="before")
    bind_unbatched(triton, model_name="unbatched")
    before, unbatched = triton.models()
    assert before.get_proxy_model_files()["file:1/model.py"] == PROXY
    files = unbatched.get_proxy_model_files()
    assert files["file:1/pytriton_model.py"] == PROXY
    assert b"TritonPythonModel = " in files["file:1/model.py"]
    assert files["file:1/other.py"] == b"other"


def test_pytriton_of_another_version_is_refused() -> None:
    for part in (b"BatchResponsesHandler", b"_wrap_response", b"push"):
        triton = FakeTriton(PROXY.replace(part, b"renamed"))
        bind_unbatched(triton, model_name="unbatched")
        with pytest.raises(ServingError, match=r"model\.py is not that of version 0\.7"):
            triton.models()[0].get_proxy_model_files()


def test_pytriton_learns_of_an_exit_after_who_asked_for_it() -> None:
    said: list[Any] = []
    triton = SimpleNamespace(_on_tritonserver_exit=lambda *given: said.append(given))
    call_at_exit(triton, lambda: said.append("ours"))
    triton._on_tritonserver_exit(False, 1)
    assert said == ["ours", (False, 1)]
