"""Add what PyTriton 0.7 lacks; this is the only module that uses PyTriton's private names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nemo_aligner.utils.errors import ServingError

# The function in PyTriton's source ``model.py`` that ``_ERRORS`` redefines. A source without this
# line is from another version.
_REPLACED = (
    b"\ndef _wrap_response(response: Response, requested_outputs_names, model_outputs_dict):"
)
# Code that is appended to ``model.py``. If a model raises, PyTriton answers status 500 with the
# tracebacks of both processes; this code answers with a Triton error instead: a code and one line.
_ERRORS = b'''

_wrap_tensors = _wrap_response


def _wrap_response(response, requested_names, outputs):
    """Return the tensors of a response, or the error ``CODE message`` that replaces them."""
    if response.data is None or "error" not in response.data:
        return _wrap_tensors(response, requested_names, outputs)
    code, message = bytes(response.data["error"].reshape(-1)[0]).decode().split(" ", 1)
    error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, code))
    return pb_utils.InferenceResponse(output_tensors=[], error=error)
'''


def bind_with_errors(triton: Any, **binding: Any) -> None:
    """Bind a model like ``triton.bind``, and let the model answer with a Triton error.

    To do so, the model returns one tensor ``error`` with the text ``CODE message``. PyTriton does
    not return the object that it creates for a binding, so the lists of models before and after it
    are compared.

    Raises:
        ServingError: the installed PyTriton is not version 0.7.
    """
    earlier_models = list(triton._model_manager.models)
    triton.bind(**binding)
    for model in triton._model_manager.models:
        if model not in earlier_models:
            model.get_proxy_model_files = _add_error_support(model.get_proxy_model_files)


def _add_error_support(
    original: Callable[[], dict[str, bytes]],
) -> Callable[[], dict[str, bytes]]:
    def get_proxy_model_files() -> dict[str, bytes]:
        files = original()
        (name,) = (name for name in files if name.endswith("/model.py"))
        if _REPLACED not in files[name]:
            raise ServingError(
                f"nvidia-pytriton: {name} differs from that of version 0.7. Run pip install "
                "nvidia-pytriton==0.7.0, or set server.triton_port=null."
            )
        return {**files, name: files[name] + _ERRORS}

    return get_proxy_model_files


def start_in_own_session() -> None:
    """Make PyTriton start Triton's process in a separate session (as by ``setsid``).

    torchrun kills the whole process group of this server. In another session, Triton survives that
    and can drain. PyTriton starts Triton with the library ``sh``, and passes no options to it, so
    this function changes the default of ``sh`` for everything that it starts in this process.
    """
    import sh

    sh.Command._call_args["new_session"] = True


def hand_output_to(triton: Any, write: Callable[[str], None]) -> None:
    """Call ``write`` with what Triton and its Python stubs print, instead of printing it.

    PyTriton creates the object with the output callback only when it starts Triton, so this wraps
    the method that creates it.
    """
    original = triton._initialize_server

    def initialize() -> None:
        original()
        triton._triton_server._record_logs = write

    triton._initialize_server = initialize


def start_process(triton: Any) -> None:
    """Start Triton's process without waiting until it is ready; ``triton.run`` would wait."""
    triton._run_server()


def server_pid(triton: Any) -> int:
    """Return the process id of a running Triton, which is also its session id."""
    return triton._triton_server._tritonserver_running_cmd.pid


def call_at_exit(triton: Any, cleans_up: Callable[[], bool]) -> None:
    """Call ``cleans_up`` when Triton's process ends by itself.

    ``cleans_up`` returns whether PyTriton is to clean up afterwards.
    """
    original = triton._on_tritonserver_exit

    def handle_exit(*status: Any) -> None:
        if cleans_up():
            original(*status)

    triton._on_tritonserver_exit = handle_exit


def workspace_of(triton: Any) -> Path:
    """Return the folder with Triton's model store.

    PyTriton removes the folder only at a normal stop.
    """
    return Path(triton._workspace.path)
