"""What is changed inside PyTriton, on stand-ins for its parts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nemo_aligner.errors import ServingError
from nemo_aligner.serving.transports.triton.internals import bind_ragged, ended_early, workspace_of


class FakeTriton:
    def __init__(self, proxy: bytes) -> None:
        self._proxy = proxy
        self._model_manager = SimpleNamespace(models=[])

    def bind(self, model_name: str) -> None:
        files = {"/store/1/model.py": self._proxy, "/store/1/other.py": b"other"}
        model = SimpleNamespace(
            get_model_config=lambda: {"model_name": model_name, "input": [{"name": "tokens"}]},
            get_proxy_model_files=lambda: files,
        )
        self._model_manager.models.append(model)

    def models(self) -> list[Any]:
        return self._model_manager.models


def test_only_the_model_that_is_bound_so_is_ragged_and_has_errors_of_its_own() -> None:
    proxy = b"import x\n\ndef _wrap_response(response):\n    pass\n"
    triton = FakeTriton(proxy)
    triton.bind(model_name="before")
    bind_ragged(triton, model_name="ragged")
    before, ragged = triton.models()
    assert before.get_model_config()["input"] == [{"name": "tokens"}]
    assert before.get_proxy_model_files()["/store/1/model.py"] == proxy
    assert ragged.get_model_config()["input"] == [{"name": "tokens", "allow_ragged_batch": True}]
    files = ragged.get_proxy_model_files()
    assert files["/store/1/model.py"].startswith(proxy)
    assert b"TritonError" in files["/store/1/model.py"]
    assert files["/store/1/other.py"] == b"other"


def test_another_version_of_pytriton_is_refused() -> None:
    triton = FakeTriton(b"def wrap_response(response):\n    pass\n")
    bind_ragged(triton, model_name="ragged")
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
