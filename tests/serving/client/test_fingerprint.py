"""Clients notice that rewards come from another model with the same scoring contract."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from nemo_aligner.config.gateway import GatewayConfig
from nemo_aligner.serving.client import RewardClient
from nemo_aligner.serving.upstream import UpstreamService
from nemo_aligner.utils.errors import ConfigError, ServingError
from tests.serving.client.misbehaving import Misbehaving, failure
from tests.serving.fake_server import CONTRACT, total

ONE, TWO = "1" * 32, "2" * 32


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "another model" in text]


@pytest.mark.parametrize("fingerprint", [TWO, None])
def test_client_refuses_another_model_than_the_expected_one(
    lone: Misbehaving, fingerprint: str | None
) -> None:
    """It rejects the model before it sends a sample; None is a server without a fingerprint."""
    lone.fingerprint = fingerprint
    took, error = failure(lone.url, expect_fingerprint=ONE)
    assert took < 2
    assert error == (
        f"{lone.url}, reward_model: got the model fingerprint {fingerprint or '(none)'}, wanted "
        f"{ONE}. Serve the model with that fingerprint, or set expect_fingerprint to the new one"
    )
    assert not lone.asked
    lone.fingerprint = ONE
    with RewardClient(lone.url, expect_fingerprint=ONE, retry_s=0.2) as client:
        scored = client.score_rows(["a"])
        assert (scored.rewards[0, 0], scored.model_fingerprint) == (97, ONE)
        lone.fingerprint = TWO  # the server's model is replaced
        with pytest.raises(ServingError, match=f"got the model fingerprint {TWO}, wanted {ONE}"):
            client.score(["b"])
    with pytest.raises(ConfigError, match="expect_fingerprint: got 'ABC', wanted 32 hexadecimal"):
        RewardClient(lone.url, expect_fingerprint="ABC")


def test_server_of_nemo_aligner_is_not_of_the_expected_model(lone: Misbehaving) -> None:
    """It publishes nothing, like one of our servers that is still loading the endpoint."""
    lone.is_old = True
    _, error = failure(lone.url, expect_fingerprint=ONE)
    assert f"got the model fingerprint (none), wanted {ONE}: Request for unknown model" in error


def test_servers_of_other_models_are_left_out(
    servers: list[Misbehaving], caplog: pytest.LogCaptureFixture
) -> None:
    """All samples go to the server of the expected model, whichever is queried first."""
    for server, fingerprint in zip(servers, (TWO, ONE, None), strict=True):
        server.come().fingerprint = fingerprint
    with RewardClient([server.url for server in servers], expect_fingerprint=ONE) as client:
        assert client.score(["a", "b", "c"])[:, 0].tolist() == [97, 98, 99]
        states = asyncio.run(client.probe_async())
    wrong, right, silent = (states[server.url] for server in servers)
    assert right is None
    assert f"got the model fingerprint {TWO}, wanted {ONE}" in str(wrong)
    assert f"got the model fingerprint (none), wanted {ONE}" in str(silent)
    assert [len(server.asked) for server in servers] == [0, 1, 0]
    left_out = [
        text
        for text in caplog.messages
        if text.endswith("this server gets no requests until the problem is fixed")
    ]
    assert len(left_out) == 2
    assert not warnings(caplog)


def test_client_warns_once_of_another_model_and_goes_on(
    lone: Misbehaving, caplog: pytest.LogCaptureFixture
) -> None:
    """No warning for a server without a fingerprint, or for a model that comes back."""
    with RewardClient(lone.url) as client:
        for fingerprint in (None, ONE, ONE, None, TWO, TWO, ONE):
            lone.fingerprint = fingerprint
            scored = client.score_rows(["a"])
            assert (scored.rewards[0, 0], scored.model_fingerprint) == (97, fingerprint)
            assert client.fingerprint == fingerprint
        lone.fingerprint = TWO
        client.contract()
        assert client.fingerprint == TWO
    name = f"{lone.url}, reward_model"
    assert warnings(caplog) == [
        f"rewards now come from another model: {name} has the model fingerprint {TWO}, previously "
        f"{name} had {ONE}, with the same scoring contract. Set expect_fingerprint to accept only "
        "one model"
    ]


def test_model_with_another_contract_is_rejected_without_the_warning(
    lone: Misbehaving, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning says that the contract is the same, and that rewards come from the new model."""
    lone.fingerprint = ONE
    with RewardClient(lone.url, retry_s=0.2) as client:
        client.score(["a"])
        lone.fingerprint, lone.contract = TWO, replace(CONTRACT, seq_length=9)
        with pytest.raises(ServingError, match="which this server had before: all rewards of a"):
            client.score(["b"])
        assert client.fingerprint == ONE
    assert not warnings(caplog)


def test_client_warns_of_two_models_behind_one_pool(
    servers: list[Misbehaving], caplog: pytest.LogCaptureFixture
) -> None:
    """Rows of several models have no common fingerprint."""
    for server, fingerprint in zip(servers[:2], (ONE, TWO), strict=True):
        server.come().fingerprint = fingerprint
    with RewardClient([server.url for server in servers[:2]]) as client:
        scored = client.score_rows([f"{number:04}" for number in range(64)])
    assert all(server.asked for server in servers[:2])
    assert scored.model_fingerprint is None
    assert len(warnings(caplog)) == 1


def test_gateway_publishes_the_fingerprint_of_its_newest_rewards(lone: Misbehaving) -> None:
    lone.fingerprint = ONE

    async def ask() -> list[Any]:
        client = RewardClient(lone.url, in_callers_loop=True)
        service = UpstreamService(client, GatewayConfig())
        seen: list[Any] = [service.fingerprint]
        await service.read_contract()
        seen.append(service.fingerprint)
        lone.fingerprint = TWO
        scored = await client.score_rows_async(["a"])
        seen += [float(scored.rewards[0, 0]), client.fingerprint]
        await service.find_contract()
        seen.append(service.fingerprint)
        await client.aclose()
        return seen

    assert asyncio.run(ask()) == [None, ONE, total("a"), TWO, TWO]
