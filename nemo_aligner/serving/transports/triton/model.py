"""Endpoints as Triton's models, in KServe's tensors."""

from __future__ import annotations

import asyncio
import os
import sysconfig
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nemo_aligner.config.serving import ServerConfig
from nemo_aligner.serving.service import Endpoint, Tensors
from nemo_aligner.serving.tokens import has_token
from nemo_aligner.serving.transports.triton.internals import bind_unbatched, start_in_own_session
from nemo_aligner.serving.wire import kserve
from nemo_aligner.serving.wire.types import Failure, FailureKind

_TOKEN_HEADER = "authorization"
# Of Triton's codes these become HTTP 400, 503 and 500; it has none for 401 and 413.
_TRITON_CODES = {
    FailureKind.bad_request: "INVALID_ARG",
    FailureKind.unauthorized: "INVALID_ARG",
    FailureKind.too_large: "INVALID_ARG",
    FailureKind.busy: "UNAVAILABLE",
    FailureKind.unreachable: "UNAVAILABLE",
    FailureKind.internal: "INTERNAL",
}


def build_triton(
    endpoints: Sequence[Endpoint], config: ServerConfig, port: int, token: str | None
) -> Any:
    """PyTriton's server with a model bound for each endpoint, not yet running.

    With a ``token`` each of them asks for it. What else Triton does over HTTP, as to load a model
    or to read shared memory, PyTriton's own token keeps for itself.

    Raises:
        ServingError: another version of PyTriton than is known here.
    """
    # The stub loads the libpython of the running interpreter, and finds it only by this variable.
    libraries = [sysconfig.get_config_var("LIBDIR"), os.environ.get("LD_LIBRARY_PATH")]
    os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, libraries))

    from pytriton.triton import Triton, TritonConfig

    start_in_own_session()
    triton = Triton(
        config=TritonConfig(
            http_address=config.host,
            http_port=port,
            http_header_forward_pattern=None if token is None else f"(?i){_TOKEN_HEADER}",
            allow_grpc=False,
            allow_metrics=False,
            exit_timeout_secs=config.exit_timeout_secs,
        )
    )
    for endpoint in endpoints:
        _bind(triton, endpoint, token)
    return triton


def _bind(triton: Any, endpoint: Endpoint, token: str | None) -> None:
    from pytriton.model_config import ModelConfig, Tensor

    is_batched = endpoint.max_rows > 0
    bind_unbatched(
        triton,
        model_name=endpoint.name,
        infer_func=_infer_function(endpoint, token),
        inputs=[Tensor(**vars(spec)) for spec in endpoint.inputs],
        outputs=[Tensor(**vars(spec)) for spec in endpoint.outputs],
        # Without Triton's batcher, which ends a batch where the set of inputs changes, waits half a
        # second where it misses a wake-up, and gives a batch to one who answers all of it at once.
        config=ModelConfig(batching=is_batched, max_batch_size=endpoint.max_rows, batcher=None),
    )


def _infer_function(endpoint: Endpoint, token: str | None) -> Callable[[list[Any]], Any]:
    async def answer(request: Any) -> Tensors | Failure:
        if token is not None and not has_token(_sent_tokens(request), token):
            return Failure(kserve.NO_TOKEN, FailureKind.unauthorized)
        return await endpoint.answer(dict(request.items()))

    async def infer(requests: list[Any]) -> list[Tensors]:
        answers = await asyncio.gather(*map(answer, requests))
        return [_to_outputs(each) for each in answers]

    return infer


def _sent_tokens(request: Any) -> list[bytes]:
    """Triton hands headers on among a request's parameters, by the names that they were sent by."""
    parameters = request.parameters or {}
    return [
        str(value).encode() for name, value in parameters.items() if name.lower() == _TOKEN_HEADER
    ]


def _to_outputs(answer: Tensors | Failure) -> Tensors:
    if not isinstance(answer, Failure):
        return answer
    code = _TRITON_CODES[answer.kind]
    return {"error": np.array([f"{code} {answer.message}".encode()], dtype=np.object_)}
