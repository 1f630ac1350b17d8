"""The interfaces that ``server.py`` runs: a ``Backend`` on every rank, a ``Service`` on rank 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from nemo_aligner.serving.endpoints import Endpoint
from nemo_aligner.serving.engine.executor import ModelRanks, Operation
from nemo_aligner.serving.scoring import ScoringService


class Service(Protocol):
    """A backend's endpoints with their queues and threads; it exists on rank 0 while serving."""

    @property
    def endpoints(self) -> Sequence[Endpoint]: ...

    @property
    def scoring(self) -> ScoringService | None:
        """The scoring service for the HTTP protocols.

        None if the service gives no rewards (a critic).
        """

    @property
    def startup_log(self) -> Sequence[str]:
        """Lines that are logged once the server answers."""

    async def statistics(self) -> Mapping[str, Mapping[str, float] | None]:
        """Map the name of each model server to its counts since the start, e.g. of requests.

        None for a server that does not answer.
        """

    async def probe(self) -> Mapping[str, str | None]:
        """Map the name of each model server to why it gives no answers now, or to None."""

    def report(self) -> str | None:
        """Describe the load since the last report in one line; None if there was none."""

    def stop(self) -> None:
        """Finish submitted work and end all threads; no request may be in flight."""


class Backend(Protocol):
    """The part of a service that computes; every rank has one."""

    @property
    def operations(self) -> Mapping[str, Operation]:
        """Functions that run on all ranks, by names that no other backend uses."""

    def reset_cache(self) -> None:
        """Drop all caches; called on every rank after an operation has failed on any rank."""

    def start(self, ranks: ModelRanks) -> Service:
        """On rank 0: run a first operation, to see if the model works, and start the service."""
