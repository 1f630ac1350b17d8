"""Features of Triton that PyTriton 0.7 does not offer; only this file touches its internals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nemo_aligner.utils.errors import ServingError

# Parts of PyTriton's own model.py that triton_proxy.py builds on.
_KNOWN = (b"\ndef _wrap_response(", b"\nclass BatchResponsesHandler", b"def push(self, requests_id")


def bind_unbatched(triton: Any, **binding: Any) -> None:
    """``triton.bind`` of a model whose requests are handed on as they come, and fail one by one.

    PyTriton offers neither, and gives the model that it makes of a binding to nobody.

    Raises:
        ServingError: this PyTriton's proxy is another than is extended here.
    """
    before = list(triton._model_manager.models)
    triton.bind(**binding)
    for model in triton._model_manager.models:
        if model not in before:
            model.get_proxy_model_files = _with_our_proxy(model.get_proxy_model_files)


def _with_our_proxy(plain: Callable[[], dict[str, bytes]]) -> Callable[[], dict[str, bytes]]:
    def get_proxy_model_files() -> dict[str, bytes]:
        files = plain()
        name = next(name for name in files if name.endswith("/model.py"))
        theirs = files.pop(name)
        if not all(part in theirs for part in _KNOWN):
            raise ServingError(f"nvidia-pytriton: its {name} is not that of version 0.7")
        ours = Path(__file__).with_name("triton_proxy.py").read_bytes()
        return {**files, name.replace("/model.py", "/pytriton_model.py"): theirs, name: ours}

    return get_proxy_model_files


def start_in_own_session() -> None:
    """Have Triton's process stand in a session of its own.

    torchrun ends a process group as one; apart from it, Triton can drain. PyTriton starts Triton by
    ``sh`` and passes no options on, so it is a default of all that ``sh`` starts.
    """
    import sh

    sh.Command._call_args["new_session"] = True


def hand_output_to(triton: Any, write: Callable[[str], None]) -> None:
    """Have ``write`` called with what Triton and its Python stubs print, instead of stdout.

    PyTriton makes the object that starts Triton's process just before it starts it.
    """
    plain = triton._initialize_server

    def initialize() -> None:
        plain()
        triton._triton_server._record_logs = write

    triton._initialize_server = initialize


def server_pid(triton: Any) -> int:
    """The process of a running Triton, which is also its session."""
    return triton._triton_server._tritonserver_running_cmd.pid


def call_at_exit(triton: Any, callback: Callable[[], None]) -> None:
    """Have ``callback`` called where Triton's process ends by itself, before PyTriton cleans up."""
    plain = triton._on_tritonserver_exit

    def ended(*given: Any) -> None:
        callback()
        plain(*given)

    triton._on_tritonserver_exit = ended


def workspace_of(triton: Any) -> Path:
    """The folder of Triton's model store, which PyTriton removes at a stop, but not if killed."""
    return Path(triton._workspace.path)
