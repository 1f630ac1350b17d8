"""What README and docs/gateway.md show of calling the gateway, run against one."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_aligner.config.describe import list_keys
from nemo_aligner.config.gateway import GatewayRunConfig
from tests.docs.pages import blocks
from tests.launching import ROOT
from tests.serving.fake_server import total
from tests.serving.servers import Server, gateway

pytest.importorskip("pytriton")
pytest.importorskip("fastapi")
from nemo_aligner.serving.wire.protocols import ROUTES

README, PAGE = ROOT / "README.md", ROOT / "docs" / "gateway.md"
URL = "http://127.0.0.1:8000"
TEXT, ASKED, SAID = "What is red? A rose.", "What is red?", "A rose."
# What each command of the page finds, by its route.
REWARDS = {
    "/get_reward": total(TEXT) / 2,
    "/classify": total(TEXT),
    "/pooling": total(TEXT),
    "/score": total(ASKED + SAID) / 2,
    "/verify": total(ASKED + SAID) / 2,
}
BY_FORM = {"texts": total(TEXT), "conversations": total(ASKED + SAID), "tokens": 18.0}


def curls(page: Path) -> list[list[str]]:
    """The words of every curl command, from its URL on."""
    text = "".join(block for block in blocks(page, "bash") if "curl " in block)
    commands = shlex.split(text.replace("curl ", "\\; "), comments=True)
    found: list[list[str]] = []
    for word in commands:
        if word == ";":
            found.append([])
        else:
            found[-1].append(word)
    return found


@pytest.fixture(scope="module")
def fronted(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with gateway(tmp_path_factory.mktemp("gateway"), f"backends=[{server.url}]") as started:
        yield started
        assert started.stop() == [0], started.output()


def ask(words: list[str], url: str) -> str:
    """By curl, or the same where there is none."""
    address, *rest = (word.replace(URL, url) for word in words)
    if shutil.which("curl"):
        command = ["curl", "--silent", "--fail-with-body", address, *rest]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    data = rest[1].encode() if rest else None
    with urllib.request.urlopen(address, data=data, timeout=30) as answer:
        return answer.read().decode()


@pytest.mark.parametrize("page", [README, PAGE], ids=lambda page: page.name)
def test_every_curl_is_answered_with_the_reward_of_its_text(page: Path, fronted: Server) -> None:
    for words in curls(page):
        said, path = ask(words, fronted.url), words[0].removeprefix(URL)
        if path == "/v1/rewards":
            (form,) = json.loads(words[2])
            answer = json.loads(said)
            assert answer["rewards"][0][0] == BY_FORM[form], words
            assert (answer["errors"], answer["attributes"]) == ([], ["sum", "minus"])
        elif path in REWARDS:
            assert str(REWARDS[path]) in said, (words, said)
        else:
            assert said, words


def test_every_route_has_a_command_and_a_row(fronted: Server) -> None:
    page = json.loads(ask([f"{URL}/openapi.json"], fronted.url))
    shown = {words[0].removeprefix(URL) for words in curls(PAGE)}
    assert set(page["paths"]) == shown
    routes = {route.path: route.about for route in ROUTES}
    for path, methods in page["paths"].items():
        (method,) = methods
        assert methods[method].get("description") == routes.get(path)
        assert f"`{method.upper()} {path}`" in PAGE.read_text()


def test_every_setting_has_its_row() -> None:
    text = PAGE.read_text()
    assert [key.name for key in list_keys(GatewayRunConfig) if f"`{key.name}`" not in text] == []


def test_every_metric_has_its_row(fronted: Server) -> None:
    ask([f"{URL}/v1/rewards", "-d", '{"texts": ["ab"]}'], fronted.url)
    shown = ask([f"{URL}/metrics"], fronted.url)
    families = [line.split()[2] for line in shown.splitlines() if line.startswith("# TYPE")]
    assert len(families) > 15
    text: Any = PAGE.read_text()
    assert [name for name in families if f"`{name}`" not in text] == []
