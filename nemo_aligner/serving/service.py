"""Services of a server: their endpoints, and their operations on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from nemo_aligner.serving.engine.executor import ModelRanks, Operation
from nemo_aligner.serving.protocols import TensorSpec
from nemo_aligner.serving.protocols.kserve import Tensors


@dataclass(frozen=True)
class Endpoint:
    """A named endpoint for requests.

    Attributes:
        inputs: tensors of a request, and ``outputs`` those of its answer.
        answer: maps a request's tensors to the answer's. Any error is the answer to that request
            alone (``failure_of``). Any number of requests run at once, those of each endpoint in an
            event loop of its own.
        max_rows: most rows of a request. The shapes of ``inputs`` and ``outputs`` then leave out
            the first dimension, which counts rows. 0 means that they are whole shapes.
        comes_first: available before the others, as clients ask it before they use them.
    """

    name: str
    inputs: Sequence[TensorSpec]
    outputs: Sequence[TensorSpec]
    answer: Callable[[Tensors], Coroutine[Any, Any, Tensors]]
    max_rows: int = 0
    comes_first: bool = False


class Service(Protocol):
    """Endpoints with their queues and threads, on rank 0 while it serves."""

    @property
    def endpoints(self) -> Sequence[Endpoint]: ...

    @property
    def startup_log(self) -> Sequence[str]:
        """Lines for the log once the server answers."""

    def report(self) -> str | None:
        """Load since the last report, in a line; None without any."""

    def close(self) -> None:
        """Finish what was submitted and end all threads; no request may be in flight."""


def in_order(services: Sequence[Service]) -> list[Endpoint]:
    """The endpoints of all services, in the order in which a transport has to load them."""
    endpoints = [endpoint for each in services for endpoint in each.endpoints]
    return sorted(endpoints, key=lambda endpoint: not endpoint.comes_first)


class Servable(Protocol):
    """A backend: the model's part of a service, which every rank has."""

    @property
    def operations(self) -> Mapping[str, Operation]:
        """Computations for all ranks, by names that no other servable has."""

    def reset_cache(self) -> None:
        """Drop all caches: an operation has failed on some rank."""

    def start(self, ranks: ModelRanks) -> Service:
        """Rank 0: begin, with a first operation that shows whether the model can run."""
