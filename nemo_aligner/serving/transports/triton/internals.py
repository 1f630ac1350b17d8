"""What Triton can do and PyTriton 0.7 does not offer; all that touches PyTriton's own parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nemo_aligner.errors import ServingError

# What proxy.py builds on, in PyTriton's own model.py.
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
        ours = Path(__file__).with_name("proxy.py").read_bytes()
        return {**files, name.replace("/model.py", "/pytriton_model.py"): theirs, name: ours}

    return get_proxy_model_files


def start_in_own_session() -> None:
    """Have Triton's process stand in a session of its own.

    torchrun ends a process group as one; apart from it, Triton can drain. PyTriton starts Triton by
    ``sh`` and passes no options on, so it is a default of all that ``sh`` starts.
    """
    import sh

    sh.Command._call_args["new_session"] = True


def server_pid(triton: Any) -> int | None:
    """The process of Triton's server, which is its session, too; None if it was not started yet."""
    server = triton._triton_server
    command = None if server is None else server._tritonserver_running_cmd
    return None if command is None else command.pid


def ended_early(triton: Any) -> bool:
    """Whether Triton's process was started and is gone; PyTriton tells of it only when it runs."""
    return server_pid(triton) is not None and not triton._triton_server.is_alive()


def workspace_of(triton: Any) -> Path:
    """The folder of Triton's model store, which PyTriton removes at a stop, but not if killed."""
    return Path(triton._workspace.path)
