"""A server with a bearer token answers only requests that have it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_aligner.cli.serve import run_score, score_parser
from nemo_aligner.config.load import load_config
from nemo_aligner.config.serving import ServeConfig, ServeCriticConfig
from nemo_aligner.serving.client import RefusedError, RewardClient, RewardCriticClient
from nemo_aligner.serving.client.posting import PostingAddress
from nemo_aligner.serving.failures import NO_TOKEN
from nemo_aligner.serving.tokens import find_token, has_token, hide_password, warn_of_open_server
from nemo_aligner.utils.errors import ConfigError, ServingError, SettingsError
from tests.serving.client.misbehaving import Misbehaving
from tests.serving.fake_server import CONTRACT, total
from tests.serving.servers import FAKE, QUICK, Server, gateway, json_request, running

TOKEN = "s3cret"
WORDS = "the bearer token is missing or wrong"


def test_token_is_one_header_with_its_scheme_in_any_case() -> None:
    right = [f"Bearer {TOKEN}", f"bearer  {TOKEN}", f"BEARER {TOKEN}"]
    wrong = [
        *("", "Bearer", "Bearer ", TOKEN, f"bearer{TOKEN}", f"Basic {TOKEN}", "Bearer \xff"),
        *(f"Bearer {token}" for token in (TOKEN[:-1], f"{TOKEN}s", TOKEN.upper(), "other")),
    ]
    assert [each for each in right if not has_token([each.encode("latin-1")], TOKEN)] == []
    assert [each for each in wrong if has_token([each.encode("latin-1")], TOKEN)] == []
    assert not has_token([], TOKEN)
    assert not has_token([right[0].encode()] * 2, TOKEN)


def test_warning_of_a_server_that_others_reach(capsys: pytest.CaptureFixture[str]) -> None:
    for host in ("0.0.0.0", "10.0.0.7", "::", "a-host"):
        warn_of_open_server(host, None, "server.token")
        assert f"Warning: other machines can reach {host}, " in capsys.readouterr().out
        warn_of_open_server(host, TOKEN, "server.token")
    for host in ("127.0.0.1", "127.0.0.2", "localhost", "::1"):
        warn_of_open_server(host, None, "server.token")
    assert capsys.readouterr().out == ""


def test_token_settings_are_one_of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for schema in (ServeConfig, ServeCriticConfig):
        with pytest.raises(SettingsError, match=r"token_file or .*, not both"):
            load_config(schema, ["server.token_file=t", "server.token_variable=T"])
    file = tmp_path / "token"
    for content in ("", "\n", "two words", "Ünicode"):
        file.write_text(content, encoding="utf-8")
        with pytest.raises(ConfigError, match=r"key_file: .*it holds no token"):
            find_token(str(file), None, "key")
    file.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match=r"key_file: .*it is not text, wanted one word of ASCII"):
        find_token(str(file), None, "key")
    file.write_text(f" {TOKEN}\n")
    assert find_token(str(file), None, "key") == TOKEN
    monkeypatch.setenv("SET", "other")
    assert find_token(None, "SET", "key") == "other"
    assert find_token(None, None, "key") is None
    monkeypatch.delenv("UNSET", raising=False)
    for key, named in (
        ("server.token", r"server\.token_variable"),
        ("--token", "--token-variable"),
    ):
        with pytest.raises(ConfigError, match=f"{named}: environment variable UNSET is not set"):
            find_token(None, "UNSET", key)
    with pytest.raises(ConfigError, match=r"key_file: \S+: No such file[^/]*$"):
        find_token(str(tmp_path / "none"), None, "key")
    for make in (RewardClient, RewardCriticClient):
        with pytest.raises(ConfigError) as caught:
            make("http://127.0.0.1:1", token="two words")
        assert "two words" not in str(caught.value)


def test_refused_token_is_no_fault_of_a_text(servers: list[Misbehaving]) -> None:
    """It is an error: no NaN, and no waiting for the server."""
    lone, other = servers[0].come(), servers[1].come()
    lone.answer = lambda texts: (400, {"error": NO_TOKEN})
    with RewardClient(lone.url, retry_s=60) as client:
        for work in (client.score, client.score_rows):
            with pytest.raises(RefusedError, match=WORDS) as caught:
                work(["a"])
            assert caught.value.status == 401
    assert len(lone.asked) == 2
    # Of several servers, one that rejects the token for its contract is left out.
    lone._post = lambda *given: (400, {"error": NO_TOKEN})  # type: ignore[method-assign]
    with RewardClient([lone.url, other.url], timeout_s=20) as client:
        assert client.score(["a"])[0, 0] == total("a")
    waiting = RewardClient(lone.url, expect=CONTRACT, retry_s=60, timeout_s=20)
    with waiting as client, pytest.raises(ServingError, match=WORDS):
        client.score(["a"])


def ask(server: Server, path: str, headers: dict[str, str], body: Any = None) -> tuple[int, str]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{server.url}/{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_server_with_a_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's port, our client, and a gateway between them with another token."""
    file = tmp_path / "token"
    file.write_text(TOKEN)
    monkeypatch.setenv("OWN", "another")
    folders = [tmp_path / name for name in ("server", "gateway")]
    for folder in folders:
        folder.mkdir()
    body = {"inputs": [json_request("sentences", "BYTES", [["a"]])]}
    infer = "v2/models/reward_model/infer"
    with running(folders[0], FAKE, *QUICK, "host=0.0.0.0", f"token_file={file}") as server:
        server.url = server.url.replace("0.0.0.0", "127.0.0.1")
        for scheme in ("Bearer", "bearer"):
            status, text = ask(server, infer, {"authorization": f"{scheme} {TOKEN}"}, body)
            assert (status, str(total("a")) in text) == (200, True), text
        for headers in ({}, {"Authorization": "Bearer other"}):
            for path, asked in ((infer, body), ("v2/models/contract/infer", {"inputs": []})):
                status, text = ask(server, path, headers, asked)
                assert status == 401, text
                assert WORDS in text
        assert ask(server, "v2/health/ready", {})[0] == 200
        with RewardClient(server.url, token=TOKEN) as client:
            assert client.score(["a", "bc"])[:, 0].tolist() == [total("a"), total("bc")]
            assert client.contract() == CONTRACT
        with RewardClient(server.url) as client, pytest.raises(ServingError, match=WORDS) as error:
            client.score_rows(["a"])
        assert "; no token was sent" in str(error.value)
        for variable, reason in (
            ([], "no token was sent: pass --token-variable NAME"),
            (["--token-variable", "OWN"], "the token in OWN is not the server's"),
        ):
            with pytest.raises(ServingError, match=f"{WORDS}; {reason}"):
                run_score(score_parser().parse(["a", "--url", server.url, *variable]))
        settings = [f"backends=[{server.url}]", "gateway.token_variable=OWN"]
        with gateway(folders[1], *settings, f"backend_token_file={file}", OWN="another") as front:
            own = {"Authorization": "Bearer another"}
            assert ask(front, "v1/rewards", {}, {"texts": ["a"]})[0] == 401
            status, text = ask(front, "v1/rewards", own, {"texts": ["a"]})
            assert status == 200, text
            assert json.loads(text)["rewards"] == [[total("a"), -total("a")]]
        assert "no token is set" not in server.output()
        assert TOKEN not in server.output()
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in server.processes()]
        assert not any(TOKEN.encode() in command for command in commands)


def test_url_for_people_has_no_password() -> None:
    cases = {
        "http://user:pass@host:5555": "http://host:5555",
        "https://user:p%40ss@host/a@b": "https://host/a@b",
        "user:p@ss@host:5555": "host:5555",
        "http://host:5555/classify": "http://host:5555/classify",
        "http://[::1]:5555": "http://[::1]:5555",
    }
    assert {url: hide_password(url) for url in cases} == cases
    with pytest.raises(ConfigError) as caught:
        RewardClient("ftp://user:s3cret@host")
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "connect",
    [
        lambda url: RewardClient(["http://other", url], token=TOKEN),
        lambda url: RewardCriticClient("http://other", reward_url=url, token=TOKEN),
        lambda url: PostingAddress(url, TOKEN),
    ],
)
def test_password_and_token_are_rejected_together(connect: Callable[[str], Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        connect("http://user:s3cret@host/a")
    assert str(caught.value) == (
        "url: got http://host/a with a user or password, and a token, which one header cannot both "
        "carry; remove one of them"
    )
