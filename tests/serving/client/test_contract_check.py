"""Servers with another scoring contract than the client or another server, or with none."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from nemo_aligner.serving.client import RewardClient
from nemo_aligner.utils.errors import ConfigError, ServingError
from tests.serving.client.misbehaving import (
    Misbehaving,
    eventually,
    failure,
    seconds,
)
from tests.serving.fake_server import CONTRACT, total

OTHER = replace(CONTRACT, seq_length=9)


def test_client_may_expect_a_contract(lone: Misbehaving) -> None:
    for expect in (CONTRACT, CONTRACT.hash):
        with RewardClient(lone.url, expect=expect) as client:
            assert client.contract() == CONTRACT
            assert client.score(["a"])[0, 0] == 97
    wanted = replace(CONTRACT, seq_length=9, add_eos=False)
    _, error = failure(lone.url, expect=wanted)
    differ = "model.data.add_eos: False -> True; model.data.seq_length: 9 -> 64"
    advice = ". Serve the model that has it, or expect another contract"
    assert f"{CONTRACT.hash}, wanted {wanted.hash}: {differ}{advice}" in error
    with (
        RewardClient(lone.url, expect="0" * 64) as client,
        pytest.raises(ServingError, match=f"{CONTRACT.hash}, wanted 000"),
    ):
        asyncio.run(client.score_async(["a"]))
    with pytest.raises(ConfigError, match="expect: got 'abc', wanted"):
        RewardClient(lone.url, expect="abc")


def test_client_of_a_server_of_nemo_aligner_has_rewards_alone(lone: Misbehaving) -> None:
    lone.is_old = True
    with RewardClient(lone.url) as client:
        assert client.score(["a"]).tolist() == [[97, -97]]
        with pytest.raises(ServingError, match="unknown model: 'contract'"):
            client.contract()
    assert "contract (none), wanted" in failure(lone.url, expect=CONTRACT)[1]


def test_client_waits_for_a_contract_that_comes_after_the_model(lone: Misbehaving) -> None:
    lone.is_old = True
    with RewardClient(lone.url, expect=CONTRACT, wait_s=10) as client:
        future = client.score_future(["a"])
        time.sleep(0.3)
        assert not future.done()
        lone.is_old = False
        assert future.result(timeout=10)[0, 0] == 97


def test_other_contract_is_refused_until_both_servers_have_one(
    servers: list[Misbehaving],
) -> None:
    """With several servers, and with one that comes back with another contract."""
    two = [each.come() for each in servers[:2]]
    contracts = [CONTRACT, OTHER]
    for mended in (0, 1):
        for each, contract in zip(two, contracts, strict=True):
            each.contract = contract
        with RewardClient([each.url for each in two]) as client:
            for _ in range(2):
                _, error = seconds(client.score, ["a"])
                assert all(contract.hash in error for contract in contracts)
                assert "must have one contract: model.data.seq_length: " in error
            two[mended].contract = contracts[1 - mended]
            assert client.score(["a"])[0, 0] == 97
        assert sum(len(each.asked) for each in two) == mended + 1
    with RewardClient(two[0].url) as client:
        client.score(["a"])
        two[0].contract = OTHER
        for _ in range(2):
            assert (
                f"wanted {CONTRACT.hash}, which this server had before"
                in seconds(client.score, ["a"])[1]
            )


def test_rewards_have_the_contract_that_was_fetched_before_them(lone: Misbehaving) -> None:
    """The caller weighs the rewards by the fetched contract, so another server's do not count."""
    with RewardClient(lone.url) as client:
        assert client.contract() == CONTRACT
        lone.contract = OTHER
        _, error = seconds(client.score, ["a"])
        assert f"got the scoring contract {OTHER.hash}, wanted {CONTRACT.hash}" in error
        lone.contract = CONTRACT
        assert client.score(["a"])[0, 0] == 97


def swapped(server: Misbehaving, is_killed: bool, contract: Any) -> None:
    """Replace a server by another one, with closed connections or behind a proxy."""
    if is_killed:
        server.go()
    server.contract = contract
    if is_killed:
        server.come()


@pytest.mark.parametrize("expect", [None, CONTRACT.hash])
@pytest.mark.parametrize("is_killed", [True, False])
def test_other_contract_of_one_server_under_load_harms_no_request(
    servers: list[Misbehaving], expect: str | None, is_killed: bool
) -> None:
    """One of two servers gets another model and the old one back, as in a rolling update."""
    right, updated = (each.come() for each in servers[:2])
    right.answer = updated.answer = lambda texts: time.sleep(0.002)
    wrong: list[Any] = []
    is_over = threading.Event()
    with RewardClient([right.url, updated.url], expect=expect, retry_s=10) as client:
        client.score(["a"])

        def ask(number: int) -> int:
            asked = 0
            while not is_over.is_set():
                asked += 1
                text = f"text {number} {asked}"
                try:
                    scored = client.score_rows([text])
                    if (scored.rewards[0, 0], scored.contract_hash) != (total(text), CONTRACT.hash):
                        wrong.append(scored)
                except Exception as error:
                    wrong.append(error)
            return asked

        with ThreadPoolExecutor(8) as pool:
            asking = [pool.submit(ask, number) for number in range(8)]
            for _ in range(2):
                swapped(updated, is_killed, OTHER)
                time.sleep(0.3)
                swapped(updated, is_killed, CONTRACT)
                updated.asked.clear()
                assert eventually(lambda: len(updated.asked) > 3), "it recovers by itself"
            is_over.set()
            assert sum(future.result() for future in asking) > 100
    assert not wrong, (len(wrong), wrong[0])


def test_other_contract_everywhere_fails_at_once_and_is_over_with_it(
    servers: list[Misbehaving],
) -> None:
    """All concurrent requests fail with a message, and the next one is answered."""
    two = [each.come() for each in servers[:2]]
    with RewardClient([each.url for each in two], expect=CONTRACT, retry_s=60) as client:
        client.score(["a"])
        for each in two:
            each.contract = OTHER
        futures = [client.score_future([text]) for text in "abcdefgh"]
        for future in futures:
            with pytest.raises(ServingError) as caught:
                future.result(timeout=20)
            assert all(each.url in str(caught.value) for each in two)
            assert f"wanted {CONTRACT.hash}" in str(caught.value)
        two[1].contract = CONTRACT
        assert client.score(["a"])[0, 0] == 97


def test_other_contract_is_said_by_a_probe(servers: list[Misbehaving]) -> None:
    """A server whose rewards are rejected is not ready, before and after the first reward."""
    two = [each.come() for each in servers[:2]]
    urls = [each.url for each in two]

    async def probe() -> list[dict[str, str | None]]:
        lone = RewardClient(urls[0], in_callers_loop=True)
        both = RewardClient(urls, in_callers_loop=True)
        await lone.score_async(["a"])
        two[0].contract = OTHER
        found = [await lone.probe_async(), await both.probe_async()]
        two[0].contract = CONTRACT
        found += [await lone.probe_async(), await both.probe_async()]
        await both.score_async(["a"])
        two[1].contract = OTHER
        found.append(await both.probe_async())
        two[0].contract = OTHER
        with pytest.raises(ServingError, match="scoring contract"):
            await lone.contract_async()
        await lone.aclose()
        await both.aclose()
        return found

    changed, undecided, again, agreed, one = asyncio.run(probe())
    assert all(OTHER.hash in str(why) for why in [*changed.values(), *undecided.values()])
    assert [*again.values(), *agreed.values()] == [None] * 3
    assert one[urls[0]] is None
    assert OTHER.hash in str(one[urls[1]])
