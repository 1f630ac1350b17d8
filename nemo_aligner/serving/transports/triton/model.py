"""The reward model and its contract as Triton's models, in KServe's tensors."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nemo_aligner.config.serving import ServerConfig
from nemo_aligner.serving.services.reward import RewardEndpoint, or_failure
from nemo_aligner.serving.transports.triton.internals import bind_ragged, start_in_own_session
from nemo_aligner.serving.wire import kserve
from nemo_aligner.serving.wire.types import Failure, ScoreReply
from nemo_aligner.text.contract import ScoringContract

Tensors = Mapping[str, np.ndarray]


def build_triton(
    endpoint: RewardEndpoint, contract: ScoringContract, config: ServerConfig, port: int
) -> Any:
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
    _bind_reward_model(triton, endpoint, config)
    _bind_contract(triton, contract)
    return triton


def _bind_reward_model(triton: Any, endpoint: RewardEndpoint, config: ServerConfig) -> None:
    from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
    from pytriton.model_config.common import QueuePolicy

    bind_ragged(
        triton,
        model_name=kserve.MODEL_NAME,
        infer_func=_infer_function(endpoint),
        inputs=[Tensor(**vars(spec)) for spec in kserve.INPUTS],
        outputs=[Tensor(**vars(spec)) for spec in kserve.OUTPUTS],
        config=ModelConfig(
            max_batch_size=config.max_batch_size,
            batcher=DynamicBatcher(
                max_queue_delay_microseconds=config.max_queue_delay_microseconds,
                default_queue_policy=QueuePolicy(max_queue_size=config.max_queue_size),
            ),
        ),
    )


def _bind_contract(triton: Any, contract: ScoringContract) -> None:
    from pytriton.model_config import ModelConfig, Tensor

    published = kserve.encode_contract(contract)
    triton.bind(
        model_name=kserve.CONTRACT_MODEL_NAME,
        infer_func=lambda requests: [published for _ in requests],
        inputs=[Tensor(**vars(spec)) for spec in kserve.CONTRACT_INPUTS],
        outputs=[Tensor(**vars(spec)) for spec in kserve.CONTRACT_OUTPUTS],
        config=ModelConfig(batching=False),
    )


def _infer_function(endpoint: RewardEndpoint) -> Callable[[list[Any]], list[dict[str, np.ndarray]]]:
    def infer(requests: list[Any]) -> list[dict[str, np.ndarray]]:
        answers = answer_requests(endpoint, [dict(request.items()) for request in requests])
        return [_to_outputs(each) for each in answers]

    return infer


def answer_requests(
    endpoint: RewardEndpoint, requests: Sequence[Tensors]
) -> list[ScoreReply | Failure]:
    """One reply or failure per request, in order; one that cannot be read fails alone."""
    return endpoint.answer([or_failure(kserve.decode_request, each) for each in requests])


def _to_outputs(reply: ScoreReply | Failure) -> dict[str, np.ndarray]:
    if isinstance(reply, ScoreReply):
        return kserve.encode_reply(reply)
    code = "INVALID_ARG" if reply.bad_request else "INTERNAL"
    return {"error": np.array([f"{code} {reply.message}".encode()], dtype=np.object_)}
