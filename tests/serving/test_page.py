"""What docs/serving.md shows of calling the server, run against one."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.docs.pages import blocks
from tests.launching import ROOT, free_port
from tests.serving.fake_server import CONTRACT, total

pytest.importorskip("pytriton")
PAGES = [ROOT / "docs" / "serving.md"]
URL, SECOND_URL = "http://127.0.0.1:5555", "http://127.0.0.1:5556"
TEXT = "What is red? A rose."


def curls(page: Path) -> list[list[str]]:
    """The words of every command that begins with curl, with what it continues on."""
    commands = (block for block in blocks(page, "bash") if "curl " in block)
    return [shlex.split(block[block.index("curl ") :], comments=True) for block in commands]


def post(words: list[str], url: str) -> dict[str, Any]:
    """By curl, or the same where there is none."""
    program, address, option, body = (word.replace(URL, url) for word in words)
    assert (program, option) == ("curl", "-d")
    if shutil.which("curl"):
        done = subprocess.run(
            [program, "--silent", address, option, body], capture_output=True, check=True
        )
        return json.loads(done.stdout)
    with urllib.request.urlopen(address, data=body.encode(), timeout=30) as answer:
        return json.load(answer)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_curl_gets_a_reward(page: Path, server: Any) -> None:
    for words in curls(page):
        (asked,) = json.loads(words[-1])["inputs"]
        text = asked["data"][0]
        if asked["name"] == "conversations":
            text = "".join(message["content"] for message in json.loads(text))
        answer = post(words, server.url)
        assert answer["outputs"][0]["name"] == "rewards", answer
        assert answer["outputs"][0]["data"][0] == total(text)


def test_a_text_and_a_conversation_are_shown() -> None:
    forms = [json.loads(words[-1])["inputs"][0]["name"] for words in curls(PAGES[0])]
    assert forms == ["sentences", "conversations"]


def test_the_page_runs_from_its_first_line_of_python_to_its_last(
    server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {}
    for block in blocks(PAGES[0], "python"):
        block = block.replace(URL, server.url).replace(
            SECOND_URL, f"http://127.0.0.1:{free_port()}"
        )
        exec(compile(block, "serving.md", "exec"), names)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "(2, 2)"
    refused, reasons, several, checked, plain = said[-5:]
    assert refused.endswith("row 1: the text is empty")
    assert reasons == f"[{total('A text.'):.0f}.  nan] {{1: 'the text is empty'}}"
    assert several == str(np.array([total(text) for text in names["texts"]], dtype=np.float32))
    assert checked == str(np.array([total(TEXT)], dtype=np.float32))
    assert names["contract"] == CONTRACT
    assert plain == f"[[ {total(TEXT):.0f}. {-total(TEXT):.0f}.]] None None None"


def test_the_reward_function_takes_texts_and_conversations(server: Any) -> None:
    (block,) = (block for block in blocks(PAGES[0], "python") if "def reward" in block)
    names: dict[str, Any] = {}
    exec(block.replace(URL, server.url), names)
    assert names["reward"](["a", "b"], completions=["c", "d"], step=1) == [196.0, 198.0]
    assert str(names["reward"](["a", ""], completions=["c", ""])) == "[196.0, nan]"
    asked = [[{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]]
    said = [[{"role": "assistant", "content": "c"}], [{"role": "assistant", "content": "d"}]]
    assert names["reward"](prompts=asked, completions=said) == [196.0, 198.0]


def test_the_urls_of_health_answer(server: Any) -> None:
    for path in ("health/live", "health/ready", "models/reward_model/ready"):
        assert path in PAGES[0].read_text()
        with urllib.request.urlopen(f"{server.url}/v2/{path}", timeout=30) as answer:
            assert answer.status == 200
