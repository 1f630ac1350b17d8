"""What is changed inside PyTriton, on stand-ins for its parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nemo_aligner.errors import ServingError
from nemo_aligner.serving.transports.triton.internals import (
    bind_unbatched,
    ended_early,
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
    assert b"class TritonPythonModel" in files["file:1/model.py"]
    assert files["file:1/other.py"] == b"other"


@pytest.mark.parametrize("part", [b"BatchResponsesHandler", b"_wrap_response", b"push"])
def test_another_version_of_pytriton_is_refused(part: bytes) -> None:
    triton = FakeTriton(PROXY.replace(part, b"renamed"))
    bind_unbatched(triton, model_name="unbatched")
    with pytest.raises(ServingError, match=r"model\.py is not that of version 0\.7"):
        triton.models()[0].get_proxy_model_files()


@pytest.mark.parametrize(
    ("server", "early"),
    [
        (None, False),
        (SimpleNamespace(_tritonserver_running_cmd=None, is_alive=lambda: False), False),
        (SimpleNamespace(_tritonserver_running_cmd="cmd", is_alive=lambda: True), False),
        (SimpleNamespace(_tritonserver_running_cmd="cmd", is_alive=lambda: False), True),
    ],
    ids=["not_made", "not_started", "alive", "gone"],
)
def test_a_triton_that_was_started_and_is_gone_has_ended_early(server: Any, early: bool) -> None:
    assert ended_early(SimpleNamespace(_triton_server=server)) == early


def test_the_workspace_is_pytritons(tmp_path: Any) -> None:
    assert workspace_of(SimpleNamespace(_workspace=SimpleNamespace(path=tmp_path))) == tmp_path
