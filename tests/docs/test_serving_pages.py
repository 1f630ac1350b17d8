"""What the pages show of asking a server and its gateway, asked of such: by curl and in Python."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
import shlex
import sys
import urllib.request
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml

from nemo_aligner.config.describe import list_keys
from nemo_aligner.config.environment import RewardEnvironmentConfig
from nemo_aligner.config.gateway import GatewayRunConfig
from nemo_aligner.config.load import load_values
from nemo_aligner.integrations import nemo_rl
from nemo_aligner.scoring.scorer import RewardScorer, load_scorer
from tests.docs.pages import PAGES, blocks
from tests.launching import ROOT

pytest.importorskip("fastapi")
from nemo_aligner.serving.wire.protocols import ROUTES

SERVING, GATEWAY, TRAINERS = (
    ROOT / "docs" / f"{name}.md" for name in ("serving", "gateway", "rl_trainers")
)
SERVER_URL, GATEWAY_URL = "http://127.0.0.1:5555", "http://127.0.0.1:8000"
TEXT = "What is red? A rose."
CHAT, OTHER_CHAT = (
    [{"role": "user", "content": "What is red?"}, {"role": "assistant", "content": reply}]
    for reply in ("A rose.", "The sky.")
)
CLOSE = {"rtol": 0, "atol": 1e-5}
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def scorer(workplace: Path, layout: Any) -> RewardScorer:
    """Of the model that is served; its weighed reward is the sum of its two."""
    return load_scorer(workplace / "first.nemo", layout)


def python_blocks(page: Path, served: dict[str, str], mark: str = "") -> list[str]:
    """Those with ``mark`` in them, to be run against what is served."""
    found = [block for block in blocks(page, "python") if mark in block]
    for address, url in served.items():
        found = [block.replace(address, url) for block in found]
    return found


def curls(page: Path) -> list[list[str]]:
    """The words of every curl command, from its URL on."""
    text = "".join(block for block in blocks(page, "bash") if "curl " in block)
    found: list[list[str]] = []
    for word in shlex.split(text.replace("curl ", "\\; "), comments=True):
        if word == ";":
            found.append([])
        else:
            found[-1].append(word)
    return found


def ask(words: list[str], served: dict[str, str]) -> str:
    """The answer to a command of curl."""
    address, *options = words
    given = dict(zip(options[::2], options[1::2], strict=True))
    assert given.keys() <= {"-d", "-H"}, words
    for shown, url in served.items():
        address = address.replace(shown, url)
    data = given["-d"].encode() if "-d" in given else None
    headers = dict([given["-H"].split(": ")]) if "-H" in given else {}
    request = urllib.request.Request(address, data, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def rewards_in(path: str, answer: Any) -> Any:
    """Of an answer of a route, by its protocol."""
    if path == "/v2/models/reward_model/infer":
        return answer["outputs"][0]["data"]
    if path in ("/classify", "/pooling", "/score"):
        key = {"/classify": "probs", "/pooling": "data", "/score": "score"}[path]
        return [each[key] for each in answer["data"]]
    return answer["reward" if path == "/verify" else "rewards"]


def test_curls_of_pages_get_the_rewards_of_the_scorer(
    served: dict[str, str], scorer: RewardScorer
) -> None:
    text, chat, other = (scorer.score([each])[0] for each in (TEXT, CHAT, OTHER_CHAT))
    wanted = {
        "sentences": text,
        "conversations": chat,
        "/get_reward": [text.sum()],
        "/classify": [text],
        "/pooling": [text],
        "/score": [chat.sum(), other.sum()],
        "/verify": chat.sum(),
    }
    by_form = {
        "texts": [text],
        "conversations": [chat],
        "tokens": scorer.score_tokens([[5, 6, 7], [5, 8]]),
    }
    asked = []
    for page in PAGES:
        for words in curls(page):
            answer, path = ask(words, served), re.sub("http://127.0.0.1:[0-9]+", "", words[0])
            if path in ("/v1/contract", "/health", "/ready", "/metrics"):
                assert answer, words
                continue
            key, body = path, json.loads(words[-1])
            if "inputs" in body:
                key = body["inputs"][0]["name"]
            expected = by_form[next(iter(body))] if path == "/v1/rewards" else wanted[key]
            found = np.array(rewards_in(path, json.loads(answer))).reshape(np.shape(expected))
            np.testing.assert_allclose(found, expected, **CLOSE, err_msg=str(words))
            asked.append(key)
    assert {*asked} == {*wanted, "/v1/rewards"}


def test_page_of_serving_runs_from_its_first_line_of_python_to_its_last(
    served: dict[str, str], scorer: RewardScorer, capsys: Captured
) -> None:
    names: dict[str, Any] = {}
    for block in python_blocks(SERVING, served):
        exec(compile(block, "serving.md", "exec"), names)
    text, other = scorer.score([TEXT, "What is red? The sky."])[:, 0]
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "(2, 2)"
    refused, reasons, several, checked, plain = said[-5:]
    assert refused.endswith("row 1: the text has no tokens: it is empty")
    assert reasons.endswith(" nan] {1: 'the text has no tokens: it is empty'}")
    for shown, wanted in ((several, [text, other]), (checked, [text])):
        np.testing.assert_allclose(np.fromstring(shown.strip("[]"), sep=" "), wanted, **CLOSE)
    assert names["contract"] == scorer.contract
    assert plain.endswith("]] None None None")
    found = names["reward"](["What is red? ", ""], completions=["A rose.", ""], step=1)
    np.testing.assert_allclose(found, [text, np.nan], **CLOSE)
    found = names["reward"](prompts=[CHAT[:1]], completions=[CHAT[1:]])
    np.testing.assert_allclose(found, scorer.score([CHAT])[:, 0], **CLOSE)
    for path in ("health/live", "health/ready", "models/reward_model/ready"):
        assert path in SERVING.read_text()
        ask([f"{SERVER_URL}/v2/{path}"], served)  # an error, if that is not its status


def test_page_of_the_gateway_has_every_route_metric_and_setting(served: dict[str, str]) -> None:
    text = GATEWAY.read_text()
    paths = json.loads(ask([f"{GATEWAY_URL}/openapi.json"], served))["paths"]
    assert {*paths} == {words[0].removeprefix(GATEWAY_URL) for words in curls(GATEWAY)}
    routes = {route.path: route.about for route in ROUTES}
    for path, methods in paths.items():
        (method,) = methods
        assert methods[method].get("description") == routes.get(path)
        assert f"`{method.upper()} {path}`" in text
    ask([f"{GATEWAY_URL}/v1/rewards", "-d", '{"texts": ["ab"]}'], served)
    shown = ask([f"{GATEWAY_URL}/metrics"], served)
    families = [line.split()[2] for line in shown.splitlines() if line.startswith("# TYPE")]
    assert len(families) > 15
    names = [*families, *(key.name for key in list_keys(GatewayRunConfig))]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_page_of_rl_trainers_trl_reward_function(
    served: dict[str, str], scorer: RewardScorer, capsys: Captured
) -> None:
    names: dict[str, Any] = {}
    for mark in ("reward_function(", "reward(prompts="):
        (block,) = python_blocks(TRAINERS, served, mark)
        exec(block, names)
    reward, refused = capsys.readouterr().out.strip("[]\n").split(", ")
    np.testing.assert_allclose(float(reward), scorer.score([CHAT]).sum(), **CLOSE)
    assert refused == "nan"


def test_page_of_rl_trainers_verl_reward_function(
    served: dict[str, str], scorer: RewardScorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("verl_reward")
    monkeypatch.setitem(sys.modules, "verl_reward", module)
    (block,) = python_blocks(TRAINERS, served, "compute_score")
    exec(block, vars(module))
    asked = {"extra_info": {"prompt": CHAT[:1], "num_turns": 1}}
    work = module.compute_score("chat", solution_str="A rose.", ground_truth="", **asked)
    np.testing.assert_allclose(asyncio.run(work), scorer.score([CHAT])[0, 0], **CLOSE)
    module.client.close()


def test_page_of_rl_trainers_nemo_rl_environment(
    served: dict[str, str],
    scorer: RewardScorer,
    capsys: Captured,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names: dict[str, Any] = {}
    (block,) = python_blocks(TRAINERS, served, "RewardModelEnvironment(")
    exec(block, names)
    wanted = scorer.score([CHAT]).sum(axis=1)
    np.testing.assert_allclose(names["step"].rewards, wanted, **CLOSE)
    assert capsys.readouterr().out.endswith("tensor([True]) ['A rose.']\n")
    # The script registers it, and runs NeMo RL's own.
    done: list[Any] = []
    monkeypatch.setattr(nemo_rl, "register", lambda: done.append("registered"))
    monkeypatch.setattr(runpy, "run_path", lambda path, run_name: done.append((path, run_name)))
    (block,) = python_blocks(TRAINERS, served, "nemo_rl.register()")
    exec(block, {"__name__": "__main__"})
    assert done == ["registered", (Path("examples/run_grpo.py"), "__main__")]


def test_page_of_rl_trainers_nemo_rl_settings() -> None:
    text, (block,) = TRAINERS.read_text(), blocks(TRAINERS, "yaml")
    settings = yaml.safe_load(block)
    assert settings["data"]["default"] == {
        "processor": nemo_rl.PROCESSOR_NAME,
        "env_name": nemo_rl.ENVIRONMENT_NAME,
    }
    config = load_values(RewardEnvironmentConfig, settings["env"][nemo_rl.ENVIRONMENT_NAME], "env")
    assert (config.url, config.refused_reward) == ([SERVER_URL], -5.0)
    table = text[text.index("| `env.nemo_aligner_reward_model.`") :].split("\n\n")[0]
    named = set(re.findall(r"`([a-z_]+)(?:\.[a-z_]+)?`", table))
    assert named - {"env"} == {*RewardEnvironmentConfig.__dataclass_fields__}
