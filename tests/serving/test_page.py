"""The commands of README and the pages on serving, run against a server and a gateway."""

from __future__ import annotations

import json
import re
import shlex
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_aligner.config.serving import ServerConfig
from tests.docs.pages import blocks
from tests.harness.launching import ROOT, free_port
from tests.serving.fake_server import CONTRACT, total
from tests.serving.servers import Server, gateway

pytest.importorskip("fastapi")
from nemo_aligner.serving.front.app import ROUTES

SERVING, PROTOCOLS = ROOT / "docs/serving.md", ROOT / "docs/protocols.md"
OTHERS = ("README.md", "docs/getting_started.md", "docs/clusters.md")
PAGES = [*(ROOT / name for name in OTHERS), SERVING, PROTOCOLS]
URL, SECOND_URL = "http://127.0.0.1:5555", "http://127.0.0.1:5556"
TEXT, ASKED, SAID = "What is red? A rose.", "What is red?", "A rose."
# The expected reward of each command, by its route.
REWARDS = {
    "/get_reward": total(TEXT) / 2,
    "/classify": total(TEXT),
    "/pooling": total(TEXT),
    "/v1/classify": total(TEXT),
    "/v1/embeddings": total(TEXT),
    "/score": total(ASKED + SAID) / 2,
    "/v1/score": total(ASKED + SAID) / 2,
    "/remote_rm": total(TEXT) / 2,
    "/predict": total(TEXT),
    "/rerank": total(ASKED + SAID) / 2,
    "/v1/rerank": total(ASKED + SAID) / 2,
    "/v2/rerank": total(ASKED + "The sky.") / 2,  # only the best one
    "/compare": total(ASKED + SAID) / 2,
    "/verify": total(ASKED + SAID) / 2,
}
BY_FORM = {"texts": total(TEXT), "conversations": total(ASKED + SAID), "tokens": 18.0}
INFER = "/v2/models/reward_model/infer"


def curls(page: Path) -> list[list[str]]:
    """Split every curl command of a page, and the command after it in the block, into words."""
    shells = [block for block in blocks(page, "bash") if "curl " in block]
    text = "".join(block[block.index("curl ") :] for block in shells)
    found: list[list[str]] = []
    for word in shlex.split(text.replace("curl ", "\\; "), comments=True):
        if word == ";":
            found.append(["curl"])
        else:
            found[-1].append(word)
    return found


def ask(address: str, *rest: str) -> str:
    """Send a request like curl, with or without ``-d BODY``."""
    data = rest[1].encode() if rest else None
    with urllib.request.urlopen(address, data=data, timeout=30) as answer:
        return answer.read().decode()


@pytest.fixture(scope="module")
def fronted(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with gateway(tmp_path_factory.mktemp("gateway"), f"backends=[{server.url}]") as started:
        yield started
        assert started.stop() == [0], started.output()


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


def test_every_curl_is_answered_with_the_reward_of_its_text(
    server: Server, fronted: Server
) -> None:
    """From the server, and from a gateway in front of it."""
    commands = [words for page in PAGES for words in curls(page)]
    assert len(commands) > 30
    for url in (server.url, fronted.url):
        for _, address, *rest in commands:
            path = address.removeprefix(URL)
            text = ask(url + path, *rest)
            if path == "/v1/rewards":
                (form,) = json.loads(rest[1])
                answer = json.loads(text)
                assert answer["rewards"][0][0] == BY_FORM[form], rest
                assert (answer["errors"], answer["attributes"]) == ([], ["sum", "minus"])
            elif path == INFER:
                assert reward_of_infer(text) == reward_of_request(rest[1])
            elif path in REWARDS:
                assert str(REWARDS[path]) in text, (path, rest, text)
            else:
                assert text, path


def reward_of_infer(text: str) -> float:
    output = json.loads(text)["outputs"][0]
    assert output["name"] == "rewards"
    reward: float = output["data"][0]
    return reward


def reward_of_request(body: str) -> float:
    (tensor,) = json.loads(body)["inputs"]
    sample = tensor["data"][0]
    if tensor["name"] == "conversations":
        sample = "".join(message["content"] for message in json.loads(sample))
    return total(sample)


def test_every_route_and_metric_has_its_row(server: Server, fronted: Server) -> None:
    """Every route also has a command; docs/settings.md has the settings."""
    text = PROTOCOLS.read_text()
    described = json.loads(ask(f"{server.url}/openapi.json"))["paths"]
    assert json.loads(ask(f"{fronted.url}/openapi.json"))["paths"] == described
    shown = {words[1].removeprefix(URL) for words in curls(PROTOCOLS)}
    assert {*described} == shown - {INFER}
    summaries: dict[str, str] = {}
    for route in ROUTES:
        before = summaries.get(route.path)
        summaries[route.path] = route.summary if before is None else f"{before}; {route.summary}"
    rows: set[str] = set()
    for path, methods in described.items():
        (method,) = methods
        assert methods[method].get("description") == summaries.get(path)
        rows.add(f"{method.upper()} {path}")
    for url in (server.url, fronted.url):
        ask(f"{url}/v1/rewards", "-d", '{"texts": ["ab"]}')
        lines = ask(f"{url}/metrics").splitlines()
        families = {line.split()[2] for line in lines if line.startswith("# TYPE")}
        assert len(families) > 15
        assert [row for row in sorted(rows | families) if f"`{row}`" not in text] == []


def test_what_the_page_has_of_kserve_is_answered(server: Server) -> None:
    paths = re.findall(r"`GET (/v2[\w/]*)`", PROTOCOLS.read_text())
    assert len(paths) == 8
    for path in paths:
        ask(server.url + path.replace("NAME", "reward_model"))
    index = json.loads(ask(f"{server.url}/v2/repository/index", "-d", "{}"))
    assert {model["name"] for model in index} == {"contract", "reward_model"}
    answer = json.loads(ask(f"{server.url}/v2/models/contract/infer", "-d", '{"inputs": []}'))
    outputs = {output["name"]: output["data"][0] for output in answer["outputs"]}
    (row,) = re.findall(r"^\| `POST /v2/models/contract/infer` .*", PROTOCOLS.read_text(), re.M)
    assert {*outputs} == {*re.findall(r"`(\w+)`", row)}
    assert json.loads(outputs["contract"])["attributes"] == ["sum", "minus"]


def test_the_page_has_the_defaults_of_limits() -> None:
    config, units = ServerConfig(), {"": 1, " KiB": 2**10, " MiB": 2**20}
    row = rf"^\| `{config.section}\.(\w+)`[^|]*\| ([\d,]+)( [KM]iB)?(?:;[^|]*)? \|"
    rows = re.findall(row, SERVING.read_text(), re.MULTILINE)
    assert len(rows) >= 13
    for name, number, unit in rows:
        assert getattr(config, name) == int(number.replace(",", "")) * units[unit], name
