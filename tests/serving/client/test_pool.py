"""Servers that are missing, leave, come back, are full, or answer nonsense."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_aligner.serving.client import RefusedError, RewardClient
from nemo_aligner.serving.client.causes import redirect_of
from nemo_aligner.serving.client.contract_check import ContractCheck
from nemo_aligner.serving.client.pool import ServerPool, _pick
from nemo_aligner.serving.failures import retry_after
from nemo_aligner.serving.protocols import kserve
from nemo_aligner.utils.errors import ConfigError, ServingError
from tests.harness.launching import free_port
from tests.serving.client.misbehaving import (
    Die,
    Misbehaving,
    eventually,
    failure,
    output,
    refuse,
    seconds,
    troubled,
)
from tests.serving.fake_server import CONTRACT, total


def test_client_gives_the_same_rewards_and_errors_by_future_and_by_asyncio(
    lone: Misbehaving,
) -> None:
    texts, wanted = ["a", "bc", "d" * 50], "reward_model: row 1: no good$"
    with RewardClient(lone.url) as client:

        async def both() -> list[Any]:
            return await asyncio.gather(client.score_async(texts), client.score_async(texts[:1]))

        future = client.score_future(texts)
        all_three, first = asyncio.run(both())
        for found in (client.score(texts), future.result(), all_three):
            assert found[:, 0].tolist() == [total(text) for text in texts]
        assert first[:, 0].tolist() == [97]
        for ask in (client.score, lambda texts: client.score_future(texts).result()):
            with pytest.raises(ServingError, match=wanted):
                ask(["a", "!good"])
        with pytest.raises(ServingError, match=wanted):
            asyncio.run(client.score_async(["a", "!good"]))


def test_client_in_its_callers_loop_scores_without_a_thread(
    servers: list[Misbehaving],
) -> None:
    one, other = servers[0].come(), servers[1].come()

    async def score() -> list[Any]:
        client = RewardClient([one.url, other.url], in_callers_loop=True)
        both = asyncio.gather(*(client.score_rows_async([text]) for text in ("a", "bc")))
        found: list[Any] = [each.rewards[0, 0] for each in await both]
        with pytest.raises(ServingError, match="row 1: no good"):
            await client.score_async(["a", "!good"])
        assert {thread.name for thread in threading.enumerate()}.isdisjoint({"reward client"})
        other.go()
        found.append((await client.probe_async())[other.url])
        found.append((await client.score_rows_async(["d"])).contract_hash)
        await client.aclose()
        return found

    first, second, gone, contract_hash = asyncio.run(score())
    assert [first, second] == [total("a"), total("bc")]
    assert "connection refused" in gone
    assert contract_hash == CONTRACT.hash


def test_client_says_at_once_that_nobody_listens_at_any_of_its_urls() -> None:
    for host in ("127.0.0.1", "localhost"):
        url = f"http://{host}:{free_port()}"
        with RewardClient(url) as client:
            for _ in range(2):
                took, error = seconds(client.score, ["a"])
                assert took < 2
                assert error.startswith(f"{url}, reward_model: connection refused")
                assert error.endswith("; set wait_s=60 to wait for a server to start")
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
    took, error = failure(urls)
    assert took < 2
    assert all(f"{url}, reward_model: connection refused" in error for url in urls)
    assert "no such host: nobody.invalid" in failure("http://nobody.invalid:5555")[1]
    wrong: list[Any] = ["ftp://somewhere", "http://", [], "http://a:1/?token=b", "http://a:1/#c"]
    for url in [*wrong, "http://[::1"]:
        with pytest.raises(ConfigError, match="wanted http://host:port"):
            RewardClient(url)


def test_url_may_have_a_proxy_s_prefix_and_the_error_tells_where_it_has_another_path(
    lone: Misbehaving,
) -> None:
    lone.prefix = "/rewards"
    with RewardClient(f"{lone.url}/rewards/") as client:
        assert client.score(["a"])[0, 0] == 97
    for path in ("/rewards/v1/rewards", ""):
        error = failure(lone.url + path)[1]
        assert "no such path" in error
        assert ("; the path in the URL, /rewards/v1/rewards, must be" in error) == bool(path)


def test_client_waits_for_a_server_as_long_as_was_said(
    lone: Misbehaving, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lone.go()
    monkeypatch.setattr("nemo_aligner.serving.client.pool._QUIET_S", 0.2)
    took, error = failure(lone.url, wait_s=0.5)
    assert 0.5 <= took < 3
    assert "no server was ready within 0.5 s (wait_s)" in error
    (line,) = caplog.messages
    assert line.endswith("no server listens there; waiting up to 0.5 s for a server")
    with RewardClient(lone.url, wait_s=10) as client:
        future = client.score_future(["a"])
        time.sleep(0.3)
        assert not future.done()
        lone.come()
        assert future.result(timeout=10)[0, 0] == 97


def test_client_that_is_asked_for_nothing_asks_nobody() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with RewardClient(url) as client:
        assert client.score([]).shape == (0, 1)
        assert client.score_tokens_future([]).result().shape == (0, 1)
        with pytest.raises(TypeError, match="wanted a list"):
            client.score("oops")
    with RewardClient(url, expect=CONTRACT) as client:
        assert client.score([]).shape == (0, 2)


def test_client_comes_again_after_trouble_until_it_has_its_reward(
    lone: Misbehaving, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for a full server as that asks, up to a limit, and retries a lost answer at once."""
    monkeypatch.setattr("nemo_aligner.serving.client.server._LONGEST_RETRY_AFTER_S", 0.4)
    full, fuller, fullest = (
        (503, {"error": f"full; retry after {after} s"}) for after in (0.3, 0.4, 480_000)
    )
    begun = Die(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{")
    slow, early = ((status, {"error": "not computed"}) for status in (408, 425))
    cases: list[tuple[list[Any], dict[str, float], float]] = [
        ([full, full], {"retry_s": 0}, 0.6),
        ([Die(), fuller], {"retry_s": 0.3, "timeout_s": 5}, 0.4),
        ([Die(), fullest], {"timeout_s": 5}, 0.4),
        ([Die(), Die()], {}, 0),
        ([begun, begun], {}, 0),
        ([slow, early], {}, 0),
    ]
    for troubles, settings, least in cases:
        lone.asked.clear()
        caplog.clear()
        lone.answer = troubled(troubles)
        start = time.monotonic()
        with RewardClient(lone.url, **settings) as client:
            assert client.score(["a"])[0, 0] == 97, troubles
        assert time.monotonic() - start >= least, troubles
        assert len(lone.asked) == 3, troubles
        said = [each for each in caplog.messages if "connection was lost" in each]
        assert len(said) == any(isinstance(trouble, Die) for trouble in troubles), troubles
        assert all(each.endswith("; it gets no requests until it answers") for each in said)


def test_client_of_a_server_that_is_killed_in_mid_call_and_comes_back(lone: Misbehaving) -> None:
    lone.answer = lambda texts: time.sleep(5)
    with RewardClient(lone.url, retry_s=0.5) as client:
        futures = [client.score_future([text]) for text in "abc"]
        assert eventually(lambda: len(lone.asked) == 3)
        start = time.monotonic()
        lone.go()
        for future in futures:
            with pytest.raises(ServingError, match=r"refused.*no server came back within 0.5 s"):
                future.result()
        assert time.monotonic() - start < 3
        lone.answer = refuse
        lone.come()
        assert client.score(["a"])[0, 0] == 97


NONSENSE: list[Any] = [
    b"{",
    b"<html>",
    {"outputs": 5},
    {"outputs": []},
    {"error": "?"},
    b"\xff\x00",
    b"[" * 9999,
    {"outputs": [output("rewards", "FP32", [1], [1.0])]},
    {"outputs": [output("rewards", "BYTES", [1, 1], ["x"])]},
    {"outputs": [output("rewards", "FP32", [2, 1], [1.0])]},
    {"outputs": [output("rewards", "FP32", [2, 1], [1.0, 2.0])]},
]
# (what a server always answers, settings of the client, how long it tries, its error)
GIVEN_UP: list[tuple[Any, dict[str, float], float, str]] = [
    ((503, {"error": "no room"}), {"retry_s": 0.3}, 0.3, r"HTTP 503: no room; .* within 0\.3 s"),
    (
        (503, {"error": "full; retry after 0.2 s"}),
        {"timeout_s": 0.7},
        0.7,
        r"no answer within 0\.7 s \(timeout_s\); .*HTTP 503: full",
    ),
    (Die(), {"retry_s": 0.3}, 0.3, "connection was lost"),
    *(((200, answer), {}, 0, "KServe v2|a row of rewards") for answer in NONSENSE),
]


def test_client_gives_up_on_what_a_server_always_answers(lone: Misbehaving) -> None:
    wrong = []
    for answer, settings, least, words in GIVEN_UP:
        lone.asked.clear()
        lone.answer = troubled(repeat(answer))
        took, error = failure(lone.url, **settings)
        is_named = error.startswith(f"{lone.url}, reward_model: ") and re.search(words, error)
        if not is_named or not least <= took < least + 2 or len(lone.asked) > 9:
            wrong.append((answer, settings, took, error))
    assert not wrong, wrong
    lone.not_ready = 401, {"detail": "no token"}
    _, error = failure(lone.url)
    assert "this is not a KServe server, or it requires a token" in error
    assert "wait_s" not in error
    _, error = failure(f"{lone.url}/v1/rewards")
    assert re.search("path in the URL, /v1/rewards, must be empty.*; otherwise this is not", error)


def test_client_says_that_no_answer_came(lone: Misbehaving) -> None:
    """For a server that does not answer, and for one that is ready but gives no rewards."""
    hold = threading.Event()
    lone.answer = lambda texts: hold.wait(20) and None
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for url in (f"http://127.0.0.1:{silent.getsockname()[1]}", lone.url):
            took, error = failure(url, timeout_s=0.3)
            assert took < 2
            assert f"{url}, reward_model: " in error
            assert "timed out: no answer within 0.3 s (timeout_s)" in error
    hold.set()


def test_client_says_that_the_model_fails_with_its_status(lone: Misbehaving) -> None:
    lone.answer = lambda texts: (500, {"error": "the model failed: out of memory"})
    for on_error in ("raise", "nan"):
        with RewardClient(lone.url) as client, pytest.raises(RefusedError) as caught:
            client.score(["a"], on_error=on_error)  # type: ignore[arg-type]
        assert caught.value.status == 500
        assert str(caught.value).endswith("reward_model: the model failed: out of memory")
    assert len(lone.asked) == 2
    # Triton's message about an unreadable body is not about the model.
    for said in (
        "failed to parse the request JSON buffer: Invalid value. at 1",
        "Unable to parse 'inputs': no",
    ):
        lone.answer = lambda texts, said=said: (500, {"error": said})
        with RewardClient(lone.url) as client, pytest.raises(RefusedError) as caught:
            client.score(["a"])
        assert re.search(
            rf"could not parse the request as it arrived.*{re.escape(said)}$", str(caught.value)
        )


def test_client_of_several_asks_the_least_busy(servers: list[Misbehaving]) -> None:
    slow, quick = (each.come() for each in servers[:2])
    hold = threading.Event()
    slow.answer = lambda texts: hold.wait(20) and None
    with RewardClient([slow.url, quick.url]) as client:
        held = client.score_future(["a"])
        assert eventually(lambda: slow.asked)
        for text in "bcdef":
            assert client.score([text])[0, 0] == ord(text)
        hold.set()
        held.result()
    assert (len(slow.asked), len(quick.asked)) == (1, 5)


def test_client_of_several_spreads_a_large_call(servers: list[Misbehaving]) -> None:
    for each in servers:
        each.come().answer = lambda texts: time.sleep(0.05)
    texts = [f"text {number}" for number in range(90)]
    with RewardClient([each.url for each in servers], max_connections=2) as client:
        assert client.score(texts)[:, 0].tolist() == [total(text) for text in texts]
    assert all(each.asked for each in servers)
    assert all(len(rows) <= 30 for each in servers for rows in each.asked)
    servers[0].limit = 1
    with RewardClient(servers[0].url, max_connections=3) as client:
        client.score(["a"] * 20)
    assert servers[0].most_at_once == 3


def test_client_of_several_sends_fewer_rows_where_fewer_are_taken(
    servers: list[Misbehaving],
) -> None:
    large, small = (each.come() for each in servers[:2])
    small.limit = 3
    small.go()
    texts = [f"text {number}" for number in range(20)]
    with RewardClient([large.url, small.url]) as client:
        client.score(["a"])
        small.come()
        large.answer = lambda asked: large.go()
        assert client.score(texts)[:, 0].tolist() == [total(text) for text in texts]
    assert max(len(rows) for rows in small.asked) == 3


def test_client_of_several_leaves_out_one_that_dies_and_uses_it_again(
    servers: list[Misbehaving],
) -> None:
    first, second = (each.come() for each in servers[:2])
    with RewardClient([first.url, second.url], max_connections=2) as client:

        def score(number: int) -> float:
            return float(client.score([f"text {number}"])[0, 0])

        def score_many() -> None:
            with ThreadPoolExecutor(8) as pool:
                found = list(pool.map(score, range(60)))
            assert found == [total(f"text {number}") for number in range(60)]

        score_many()
        assert first.asked
        assert second.asked
        first.go()
        score_many()
        first.asked.clear()
        first.come()
        assert eventually(lambda: score_many() or first.asked)
        second.go()
        score_many()


def test_turns_of_a_dialogue_go_to_the_server_that_had_its_beginning(
    servers: list[Misbehaving],
) -> None:
    """Unless that server is busy or gone; a call of several requests uses all servers."""
    urls = [server.come().url for server in servers]
    opening = [
        [
            {"role": "system", "content": "Be brief. " * 100},
            {"role": "user", "content": f"question {n}"},
        ]
        for n in range(12)
    ]
    reply = {"role": "assistant", "content": "a"}
    more = [{"role": "user", "content": "and then?"}, reply]
    with RewardClient(urls) as client, RewardClient(urls) as another:
        for messages in opening:
            client.score([[*messages, reply]])
            another.score([{"messages": [*messages, reply, *more]}])
        homes = [_servers_asked(servers, f'question {n}"') for n in range(12)]
        assert {len(home) for home in homes} == {1}
        assert len(set.union(*homes)) > 1
        (gone,) = homes[0]
        servers[gone].go()
        for number, messages in enumerate(opening):
            client.score([[*messages, reply, *more]])
            homes_now = _servers_asked(servers, f'question {number}"')
            # Dialogues of other servers stay where they were.
            assert homes[number] <= homes_now
            assert (len(homes_now) == 1) == (homes[number] != {gone})
        before = [len(server.asked) for server in servers]
        replies = [{"role": "assistant", "content": f"{n}"} for n in range(16)]
        client.score([[*opening[0], last] for last in replies])
        asked = [len(server.asked) > count for server, count in zip(servers, before, strict=True)]
        assert asked == [place != gone for place in range(3)]


def _servers_asked(servers: list[Misbehaving], words: str) -> set[int]:
    return {
        place
        for place, server in enumerate(servers)
        if any(words in text for texts in server.asked for text in texts)
    }


def test_busy_server_of_a_prefix_is_passed_over() -> None:
    quiet, busy = (SimpleNamespace(url=f"http://{name}", in_flight=0) for name in "ab")
    prefix = next(
        name for name in map(str.encode, "abcdefgh") if _pick([quiet, busy], name) is busy
    )
    busy.in_flight = 4
    assert _pick([quiet, busy], prefix) is busy
    busy.in_flight = 5
    assert _pick([quiet, busy], prefix) is quiet
    assert _pick([quiet, busy], None) is quiet


@pytest.mark.parametrize("status", [301, 308])
def test_redirect_is_not_followed_and_the_error_has_the_right_url(
    servers: list[Misbehaving], status: int
) -> None:
    """After a 301, aiohttp would send a GET without the samples."""
    old, new = (each.come() for each in servers[:2])
    reason = f"{old.url}, reward_model: it redirects to {new.url}; use that URL"
    with RewardClient(old.url, retry_s=20) as client:
        client.score(["a"])
        old.moved = status, new.url
        took, error = seconds(client.score, ["a"])
        assert (error, took < 5) == (reason, True)
    took, error = failure(old.url, wait_s=20)
    assert (error, took < 5) == (reason, True)
    assert new.asked == []
    # Of one server, the others answer.
    with RewardClient([old.url, new.url]) as client:
        assert client.score(["a"])[0, 0] == 97
    login, url = "https://a/login?to=/v2/b", "http://a/v2/b"
    for location in (login, "/v2/b/"):
        text = redirect_of(302, {"Location": location}, url, "/v2/b")
        assert str(text).endswith("; pass the URL of the server itself"), text
    assert redirect_of(304, {"Location": "/"}, url) is None


def test_seconds_of_retry_after_are_read_or_unknown() -> None:
    assert [retry_after("", header) for header in ("2", "0.5", "²", "soon", "1e9", "")] == [
        *(2.0, 0.5),
        *[None] * 4,
    ]
    assert retry_after("full; retry after 0.3 s", "2") == 0.3


def test_server_that_hangs_delays_neither_the_first_reward_nor_a_probe(
    lone: Misbehaving, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("pool", "server"):
        monkeypatch.setattr(f"nemo_aligner.serving.client.{name}.PROBE_S", 0.3)

    async def ask(urls: list[str]) -> list[tuple[float, Any]]:
        answers = []
        client = RewardClient(urls, in_callers_loop=True)
        for work in (
            lambda: client.score_async(["a"]), client.probe_async, client.statistics_async,
        ):  # fmt: skip
            started_at = time.monotonic()
            answer = await work()
            answers.append((time.monotonic() - started_at, answer))
        await client.aclose()
        return answers

    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent_url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        durations, (scored, states, counts) = zip(
            *asyncio.run(ask([silent_url, lone.url])), strict=True
        )
    assert max(durations) < 3, durations
    assert scored[0, 0] == 97
    assert states == {silent_url: "no answer within 0.3 s", lone.url: None}
    assert counts[silent_url] is None
    assert counts[lone.url] is not None


@pytest.mark.parametrize("is_full", [False, True])
def test_server_that_a_probe_finds_unready_gets_no_requests_until_it_is_ready(
    servers: list[Misbehaving], is_full: bool
) -> None:
    unready, other = (server.come() for server in servers[:2])
    if is_full:
        unready.answer = troubled([(503, {"error": "full; retry after 60 s"})])

    async def ask() -> dict[str, str | None]:
        client = RewardClient([unready.url, other.url], in_callers_loop=True)
        await client.score_async(["a"])
        unready.not_ready = 503, b""
        states = await client.probe_async()
        unready.asked.clear()
        for _ in range(8):
            await asyncio.sleep(0.05)  # in all longer than the pause after a failure
            await client.score_async(["a"])
        assert unready.asked == []
        unready.not_ready = None
        start = time.monotonic()
        while not unready.asked:
            await client.score_async(["a"])
            assert time.monotonic() - start < 10
        await client.aclose()
        return states

    reason = "reward_model is not ready: HTTP 503"
    assert asyncio.run(ask()) == {unready.url: reason, other.url: None}


def test_limit_of_rows_is_that_of_the_server_that_was_just_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request that is lost a moment later takes the limit away."""

    async def read() -> Any:
        pool = ServerPool(["http://a"], "reward_model", ContractCheck(None), 0, 5, 4, None, 9.0)
        (server,) = pool._servers
        server.limit = 4

        async def choose(*arguments: object) -> Any:
            asyncio.get_running_loop().call_soon(server.leave_out, "it is lost")
            return server

        monkeypatch.setattr(pool, "_choose", choose)
        capacity = await pool.capacity()
        await pool.close()
        return capacity

    assert asyncio.run(read()) == (4, 1)


@pytest.mark.parametrize("is_alone", [False, True])
def test_requests_of_a_server_that_hangs_go_to_another_one(
    servers: list[Misbehaving], monkeypatch: pytest.MonkeyPatch, is_alone: bool
) -> None:
    """A probe finds it. Requests stay that must not be repeated, or that no other can answer."""
    hung, other = (each.come() for each in servers[:2])
    idle = [SimpleNamespace(url=each.url, in_flight=0) for each in (hung, other)]
    # A prefix whose requests go to the server that will hang.
    prefix = next(name for name in map(str.encode, "abcdefgh") if _pick(idle, name) is idle[0])
    urls = [hung.url] if is_alone else [hung.url, other.url]

    async def ask() -> None:
        servers_of_client = ServerPool(urls, "reward_model", ContractCheck(None), 0, 5, 4)

        def send(may_repeat: bool) -> asyncio.Task[str]:
            inputs = kserve.encode_sentences(["a"])
            return asyncio.ensure_future(
                servers_of_client._send(
                    inputs, 1, lambda outputs, name: name, may_repeat, prefix=prefix
                )
            )

        await send(True)
        monkeypatch.setattr("nemo_aligner.serving.client.server.PROBE_S", 0.2)
        monkeypatch.setattr("nemo_aligner.serving.client.server.HANDSHAKE_S", 0.4)
        hung.goes_on.clear()
        repeatable, final = send(True), send(False)
        while len(hung.asked) < 3:
            await asyncio.sleep(0.01)
        assert (await servers_of_client.probe())[hung.url] == "no answer within 0.2 s"
        if not is_alone:
            assert await asyncio.wait_for(repeatable, 10) == f"{other.url}, reward_model"
        await asyncio.sleep(0.6)
        assert not final.done()
        hung.goes_on.set()
        assert await final == f"{hung.url}, reward_model"
        await repeatable
        await servers_of_client.close()

    asyncio.run(ask())
    assert len(hung.asked) == 3
    assert len(other.asked) == (not is_alone)
