"""PyTriton's proxy, made to hand on every request as it comes; Triton runs it, beside its models.

PyTriton 0.7 waits in ``execute`` for the answer, so that one request at a time is known to those
who could score many together, and answers an exception to every request of a batch. Triton itself
asks for neither: a response may be sent later, and may be an error of its own.
``triton_internals.py`` copies this file into Triton's model store as ``model.py``, beside
PyTriton's of that name.
"""

from __future__ import annotations

from importlib import import_module
from itertools import count
from typing import Any

# Both exist only where Triton runs this file.
pb_utils: Any = import_module("triton_python_backend_utils")
pytriton_model: Any = import_module(".pytriton_model", __package__)

_IDS = count()
_wrap_rewards = pytriton_model._wrap_response


class _Asked:
    """A request that was passed on: the shared memory of its tensors is free again."""

    def __init__(self, request: Any) -> None:
        self._names = request.requested_output_names()
        self.sender = request.get_response_sender()

    def requested_output_names(self) -> Any:
        return self._names


class _ResponsesHandler(pytriton_model.BatchResponsesHandler):  # type: ignore[misc]
    async def handle_responses(self, scope: Any, queue: Any, future: Any) -> Any:
        asked = self._requests_map[scope["requests_id"]]
        found = await super().handle_responses(scope, queue, future)
        if isinstance(found, Exception) or found is None:
            error = pb_utils.TritonError(str(found))
            found = [pb_utils.InferenceResponse(output_tensors=[], error=error) for _ in asked]
        for each, response in zip(asked, found, strict=True):
            each.sender.send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return found


def _wrap_response(response: Any, requested_names: Any, outputs: Any) -> Any:
    """Tensors, or the error ``CODE message`` that stands in their place."""
    if response.data is None or "error" not in response.data:
        return _wrap_rewards(response, requested_names, outputs)
    code, message = bytes(response.data["error"].reshape(-1)[0]).decode().split(" ", 1)
    error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, code))
    return pb_utils.InferenceResponse(output_tensors=[], error=error)


pytriton_model._wrap_response = _wrap_response
pytriton_model.BatchResponsesHandler = _ResponsesHandler


def _refused(request: Any) -> bool:
    """Refuse a request with an empty input, which PyTriton cannot pass on."""
    for tensor in request.inputs():
        shape = list(tensor.shape())
        if 0 in shape:
            text = f"{tensor.name()}: got shape {shape}, wanted no dimension of 0"
            error = pb_utils.TritonError(text, pb_utils.TritonError.INVALID_ARG)
            request.get_response_sender().send(
                pb_utils.InferenceResponse(output_tensors=[], error=error),
                pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
            )
            return True
    return False


class _Model(pytriton_model.TritonPythonModel):  # type: ignore[misc]
    def execute(self, requests: list[Any]) -> None:
        """Hand the requests on; each is answered by its own sender, in any order."""
        requests = [request for request in requests if not _refused(request)]
        if not requests:
            return
        requests_id = (next(_IDS) % 2**32).to_bytes(4, "big")
        self._requests[requests_id] = [_Asked(request) for request in requests]
        # Until their tensors are copied.
        self._requests_server.push(requests_id, requests).result()


# The name that Triton looks for.
TritonPythonModel = _Model
