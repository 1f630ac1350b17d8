"""What a server is made of: a backend on every rank, and its service on rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from nemo_aligner.serving.endpoints import Endpoint
from nemo_aligner.serving.engine.executor import ModelRanks, Operation
from nemo_aligner.serving.scoring import ScoringService


class Service(Protocol):
    """The endpoints of a backend with their queues and threads, on rank 0 while it serves."""

    @property
    def endpoints(self) -> Sequence[Endpoint]: ...

    @property
    def scoring(self) -> ScoringService | None:
        """What the protocols of trainers ask; None for a service that gives no rewards."""

    @property
    def startup_log(self) -> Sequence[str]:
        """Lines for the log once the server answers."""

    async def statistics(self) -> Mapping[str, Mapping[str, float] | None]:
        """What it has counted since its start, by the name of its model's server."""

    def report(self) -> str | None:
        """Load since the last report, in a line; None without any."""

    def stop(self) -> None:
        """Finish what was submitted and end all threads; no request may be in flight."""


class Backend(Protocol):
    """The model's part of a service, which every rank has."""

    @property
    def operations(self) -> Mapping[str, Operation]:
        """Computations for all ranks, by names that no other backend has."""

    def reset_cache(self) -> None:
        """Drop all caches: an operation has failed on some rank."""

    def start(self, ranks: ModelRanks) -> Service:
        """Rank 0: begin, with a first operation that shows whether the model can run."""
