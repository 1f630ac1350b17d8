"""What README, docs/serving.md and docs/gateway.md show of calls, run against a server."""

from __future__ import annotations

import json
import shlex
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.docs.pages import blocks
from tests.launching import ROOT, free_port
from tests.serving.fake_server import CONTRACT, total
from tests.serving.servers import Server, gateway

pytest.importorskip("fastapi")
from nemo_aligner.serving.front.app import ROUTES

README, SERVING, GATEWAY = ROOT / "README.md", ROOT / "docs/serving.md", ROOT / "docs/gateway.md"
URL, SECOND_URL = "http://127.0.0.1:5555", "http://127.0.0.1:5556"
GATEWAY_URL = "http://127.0.0.1:8000"
TEXT, ASKED, SAID = "What is red? A rose.", "What is red?", "A rose."
# What each command of the gateway's page finds, by its route.
REWARDS = {
    "/get_reward": total(TEXT) / 2,
    "/classify": total(TEXT),
    "/pooling": total(TEXT),
    "/score": total(ASKED + SAID) / 2,
    "/remote_rm": total(TEXT) / 2,
    "/predict": total(TEXT),
    "/rerank": total(ASKED + SAID) / 2,
    "/compare": total(ASKED + SAID) / 2,
    "/verify": total(ASKED + SAID) / 2,
}
BY_FORM = {"texts": total(TEXT), "conversations": total(ASKED + SAID), "tokens": 18.0}


def curls(page: Path) -> list[list[str]]:
    """The words of every curl command of a page."""
    text = "".join(block for block in blocks(page, "bash") if "curl " in block)
    found: list[list[str]] = []
    for word in shlex.split(text.replace("curl ", "\\; "), comments=True):
        if word == ";":
            found.append(["curl"])
        else:
            found[-1].append(word)
    return found


def ask(address: str, *rest: str) -> str:
    """As curl does it, with or without ``-d BODY``."""
    data = rest[1].encode() if rest else None
    with urllib.request.urlopen(address, data=data, timeout=30) as answer:
        return answer.read().decode()


@pytest.fixture(scope="module")
def fronted(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with gateway(tmp_path_factory.mktemp("gateway"), f"backends=[{server.url}]") as started:
        yield started
        assert started.stop() == [0], started.output()


def test_every_curl_to_the_server_gets_a_reward_and_health_answers(server: Server) -> None:
    forms = []
    for _, address, *rest in curls(SERVING):
        (asked,) = json.loads(rest[1])["inputs"]
        forms.append(asked["name"])
        text = asked["data"][0]
        if asked["name"] == "conversations":
            text = "".join(message["content"] for message in json.loads(text))
        rewards = json.loads(ask(address.replace(URL, server.url), *rest))["outputs"][0]
        assert (rewards["name"], rewards["data"][0]) == ("rewards", total(text))
    assert forms == ["sentences", "conversations"]
    for path in ("health/live", "health/ready", "models/reward_model/ready"):
        assert path in SERVING.read_text()
        ask(f"{server.url}/v2/{path}")


def test_the_page_runs_from_its_first_line_of_python_to_its_last(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {}
    second = f"http://127.0.0.1:{free_port()}"
    for block in blocks(SERVING, "python"):
        code = block.replace(URL, server.url).replace(SECOND_URL, second)
        exec(compile(code, "serving.md", "exec"), names)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "(2, 2)"
    refused, reasons, several, checked, without_spread, plain = said[-6:]
    assert refused.endswith("row 1: the text is empty")
    assert reasons == f"[{total('A text.'):.0f}.  nan] {{1: 'the text is empty'}}"
    assert several == str(np.array([total(text) for text in names["texts"]], dtype=np.float32))
    assert checked == str(np.array([total(TEXT)], dtype=np.float32))
    assert names["contract"] == CONTRACT
    assert without_spread == f"[[ {total(TEXT):.0f}. {-total(TEXT):.0f}.]] None None"
    assert plain == f"{without_spread} None"
    reward = names["reward"]
    assert reward(["a", "b"], completions=["c", "d"], step=1) == [196.0, 198.0]
    assert str(reward(["a", ""], completions=["c", ""])) == "[196.0, nan]"
    asked = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]
    said_of = [[{"role": "assistant", "content": "c"}], [{"role": "assistant", "content": "d"}]]
    assert reward(prompts=asked, completions=said_of) == [196.0, 198.0]


def test_every_curl_to_the_gateway_is_answered_with_the_reward_of_its_text(fronted: Server) -> None:
    for _, address, *rest in [*curls(README), *curls(GATEWAY)]:
        path = address.removeprefix(GATEWAY_URL)
        said = ask(fronted.url + path, *rest)
        if path == "/v1/rewards":
            (form,) = json.loads(rest[1])
            answer = json.loads(said)
            assert answer["rewards"][0][0] == BY_FORM[form], rest
            assert (answer["errors"], answer["attributes"]) == ([], ["sum", "minus"])
        elif path in REWARDS:
            assert str(REWARDS[path]) in said, (path, rest, said)
        else:
            assert said, path


def test_every_route_and_metric_of_the_gateway_has_its_row(fronted: Server) -> None:
    """And every route a command; docs/settings.md has its settings."""
    text = GATEWAY.read_text()
    described = json.loads(ask(f"{fronted.url}/openapi.json"))["paths"]
    assert {*described} == {words[1].removeprefix(GATEWAY_URL) for words in curls(GATEWAY)}
    abouts: dict[str, str] = {}
    for route in ROUTES:
        before = abouts.get(route.path)
        abouts[route.path] = route.about if before is None else f"{before}; {route.about}"
    rows: set[str] = set()
    for path, methods in described.items():
        (method,) = methods
        assert methods[method].get("description") == abouts.get(path)
        rows.add(f"{method.upper()} {path}")
    ask(f"{fronted.url}/v1/rewards", "-d", '{"texts": ["ab"]}')
    lines = ask(f"{fronted.url}/metrics").splitlines()
    families = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    assert len(families) > 15
    assert [row for row in sorted(rows | families) if f"`{row}`" not in text] == []
