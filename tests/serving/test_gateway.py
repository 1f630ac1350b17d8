"""A gateway process in front of a running server: every way to start and to stop it."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from nemo_aligner.config.gateway import GatewayConfig
from nemo_aligner.serving.client import RewardClient
from nemo_aligner.utils.errors import ServingError
from tests.harness import tiny
from tests.serving.client.misbehaving import Misbehaving, eventually, failure
from tests.serving.fake_server import CONTRACT, total
from tests.serving.servers import gateway

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
aiohttp = pytest.importorskip("aiohttp")


def post(
    url: str, body: Any, headers: dict[str, str] | None = None, context: Any = None
) -> tuple[int, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), headers or {})
    try:
        with urllib.request.urlopen(request, timeout=30, context=context) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def rewards(answer: tuple[int, Any]) -> list[float]:
    status, body = answer
    assert status == 200, body
    return [row[0] for row in body["rewards"]]


def ask_at_once(
    url: str, texts: list[str], backends: list[Misbehaving], then: Callable[[], None]
) -> list[tuple[int, Any]]:
    """Send a request per text concurrently; call ``then`` when the backends have all of them."""

    async def ask(session: Any, text: str) -> tuple[int, Any]:
        async with session.post(f"{url}/v1/rewards", json={"texts": [text]}) as answer:
            return answer.status, await answer.json()

    before = sum(len(each.asked) for each in backends)

    async def everyone() -> list[tuple[int, Any]]:
        async with aiohttp.ClientSession() as session:
            asked = [asyncio.ensure_future(ask(session, text)) for text in texts]
            while sum(len(each.asked) for each in backends) < before + len(texts):
                assert not all(each.done() for each in asked)
                await asyncio.sleep(0.02)
            then()
            return await asyncio.gather(*asked)

    return asyncio.run(everyone())


def in_a_while(texts: list[str]) -> None:
    time.sleep(1.5)


def test_it_starts_before_its_backend_and_answers_until_sigterm_and_then_what_is_in_flight(
    lone: Misbehaving, tmp_path: Path
) -> None:
    lone.go()
    settings = [f"backends=[{lone.url}]", "gateway.retry_s=0.3"]
    # A prepared process has imported torch.
    with gateway(tmp_path, *settings, python=sys.executable) as started:
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{started.url}/ready", timeout=10)
        refused = "connection refused: no server listens there"
        warning = f"Warning: {lone.url}: {refused}; while no backend answers, requests wait"
        assert eventually(lambda: warning in started.output())
        begun = time.monotonic()
        status, answer = post(f"{started.url}/get_reward", {"query": ["ab"]})
        assert (status, time.monotonic() - begun < 3) == (503, True), answer
        assert answer["detail"] == f"no backend answers: {lone.url}, reward_model: {refused}"
        lone.come()
        with urllib.request.urlopen(f"{started.url}/ready", timeout=10) as ready:
            assert ready.status == 200
        assert rewards(post(f"{started.url}/v1/rewards", {"texts": ["ab"]})) == [total("ab")]
        maps = Path(f"/proc/{started.ranks[0].pid}/maps").read_text()
        assert ("uvloop" in maps, "libtorch" in maps) == (True, False)  # no model, so no torch
        lone.answer = in_a_while
        texts = [str(number) for number in range(8)]
        stop = partial(started.ranks[0].send_signal, signal.SIGTERM)
        answers = ask_at_once(started.url, texts, [lone], stop)
        assert [rewards(each) for each in answers] == [[total(text)] for text in texts]
        assert started.wait(10) == [0], started.output()
        assert "Draining" in started.output()
        assert not (tmp_path / "ready").exists()
        with pytest.raises(urllib.error.URLError):
            post(f"{started.url}/v1/rewards", {"texts": ["ab"]})


@pytest.mark.smoke
def test_of_two_backends_one_may_die_among_requests(
    servers: list[Misbehaving], tmp_path: Path
) -> None:
    first, second = servers[0].come(), servers[1].come()

    texts = [f"{number:03}" for number in range(60)]
    with gateway(tmp_path, f"backends=[{first.url},{second.url}]") as started:
        assert rewards(post(f"{started.url}/v1/rewards", {"texts": ["ab"]})) == [total("ab")]
        first.answer = second.answer = in_a_while
        answers = ask_at_once(started.url, texts, [first, second], first.go)
        assert [rewards(each) for each in answers] == [[total(text)] for text in texts]
        assert len(first.asked) > 3
        with urllib.request.urlopen(f"{started.url}/ready", timeout=10) as ready:
            words = json.load(ready)["backends"]
        assert words[second.url] == "ready"
        assert "connection refused" in words[first.url]
        # The log has one line when it left, and one when it came back.
        name = f"{first.url}, reward_model"
        lost = (
            f"{name}: the connection was lost before the answer was complete; it gets no requests"
        )
        assert started.output().count(lost) == 1
        assert "answers again" not in started.output()
        first.come()
        first.answer = second.answer = lambda texts: None

        def is_back() -> bool:
            post(f"{started.url}/v1/rewards", {"texts": ["ab"]})
            return f"{name}: it answers again" in started.output()

        assert eventually(is_back)
        assert started.output().count("answers again") == 1


def test_by_tls_with_a_token_from_a_file(lone: Misbehaving, tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "1", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    settings = [f"gateway.certificate_file={certificate}", f"gateway.key_file={key}"]
    with gateway(
        tmp_path, f"backends=[{lone.url}]", *settings, f"gateway.token_file={token}"
    ) as started:
        assert started.url.startswith("https://127.0.0.1:")
        url, trusted = f"{started.url}/v1/rewards", ssl.create_default_context(cafile=certificate)
        bearer = {"Authorization": "Bearer s3cret"}
        assert rewards(post(url, {"texts": ["ab"]}, bearer, trusted)) == [total("ab")]
        assert post(url, {"texts": ["ab"]}, None, trusted)[0] == 401
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            post(url, {"texts": ["ab"]}, bearer)
        for wrong, words in {
            started.url: "not trusted (self-signed certificate). Set the environment variable SSL_",
            lone.url.replace("http:", "https:"): "does not speak TLS. Use http:// in the URL",
        }.items():
            assert words in failure(wrong)[1]
        request = urllib.request.Request(f"{started.url}/v1/contract", headers=bearer)
        with urllib.request.urlopen(request, context=trusted) as contract:
            assert json.load(contract)["hash"] == CONTRACT.hash
        assert "s3cret" not in started.output()


def test_gateway_that_cannot_start_says_so_in_one_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("nothing")
    files = [f"gateway.certificate_file={broken}", f"gateway.key_file={broken}"]
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        for settings, words in (
            ([f"gateway.port={port}"], f"gateway.port: 127.0.0.1:{port} is not free"),
            (["gateway.port=0", *files], "gateway.certificate_file, key_file: "),
        ):
            done = tiny.run_verb("gateway", *settings, folder=tmp_path, check=False, fresh=True)
            assert done.returncode == 1
            assert words in done.stderr
            assert "Traceback" not in done.stderr


def test_idle_connection_is_kept_for_as_long_as_the_setting_says(
    lone: Misbehaving, tmp_path: Path
) -> None:
    """Longer than the 15 s for which aiohttp reuses a connection by default."""
    assert GatewayConfig().keep_alive_secs == 75
    with gateway(tmp_path, f"backends=[{lone.url}]", "gateway.keep_alive_secs=2") as started:
        connection = HTTPConnection(urlsplit(started.url).netloc, timeout=10)
        for pause_s in (0.5, 0.0):
            connection.request("GET", "/health")
            assert connection.getresponse().read()
            time.sleep(pause_s)
        idle_since = time.monotonic()
        assert connection.sock.recv(1) == b""  # the server has closed it
        assert 1 < time.monotonic() - idle_since < 8
        connection.close()


def test_password_of_a_backends_url_is_shown_nowhere(lone: Misbehaving, tmp_path: Path) -> None:
    secret = lone.url.replace("//", "//someone:s3cret@")
    with gateway(tmp_path, f"backends=[{secret}]", "gateway.retry_s=0.3") as started:
        assert rewards(post(f"{started.url}/v1/rewards", {"texts": ["ab"]})) == [total("ab")]
        pages = []
        for path in ("/ready", "/metrics"):
            with urllib.request.urlopen(f"{started.url}{path}", timeout=10) as page:
                pages.append(page.read().decode())
        assert all(lone.url in page for page in pages)
        lone.go()
        status, answer = post(f"{started.url}/v1/rewards", {"texts": ["ab"]})
        assert status == 503
        shown = [*pages, json.dumps(answer), started.output()]
        assert lone.url in shown[-1]
        assert not [text for text in shown if "s3cret" in text or "someone" in text]


def test_combined_rewards_reach_a_client_by_their_own_contract_and_the_log_has_the_highest(
    lone: Misbehaving, tmp_path: Path
) -> None:
    log = tmp_path / "top.jsonl"
    settings = [
        f"backends=[{lone.url}]",
        "functions={length: tests.serving.gateway_calls:count_characters}",
        "combine.weights={model: 1, length: -10}",
        f"gateway.top_rewards_file={log}",
        "gateway.top_rewards_kept=2",
        "gateway.top_rewards_window=4",
    ]
    texts = ["a", "bb", "c", "dddd", "e", "f"]
    # The fake model's attributes are a total and its negative, with weights 1 and 0.5.
    expected = [total(text) / 2 - 10 * len(json.dumps({"text": text})) for text in texts]
    with gateway(tmp_path, *settings) as started:
        assert "Parts of a reward: model, length" in started.output()
        with RewardClient(started.url) as client:
            scored = client.score_rows(texts)
            contract = client.contract()
        assert scored.rewards[:, 0].tolist() == expected
        assert (contract.attributes, scored.contract_hash) == (("reward",), contract.hash)
        assert contract.hash != CONTRACT.hash
        wrong = RewardClient(started.url, expect=CONTRACT.hash)
        with wrong as client, pytest.raises(ServingError, match="contract"):
            client.score_rows(texts[:1])
        started.ranks[0].send_signal(signal.SIGTERM)
        assert started.wait(10) == [0], started.output()
    for file, rewards_of_window in ((f"{log}.1", expected[:4]), (str(log), expected[4:])):
        entries = [json.loads(line) for line in Path(file).read_text().splitlines()]
        logged = [entry["reward"] for entry in entries]
        assert logged[0] == max(rewards_of_window)
        assert entries[0]["text"] == texts[expected.index(logged[0])]
        assert entries[0]["parts"]["length"] == len(json.dumps({"text": entries[0]["text"]}))
