"""The reward model and its contract, with counters, as Triton's models, in KServe's tensors."""

from __future__ import annotations

import asyncio
import os
import sysconfig
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from nemo_aligner.config.serving import ServerConfig
from nemo_aligner.serving.services.reward import RewardService
from nemo_aligner.serving.transports.triton.internals import bind_unbatched, start_in_own_session
from nemo_aligner.serving.wire import kserve
from nemo_aligner.serving.wire.types import Failure, FailureKind, ScoreReply
from nemo_aligner.text.contract import ScoringContract

Tensors = Mapping[str, np.ndarray]

# Of Triton's codes these become HTTP 400, 503 and 500; it has none for 413.
_TRITON_CODES = {
    FailureKind.bad_request: "INVALID_ARG",
    FailureKind.too_large: "INVALID_ARG",
    FailureKind.busy: "UNAVAILABLE",
    FailureKind.internal: "INTERNAL",
}


def build_triton(service: RewardService, config: ServerConfig, port: int) -> Any:
    """PyTriton's server with both models bound, not yet running.

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
            allow_grpc=False,
            allow_metrics=False,
            exit_timeout_secs=config.exit_timeout_secs,
        )
    )
    _bind_reward_model(triton, service, config)
    _bind_contract(triton, service.contract, service)
    return triton


def _bind_reward_model(triton: Any, service: RewardService, config: ServerConfig) -> None:
    from pytriton.model_config import ModelConfig, Tensor

    shaped = [spec for spec in kserve.SHAPED_OUTPUTS if spec.name in service.shaped_outputs]
    bind_unbatched(
        triton,
        model_name=kserve.MODEL_NAME,
        infer_func=_infer_function(service),
        inputs=[Tensor(**vars(spec)) for spec in kserve.INPUTS],
        outputs=[Tensor(**vars(spec)) for spec in (*kserve.OUTPUTS, *shaped)],
        # Without Triton's batcher, which ends a batch where the set of inputs changes, waits half a
        # second where it misses a wake-up, and gives a batch to one who answers all of it at once.
        config=ModelConfig(max_batch_size=config.max_batch_size, batcher=None),
    )


def _bind_contract(triton: Any, contract: ScoringContract, service: RewardService) -> None:
    from pytriton.model_config import ModelConfig, Tensor

    published = kserve.encode_contract(contract)

    # Counters have no model of their own: it would be a process more, and 1.7 s more at the start.
    def infer(requests: list[Any]) -> list[dict[str, np.ndarray]]:
        counted = kserve.encode_statistics(service.statistics())
        return [{**published, **counted} for _ in requests]

    triton.bind(
        model_name=kserve.CONTRACT_MODEL_NAME,
        infer_func=infer,
        inputs=[Tensor(**vars(spec)) for spec in kserve.CONTRACT_INPUTS],
        outputs=[Tensor(**vars(spec)) for spec in kserve.CONTRACT_OUTPUTS],
        config=ModelConfig(batching=False),
    )


def _infer_function(service: RewardService) -> Callable[[list[Any]], Any]:
    async def infer(requests: list[Any]) -> list[dict[str, np.ndarray]]:
        answers = [answer_request(service, dict(request.items())) for request in requests]
        return [_to_outputs(each) for each in await asyncio.gather(*answers)]

    return infer


async def answer_request(service: RewardService, inputs: Tensors) -> ScoreReply | Failure:
    """What one request's tensors are answered with."""
    return await service.answer(
        *kserve.size_of_request(inputs), lambda: kserve.decode_request(inputs)
    )


def _to_outputs(reply: ScoreReply | Failure) -> dict[str, np.ndarray]:
    if isinstance(reply, ScoreReply):
        return kserve.encode_reply(reply)
    code = _TRITON_CODES[reply.kind]
    return {"error": np.array([f"{code} {reply.message}".encode()], dtype=np.object_)}
