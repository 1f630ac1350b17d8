"""The examples of docs/rl_trainers.md, run against a server and a gateway in front of it."""

from __future__ import annotations

import asyncio
import json
import re
import runpy
import sys
import urllib.request
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import yaml

from nemo_aligner.config.evaluation import RewardEnvironmentConfig
from nemo_aligner.config.load import load_values
from nemo_aligner.contract.scorer import score_all
from nemo_aligner.integrations import nemo_rl
from nemo_aligner.integrations.nemo_gym import drop_in
from nemo_aligner.serving.engine.scorer import RewardScorer
from nemo_aligner.utils.errors import ConfigError
from tests.docs.pages import blocks
from tests.harness.launching import ROOT
from tests.serving.test_page import curls

PAGE = ROOT / "docs" / "rl_trainers.md"
SERVER = "http://127.0.0.1:5555"
TEXT = "What is red? A rose."
CHAT = [{"role": "user", "content": "What is red?"}, {"role": "assistant", "content": "A rose."}]
CLOSE = {"rtol": 0, "atol": 1e-5}


def python_block(mark: str, server: str) -> str:
    (block,) = (block for block in blocks(PAGE, "python") if mark in block)
    return block.replace(SERVER, server)


def test_the_reward_function_of_trl(
    server: str, scorer: RewardScorer, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {}
    exec(python_block("reward_function(", server), names)
    exec(python_block("reward(prompts=prompts", server), names)
    reward, refused = capsys.readouterr().out.strip("[]\n").split(", ")
    np.testing.assert_allclose(float(reward), score_all(scorer, [CHAT]).sum(), **CLOSE)
    assert refused == "nan"


def test_the_environment_of_nemo_rl(
    server: str, scorer: RewardScorer, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {}
    exec(python_block("RewardModelEnvironment(", server), names)
    step = names["step"]
    np.testing.assert_allclose(step.rewards, score_all(scorer, [CHAT]).sum(axis=1), **CLOSE)
    assert capsys.readouterr().out.endswith("tensor([True]) ['A rose.']\n")


def test_the_settings_of_nemo_rl_name_what_is_registered() -> None:
    (block,) = blocks(PAGE, "yaml")
    settings = yaml.safe_load(block)
    assert settings["data"]["default"] == {
        "processor": nemo_rl.PROCESSOR_NAME,
        "env_name": nemo_rl.ENVIRONMENT_NAME,
    }
    config = load_values(RewardEnvironmentConfig, settings["env"][nemo_rl.ENVIRONMENT_NAME], "env")
    assert config.url == [SERVER]
    assert config.refused_reward == -5.0


def test_the_table_of_nemo_rl_s_settings_has_all_of_them() -> None:
    text = PAGE.read_text()
    table = text[text.index("| `env.nemo_aligner_reward_model.`") :].split("\n\n")[0]
    named = set(re.findall(r"`([a-z_]+)(?:\.[a-z_]+)?`", table))
    known = {*RewardEnvironmentConfig.__dataclass_fields__}
    assert named - {"env"} == known


def test_the_script_for_nemo_rl_registers_and_runs_its_own(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []
    monkeypatch.setattr(nemo_rl, "register", lambda: done.append("registered"))
    monkeypatch.setattr(runpy, "run_path", lambda path, run_name: done.append((path, run_name)))
    exec(python_block("nemo_rl.register()", server), {"__name__": "__main__"})
    assert done == ["registered", (Path("examples/run_grpo.py"), "__main__")]


def test_the_reward_function_of_verl(
    server: str, scorer: RewardScorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("verl_reward")
    monkeypatch.setitem(sys.modules, "verl_reward", module)
    exec(python_block("compute_score", server), vars(module))
    asked = {"extra_info": {"prompt": CHAT[:1], "num_turns": 1}}
    work = module.compute_score("chat", solution_str="A rose.", ground_truth="", **asked)
    np.testing.assert_allclose(asyncio.run(work), score_all(scorer, [CHAT])[0, 0], **CLOSE)
    module.client.close()


def curl(words: list[str], url: str) -> Any:
    """Run a command of the page, and return the answer."""
    program, address, option, header, data, body = words
    assert (program, option, data) == ("curl", "-H", "-d")
    name, value = header.split(": ")
    request = urllib.request.Request(address.replace(SERVER, url), body.encode(), {name: value})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@pytest.mark.parametrize("target", ["server", "gateway"])
def test_every_curl_gets_a_reward(
    target: str, scorer: RewardScorer, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue(target)
    verify, get_reward, remote_rm, classify = (curl(words, url) for words in curls(PAGE))
    np.testing.assert_allclose(verify["reward"], score_all(scorer, [CHAT]).sum(), **CLOSE)
    assert remote_rm == verify["reward"]
    rewards = score_all(scorer, [TEXT])
    np.testing.assert_allclose(get_reward["rewards"], rewards.sum(axis=1), **CLOSE)
    np.testing.assert_allclose(classify["data"][0]["probs"], rewards[0], **CLOSE)


def test_gym_gets_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = (block for block in blocks(PAGE, "bash") if "integrations.nemo_gym" in block)
    words = block.split()
    assert words[:3] == ["python", "-m", "nemo_aligner.integrations.nemo_gym"]
    monkeypatch.setattr(sys, "argv", [words[2], str(tmp_path)])
    monkeypatch.delitem(sys.modules, words[2])
    (tmp_path / "resources_servers").mkdir()
    runpy.run_module(words[2], run_name="__main__")
    folder = tmp_path / "resources_servers" / "reward_model"
    assert (folder / "README.md").is_file()
    with pytest.raises(ConfigError, match="exists already"):
        drop_in(tmp_path)
