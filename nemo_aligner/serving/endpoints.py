"""The models that the server offers over KServe v2: name, tensors, and the function that answers.

The HTTP front (``front/kserve.py``) and NVIDIA Triton (``triton.py``) serve the same endpoints.
``reward_endpoints`` builds the endpoints of any ``ScoringService``, so a gateway also has them. A
critic's endpoints are built in ``critic.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from nemo_aligner.config.serving import FrontConfig
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.serving.failures import FINAL_ROWS, NO_ROWS, FailureKind, RequestError
from nemo_aligner.serving.protocols import ScoreRequest, TensorSpec, kserve
from nemo_aligner.serving.protocols.kserve_body import Tensors
from nemo_aligner.serving.scoring import ScoringService, TemplateParts

# Requests of up to this many bytes are decoded in the event loop. Larger ones take milliseconds,
# during which no other request could be answered.
_SHORT_BYTES = 64 * 2**10
# Answers of up to this many rows are encoded in the event loop.
_FEW_ROWS = 256

T = TypeVar("T")
# Not more than two threads, because JSON parsers hold the GIL: more would slow down the event loop.
_large_bodies = ThreadPoolExecutor(2, "large bodies")


@dataclass(frozen=True)
class Endpoint:
    """One model of KServe v2.

    Attributes:
        name: name of the model.
        inputs: tensors of a request.
        outputs: tensors of its answer.
        answer: computes the output tensors of a request. An error concerns only that request
            (``failure_of``). Any number of calls run at once, all in the front's event loop.
        max_rows: maximum number of rows of a request. The shapes of ``inputs`` and ``outputs`` then
            omit the first dimension, which counts rows. 0 means that the shapes are complete.
        answer_probe: like ``answer``, for a request that is not counted; None if not supported.
        answer_by_row: like ``answer``, but a row that is rejected does not fail the request; None
            if not supported.
    """

    name: str
    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    answer: Callable[[Tensors], Coroutine[Any, Any, Tensors]]
    max_rows: int = 0
    answer_probe: Callable[[Tensors], Coroutine[Any, Any, Tensors]] | None = None
    answer_by_row: Callable[[Tensors], Coroutine[Any, Any, Tensors]] | None = None


def reward_endpoints(
    service: ScoringService, max_rows: int, optional_outputs: Collection[str]
) -> list[Endpoint]:
    """Build the endpoints ``contract`` and ``reward_model`` of a scoring service.

    Args:
        service: scores the requests.
        max_rows: maximum number of rows of a request.
        optional_outputs: names of the ``kserve.OPTIONAL_OUTPUTS`` that answers may have.
    """

    async def score(
        inputs: Tensors, aside: Collection[FailureKind] = NO_ROWS, is_probe: bool = False
    ) -> Tensors:
        # Only failures while decoding are counted here: ``service.answer`` counts its own failures.
        with nullcontext() if is_probe else service.counting_failures():
            request = await decode_request(inputs, service.limits)
        scored = await service.answer(request, aside, is_probe)
        if len(scored.rewards) <= _FEW_ROWS:
            return kserve.encode_rewards(scored)
        return await asyncio.to_thread(kserve.encode_rewards, scored)

    async def contract() -> ScoringContract:
        published = await service.find_contract()
        if published is None:
            raise RequestError("no backend publishes a scoring contract", FailureKind.bad_request)
        return published

    async def statistics() -> Mapping[str, float]:
        return sum_statistics(await service.statistics())

    outputs = [spec for spec in kserve.OPTIONAL_OUTPUTS if spec.name in optional_outputs]
    return [
        contract_endpoint(
            contract, service.template_parts, statistics, lambda: service.fingerprint
        ),
        Endpoint(
            kserve.MODEL_NAME,
            kserve.INPUTS,
            [*kserve.OUTPUTS, *outputs],
            score,
            max_rows,
            partial(score, is_probe=True),
            partial(score, aside=FINAL_ROWS),
        ),
    ]


def contract_endpoint(
    contract: Callable[[], Awaitable[ScoringContract]],
    template_parts: Callable[[], Awaitable[TemplateParts]],
    statistics: Callable[[], Awaitable[Mapping[str, float]]],
    fingerprint: Callable[[], str | None] = lambda: None,
) -> Endpoint:
    """Build the endpoint ``contract``: the scoring contract and the counts of a server.

    All arguments are functions, called for each request: ``template_parts`` returns the text that
    the chat template writes around a sample, ``statistics`` the counts by name.

    ``fingerprint`` returns the model fingerprint. It is called after ``contract`` was awaited, so
    that both describe the same model.
    """

    async def publish(inputs: Tensors) -> Tensors:
        parts, published = await template_parts(), await contract()
        return {
            **kserve.encode_contract(published, parts.turn_end, parts.sample_frame, fingerprint()),
            **kserve.encode_statistics(await statistics()),
        }

    return Endpoint(
        kserve.CONTRACT_MODEL_NAME, kserve.CONTRACT_INPUTS, kserve.CONTRACT_OUTPUTS, publish
    )


async def decode_request(inputs: Tensors, limits: FrontConfig) -> ScoreRequest:
    """Decode the tensors of a KServe request, in another thread if they exceed 64 KiB.

    Raises:
        RequestError: the tensors have more than ``max_request_bytes`` bytes.
        ServingError: the tensors are invalid.
    """
    num_bytes = check_num_bytes(inputs, limits)
    return await call_by_size(num_bytes, kserve.decode_request, inputs)


def check_num_bytes(inputs: Tensors, limits: FrontConfig) -> int:
    """Count the bytes of a request's tensors, and check the limit, because Triton has none.

    Raises:
        RequestError: the tensors have more than ``max_request_bytes`` bytes.
    """
    _, num_bytes = kserve.size_of_request(inputs)
    if num_bytes > limits.max_request_bytes:
        raise RequestError(
            f"got a request of {num_bytes} bytes, wanted at most {limits.max_request_bytes} "
            f"({limits.section}.max_request_bytes). Send fewer rows per request",
            FailureKind.too_large,
        )
    return num_bytes


async def call_by_size(num_bytes: int, work: Callable[..., T], *arguments: Any) -> T:
    """Return ``work(*arguments)``, and run it in another thread if the data is large.

    ``num_bytes`` is the size of the data. Above ``_SHORT_BYTES``, the work would keep the event
    loop from answering other requests.
    """
    if num_bytes <= _SHORT_BYTES:
        return work(*arguments)
    return await asyncio.get_running_loop().run_in_executor(_large_bodies, work, *arguments)


def sum_statistics(servers: Mapping[str, Mapping[str, float] | None]) -> dict[str, float]:
    """Add up the counts of several servers by name; unreachable servers (None) are skipped."""
    total: dict[str, float] = {}
    for counts in servers.values():
        for name, count in (counts or {}).items():
            total[name] = total.get(name, 0.0) + count
    return total
