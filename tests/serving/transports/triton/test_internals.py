"""What is changed inside PyTriton, on stand-ins for its parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nemo_aligner.errors import ServingError
from nemo_aligner.serving.transports.triton.internals import (
    bind_unbatched,
    call_at_exit,
    server_pid,
    workspace_of,
)

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


def test_only_the_model_that_is_bound_so_has_our_proxy_with_pytritons_beside_it() -> None:
    triton = FakeTriton(PROXY)
    triton.bind(model_name="before")
    bind_unbatched(triton, model_name="unbatched")
    before, unbatched = triton.models()
    assert before.get_proxy_model_files()["file:1/model.py"] == PROXY
    files = unbatched.get_proxy_model_files()
    assert files["file:1/pytriton_model.py"] == PROXY
    assert b"TritonPythonModel = " in files["file:1/model.py"]
    assert files["file:1/other.py"] == b"other"


@pytest.mark.parametrize("part", [b"BatchResponsesHandler", b"_wrap_response", b"push"])
def test_another_version_of_pytriton_is_refused(part: bytes) -> None:
    triton = FakeTriton(PROXY.replace(part, b"renamed"))
    bind_unbatched(triton, model_name="unbatched")
    with pytest.raises(ServingError, match=r"model\.py is not that of version 0\.7"):
        triton.models()[0].get_proxy_model_files()


def test_who_asks_is_told_of_an_exit_before_pytriton_is() -> None:
    said: list[Any] = []
    triton = SimpleNamespace(_on_tritonserver_exit=lambda *given: said.append(given))
    call_at_exit(triton, lambda: said.append("ours"))
    triton._on_tritonserver_exit(False, 1)
    assert said == ["ours", (False, 1)]


def test_a_servers_process_is_the_one_that_pytriton_has_started() -> None:
    command = SimpleNamespace(pid=12)
    server = SimpleNamespace(_tritonserver_running_cmd=command)
    assert server_pid(SimpleNamespace(_triton_server=server)) == 12


def test_the_workspace_is_pytritons(tmp_path: Any) -> None:
    assert workspace_of(SimpleNamespace(_workspace=SimpleNamespace(path=tmp_path))) == tmp_path
