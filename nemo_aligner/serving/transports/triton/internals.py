"""What Triton can do and PyTriton 0.7 does not offer; all that touches PyTriton's own parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from nemo_aligner.errors import ServingError

# PyTriton's proxy answers an exception to every request of a batch; Triton itself has an error per
# response. This is appended to the proxy's model.py in Triton's model store, and uses that.
_PROXY_HOOK = "\ndef _wrap_response("
_PROXY_EXTENSION = """

_wrap_rewards = _wrap_response


def _wrap_response(response, requested_outputs_names, model_outputs_dict):
    if response.data is None or "error" not in response.data:
        return _wrap_rewards(response, requested_outputs_names, model_outputs_dict)
    code, message = bytes(response.data["error"].reshape(-1)[0]).decode().split(" ", 1)
    error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, code))
    return pb_utils.InferenceResponse(output_tensors=[], error=error)
"""


def bind_ragged(triton: Any, **binding: Any) -> None:
    """``triton.bind`` of a model whose requests differ in length and fail one by one.

    PyTriton offers neither, and gives the model that it makes of a binding to nobody.

    Raises:
        ServingError: this PyTriton's proxy is another than is extended here.
    """
    before = list(triton._model_manager.models)
    triton.bind(**binding)
    for model in triton._model_manager.models:
        if model not in before:
            model.get_model_config = _with_ragged_inputs(model.get_model_config)
            model.get_proxy_model_files = _with_an_error_per_request(model.get_proxy_model_files)


def _with_ragged_inputs(plain: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    def get_model_config() -> dict[str, Any]:
        config = plain()
        for tensor in config["input"]:
            tensor["allow_ragged_batch"] = True
        return config

    return get_model_config


def _with_an_error_per_request(
    plain: Callable[[], dict[str, bytes]],
) -> Callable[[], dict[str, bytes]]:
    def get_proxy_model_files() -> dict[str, bytes]:
        files = plain()
        name = next(name for name in files if name.endswith("/model.py"))
        if _PROXY_HOOK.encode() not in files[name]:
            raise ServingError(f"nvidia-pytriton: its {name} is not that of version 0.7")
        return {**files, name: files[name] + _PROXY_EXTENSION.encode()}

    return get_proxy_model_files


def start_in_own_session() -> None:
    """Have Triton's process stand in a session of its own.

    torchrun ends a process group as one; apart from it, Triton can drain. PyTriton starts Triton by
    ``sh`` and passes no options on, so it is a default of all that ``sh`` starts.
    """
    import sh

    sh.Command._call_args["new_session"] = True


def ended_early(triton: Any) -> bool:
    """Whether Triton's process was started and is gone; PyTriton tells of it only when it runs."""
    server = triton._triton_server
    begun = server is not None and server._tritonserver_running_cmd is not None
    return begun and not server.is_alive()


def workspace_of(triton: Any) -> Path:
    """The folder of Triton's model store, which PyTriton removes at a stop, but not if killed."""
    return Path(triton._workspace.path)
