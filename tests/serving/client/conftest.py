"""Servers of this process, for the tests of the client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving.client.misbehaving import Misbehaving


@pytest.fixture
def servers() -> Iterator[list[Misbehaving]]:
    """Three that are not there yet; each goes in the end."""
    made = [Misbehaving() for _ in range(3)]
    yield made
    for each in made:
        each.go()


@pytest.fixture
def lone(servers: list[Misbehaving]) -> Misbehaving:
    return servers[0].come()
