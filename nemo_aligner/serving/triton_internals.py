"""Features of Triton that PyTriton 0.7 does not offer; only this file touches its internals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nemo_aligner.utils.errors import ServingError

# The function in PyTriton's model.py that ``_ERRORS`` replaces; its callers look it up by name.
_REPLACED = (
    b"\ndef _wrap_response(response: Response, requested_outputs_names, model_outputs_dict):"
)
# PyTriton answers an exception by a 500 that has tracebacks of both processes. Triton's own error,
# with its code and one line, is a response like any other.
_ERRORS = b'''

_wrap_tensors = _wrap_response


def _wrap_response(response, requested_names, outputs):
    """Tensors, or the error ``CODE message`` that stands in their place."""
    if response.data is None or "error" not in response.data:
        return _wrap_tensors(response, requested_names, outputs)
    code, message = bytes(response.data["error"].reshape(-1)[0]).decode().split(" ", 1)
    error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, code))
    return pb_utils.InferenceResponse(output_tensors=[], error=error)
'''


def bind_with_errors(triton: Any, **binding: Any) -> None:
    """``triton.bind`` of a model whose answer may be the one tensor ``error``, ``CODE message``.

    PyTriton gives the object that it makes of a binding to nobody.

    Raises:
        ServingError: this PyTriton is not the version that is extended here.
    """
    earlier = list(triton._model_manager.models)
    triton.bind(**binding)
    for model in triton._model_manager.models:
        if model not in earlier:
            model.get_proxy_model_files = _with_errors(model.get_proxy_model_files)


def _with_errors(plain: Callable[[], dict[str, bytes]]) -> Callable[[], dict[str, bytes]]:
    def get_proxy_model_files() -> dict[str, bytes]:
        files = plain()
        (name,) = (name for name in files if name.endswith("/model.py"))
        if _REPLACED not in files[name]:
            raise ServingError(
                f"nvidia-pytriton: its {name} is not that of version 0.7. Run pip install "
                "nvidia-pytriton==0.7.0, or set server.triton_port=null."
            )
        return {**files, name: files[name] + _ERRORS}

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


def start_process(triton: Any) -> None:
    """Start Triton's process, without waiting for it: the first half of ``triton.run``."""
    triton._run_server()


def server_pid(triton: Any) -> int:
    """Return the process of a running Triton, which is also its session."""
    return triton._triton_server._tritonserver_running_cmd.pid


def call_at_exit(triton: Any, cleans_up: Callable[[], bool]) -> None:
    """Have a function called when Triton's process ends by itself.

    It returns whether PyTriton shall clean up then.
    """
    plain = triton._on_tritonserver_exit

    def handle_exit(*status: Any) -> None:
        if cleans_up():
            plain(*status)

    triton._on_tritonserver_exit = handle_exit


def workspace_of(triton: Any) -> Path:
    """Return the folder of Triton's model store, which PyTriton removes at a stop alone."""
    return Path(triton._workspace.path)
