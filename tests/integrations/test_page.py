"""The examples of docs/rl_trainers.md and examples/rl, with a server and a gateway before it."""

from __future__ import annotations

import argparse
import ast
import asyncio
import itertools
import json
import math
import re
import runpy
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
import yaml
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from nemo_aligner.config.evaluation import RewardEnvironmentConfig
from nemo_aligner.config.load import load_values
from nemo_aligner.contract.scorer import ScoredRows, score_all
from nemo_aligner.integrations import nemo_rl
from nemo_aligner.integrations.nemo_gym import drop_in
from nemo_aligner.serving import client
from nemo_aligner.serving.engine.scorer import RewardScorer
from nemo_aligner.utils.errors import ConfigError
from tests.docs.pages import blocks
from tests.harness.environments import checkout, package
from tests.harness.launching import ROOT
from tests.integrations import gym
from tests.integrations.clients.stand_ins import StandIns
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


def test_the_table_of_nemo_rl_s_settings_has_all_of_them() -> None:
    text = PAGE.read_text()
    table = text[text.index("| `env.nemo_aligner_reward_model.`") :].split("\n\n")[0]
    named = set(re.findall(r"`([a-z_]+)(?:\.[a-z_]+)?`", table))
    known = {*RewardEnvironmentConfig.__dataclass_fields__}
    assert named - {"env"} == known


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


# The files of ``examples/rl`` for other trainers, read by these trainers' own code.

FOLDER = ROOT / "examples/rl"
SLIME_MODULES = {
    "slime.utils.misc": ("load_function",),
    "slime.utils.types": ("Sample",),
    "slime.rollout.rm_hub.deepscaler": ("get_deepscaler_rule_based_reward",),
    "slime.rollout.rm_hub.f1": ("f1_score",),
    "slime.rollout.rm_hub.gpqa": ("compute_gpqa_reward",),
    "slime.rollout.rm_hub.math_dapo_utils": ("compute_score",),
    "slime.rollout.rm_hub.math_utils": ("extract_answer", "grade_answer_verl"),
    "slime.rollout.rm_hub.opencua_click": ("compute_opencua_reward",),
}
# Flags of slime_grpo.sh and its model's file that Megatron defines, not slime.
MEGATRON_FLAGS = {
    "lr", "lr-decay-style", "optimizer", "load", "save", "save-interval", "sequence-parallel",
    "attention-dropout", "hidden-dropout",
    "tensor-model-parallel-size", "global-batch-size", "swiglu", "num-layers", "hidden-size",
    "ffn-hidden-size", "num-attention-heads", "group-query-attention", "num-query-groups",
    "use-rotary-position-embeddings", "disable-bias-linear", "normalization", "norm-epsilon",
    "rotary-base", "vocab-size", "kv-channels", "qk-layernorm",
}  # fmt: skip


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> StandIns:
    return StandIns(monkeypatch)


def arguments_of(script: str, folder: Path, program: str, **variables: str) -> list[str]:
    """The arguments with which a script of the folder runs ``program``, which does nothing."""
    fake = folder / "bin" / program
    fake.parent.mkdir(exist_ok=True)
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    done = subprocess.run(
        ["bash", str(FOLDER / script)],
        env={"PATH": f"{fake.parent}:/usr/bin:/bin", **variables},
        capture_output=True,
        text=True,
        cwd=folder,
        check=True,
    )
    return done.stdout.splitlines()


def defined(path: Path, *names: str, **globals_: Any) -> dict[str, Any]:
    """Functions and classes of a file, without its imports."""
    tree = ast.parse(path.read_text())
    body = [node for node in tree.body if getattr(node, "name", None) in names]
    assert len(body) == len(names)
    exec(compile(ast.Module(body, []), str(path), "exec"), globals_)
    return globals_


# NeMo RL.


def test_nemo_rl_reads_the_settings_and_creates_the_environment(
    server: str, scorer: RewardScorer, modules: StandIns, tmp_path: Path
) -> None:
    rl = checkout("RL")
    shutil.copytree(rl / "examples/configs", tmp_path / "configs")
    text = (FOLDER / "nemo_rl_grpo.yaml").read_text()
    (tmp_path / "grpo.yaml").write_text(text.replace(SERVER, server))
    hydra = {
        "hydra._internal.config_loader_impl": {"ConfigLoaderImpl": None},
        "hydra.core.override_parser.overrides_parser": {"OverridesParser": None},
        "hydra.utils": {"get_object": lambda name: getattr(nemo_rl, name.rpartition(".")[2])},
        "ray": {"remote": lambda **options: Actor},
        "nemo_rl.utils.venvs": {"create_local_venv_on_each_node": None},
        "nemo_rl.environments.interfaces": {"EnvironmentInterface": object},
        "nemo_rl.data.processors": {"register_processor": print},
        "nemo_rl.distributed.ray_actor_environment_registry": {
            "ACTOR_ENVIRONMENT_REGISTRY": (pythons := {}),
            "get_actor_python_env": pythons.__getitem__,
        },
    }
    for name, members in hydra.items():
        modules.add(name, **members)
    settings = modules.load("nemo_rl.utils.config", rl / "nemo_rl/utils/config.py")
    settings.register_omegaconf_resolvers()
    config = OmegaConf.to_container(settings.load_config(tmp_path / "grpo.yaml"), resolve=True)
    default = config["data"]["default"]
    assert default["processor"] == nemo_rl.PROCESSOR_NAME
    assert (default["prompt_file"], config["data"]["max_input_seq_length"]) == (None, 512)
    environments = modules.load("nemo_rl.environments.utils", rl / "nemo_rl/environments/utils.py")
    nemo_rl.register()
    name = default["env_name"]
    environment = environments.create_env(name, config["env"][name])
    np.testing.assert_allclose(
        environment.step([CHAT], [None]).rewards, score_all(scorer, [CHAT]).sum(axis=1), **CLOSE
    )
    environment.shutdown()


class Actor:
    """Stands for ``ray.remote``: creates the object in this process."""

    def __init__(self, cls: Callable[..., Any]) -> None:
        self.remote = cls

    def options(self, **options: Any) -> Actor:
        assert options["runtime_env"]["py_executable"] == sys.executable
        return self


def test_settings_of_nemo_rl_name_what_is_registered() -> None:
    settings = yaml.safe_load((FOLDER / "nemo_rl_grpo.yaml").read_text())
    assert settings["data"]["default"]["processor"] == nemo_rl.PROCESSOR_NAME
    assert settings["data"]["default"]["env_name"] == nemo_rl.ENVIRONMENT_NAME
    config = settings["env"][nemo_rl.ENVIRONMENT_NAME]
    loaded = load_values(RewardEnvironmentConfig, config, "env")
    assert (loaded.url, loaded.refused_reward) == ([SERVER], -5.0)


def test_script_for_nemo_rl_registers_and_runs_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    run_path = runpy.run_path
    monkeypatch.setattr(nemo_rl, "register", lambda: done.append("registered"))
    monkeypatch.setattr(runpy, "run_path", lambda path, run_name: done.append((path, run_name)))
    run_path(str(FOLDER / "nemo_rl_grpo.py"), run_name="__main__")
    assert done == ["registered", (str(FOLDER / "run_grpo.py"), "__main__")]


def test_nemo_rl_accepts_the_components_of_verify() -> None:
    pytest.importorskip("pydantic")
    from tests.serving.protocols.test_gym import COMPONENT_CASES, answer_with

    functions = defined(
        checkout("RL") / "nemo_rl/environments/nemo_gym.py",
        "extract_reward_components",
        "build_reward_component_columns",
        "validate_reward_components_match_scalar",
        math=math, torch=torch, Dict=dict, List=list,
    )  # fmt: skip
    for attributes, weights, threshold in COMPONENT_CASES:
        answer = answer_with(attributes, weights, threshold)
        functions["validate_reward_components_match_scalar"]([answer])
        parts = functions["extract_reward_components"](answer)
        columns = functions["build_reward_component_columns"]([parts])
        expected = {f"reward/{name}" for name in attributes} if threshold is None else set()
        assert columns.keys() == expected


# NeMo Gym.


def test_gym_accepts_its_settings(tmp_path: Path) -> None:
    python, folder = gym.gym_python(), gym.gym_folder(tmp_path)
    config = str(FOLDER / "nemo_gym.yaml")
    program = str(python.with_name("gym"))
    done = gym.run(python, folder, program, "env", "validate", "--config", config)
    assert "Config is valid" in done.stdout, done.stdout + done.stderr


# verl.


def leaves(settings: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted key of every setting that is no section."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def test_verl_loads_the_reward_function(
    server: str, scorer: RewardScorer, modules: StandIns, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:  # fmt: skip
    folder = package("verl==0.9.1")
    known = OmegaConf.load(folder / "verl/trainer/config/_generated_ppo_trainer.yaml")
    overrides = [
        argument.partition("=")
        for argument in arguments_of("verl_grpo.sh", tmp_path, "python3")
        if "=" in argument
    ]
    keys = {key for key, _, _ in overrides if key[0] != "+"}
    assert keys <= {*leaves(OmegaConf.to_container(known))}
    config = OmegaConf.merge(
        known, OmegaConf.from_dotlist([f"{key.lstrip('+')}={value}" for key, _, value in overrides])
    )
    modules.add("verl", DataProto=object, __path__=[str(folder / "verl")])
    modules.add("verl.utils.reward_score", get_default_compute_score=None)
    modules.load("verl.utils.import_utils", folder / "verl/utils/import_utils.py")
    reward = modules.load("verl.trainer.ppo.reward", folder / "verl/trainer/ppo/reward.py")
    monkeypatch.setenv("REWARD_URL", server)
    compute_score = reward.get_custom_reward_fn(config)
    given = {"data_source": "chat", "ground_truth": ""}
    prompt = np.array(CHAT[:1], dtype=object)
    answers = [
        asyncio.run(compute_score(solution_str=text, extra_info={"prompt": prompt}, **given))
        for text in ("A rose.", "yes <|im_end|>")
    ]
    ((helpfulness, verbosity),) = score_all(scorer, [CHAT])
    expected = {"helpfulness": helpfulness, "verbosity": verbosity}
    assert answers[0] == pytest.approx({"score": helpfulness + verbosity, **expected}, abs=1e-5)
    assert answers[1] == {"score": -5.0, "helpfulness": -5.0, "verbosity": -5.0}


@pytest.mark.parametrize("variables", [{}, {"REWARD_TOKEN": "secret"}])
def test_verl_reward_sends_the_token_of_the_environment_and_limits_only_requests(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REWARD_TOKEN", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(client, "RewardClient", lambda url, **options: options)
    example = runpy.run_path(str(FOLDER / "verl_reward.py"))
    options = example["_client"]
    assert options["token"] == variables.get("REWARD_TOKEN")
    assert (options["timeout_s"], options["request_timeout_s"]) == (None, 600)


def test_verl_s_rows_lose_the_nulls_and_arrays_of_arrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """verl's data set has the rows as lists, or as arrays where pandas has read the file."""
    example = runpy.run_path(str(FOLDER / "verl_reward.py"))
    samples: list[Any] = []

    async def score(texts: list[Any]) -> ScoredRows:
        samples.extend(texts)
        return ScoredRows(np.ones((1, 1), np.float32), {}, np.zeros(1, bool))

    async def contract() -> Any:
        return SimpleNamespace(attributes=("reward",), attribute_weights=(1.0,))

    client = SimpleNamespace(score_rows_async=score, contract_async=contract)
    monkeypatch.setitem(example["compute_score"].__globals__, "_client", client)

    def row(argument: str) -> dict[str, Any]:
        function = {"name": argument, "arguments": {argument: 1}}
        parameters = {"properties": {argument: {"type": "number"}}}
        return {
            "prompt": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b", "tool_calls": [{"function": function}]},
                {"role": "tool", "content": "c"},
            ],
            "tools": [{"type": "function", "function": {"name": argument, **parameters}}] * 2,
        }

    rows = [row("city"), row("day")]
    table = pyarrow.Table.from_pylist([{"extra_info": row} for row in rows])
    stored = [line["extra_info"] for line in table.to_pylist()]
    assert stored != rows
    stored += [as_arrays(line) for line in stored]
    for line in stored:
        given = {"data_source": "chat", "ground_truth": "", "solution_str": "d"}
        asyncio.run(example["compute_score"](extra_info=line, **given))
    reply = {"role": "assistant", "content": "d"}
    for sample, line in zip(samples, [*rows, *rows], strict=True):
        assert sample.tools == line["tools"]
        *prompt, last = sample.messages
        kept = [{key: value for key, value in turn.items() if value} for turn in prompt]
        assert [*kept, last] == [*line["prompt"], reply]


def as_arrays(value: Any) -> Any:
    """What pandas reads from Parquet: an array for each list, at any depth."""
    if isinstance(value, dict):
        return {key: as_arrays(item) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    array = np.empty(len(value), dtype=object)
    array[:] = [*map(as_arrays, value)]
    return array


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [(("reward",), []), (("reward", "depth"), ["attribute_reward", "depth"])],
)
def test_verl_gets_no_key_that_its_validation_adds_itself(
    attributes: tuple[str, ...], expected: list[str]
) -> None:
    """It appends every sample's reward to a list of this name, and wants one entry for each."""
    trainer = (package("verl==0.9.1") / "verl/trainer/ppo/ray_trainer.py").read_text()
    example = runpy.run_path(str(FOLDER / "verl_reward.py"))
    added = {*re.findall(r'reward_extra_infos_dict\["(\w+)"\]\.extend', trainer)}
    assert added == {"reward"}
    assert added < {*example["_VERL_KEYS"]}
    assert example["_name_attributes"](SimpleNamespace(attributes=attributes)) == expected


# OpenRLHF and slime.


@pytest.mark.parametrize(
    ("version", "variables", "name"),
    [
        ("0.11.2", {}, "reward.remote_url"),
        ("0.9.10", {"OLD_FLAGS": "1"}, "remote_rm_url"),
        ("0.9.2", {"OLD_FLAGS": "1"}, "remote_rm_url"),
    ],
)
def test_openrlhf_parses_the_flags(
    version: str, variables: dict[str, str], name: str, tmp_path: Path
) -> None:
    (path,) = package(f"openrlhf=={version}").rglob("openrlhf/cli/train_ppo_ray.py")
    main = next(node for node in ast.parse(path.read_text()).body if isinstance(node, ast.If))
    end = next(place for place, node in enumerate(main.body) if "parse_args" in ast.unparse(node))
    names: dict[str, Any] = {"argparse": argparse, "datetime": datetime}
    exec(compile(ast.Module(main.body[:end], []), str(path), "exec"), names)
    given = arguments_of("openrlhf_grpo.sh", tmp_path, "python3", **variables)
    assert given[:2] == ["-m", "openrlhf.cli.train_ppo_ray"]
    parsed = vars(names["parser"].parse_args(given[2:]))
    assert parsed[name] == f"{SERVER}/get_reward"


def sample_of_slime(flags: set[str], policy: Path) -> SimpleNamespace:
    """What slime has of the conversation after its own ``Dataset`` and default ``generate``.

    SGLang decodes a reply with the end of its turn (``no_stop_trim``), which is a special token.
    """
    tokenizer = AutoTokenizer.from_pretrained(policy)
    # The tiny template lacks the generation prompt that policies' templates have.
    start = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    tokenizer.chat_template += start
    assert "apply-chat-template" in flags
    prompt = tokenizer.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    reply_ids = tokenizer(CHAT[1]["content"], add_special_tokens=False)["input_ids"]
    response = tokenizer.decode(
        [*reply_ids, tokenizer.eos_token_id],
        skip_special_tokens="rollout-skip-special-tokens" in flags,
        spaces_between_special_tokens=False,
    )
    return SimpleNamespace(prompt=prompt, response=response, label=None)


def test_text_of_slime_gets_the_reward_of_its_conversation(
    server: str, scorer: RewardScorer, policy: Path
) -> None:
    flags = {*re.findall(r"^ +--([\w-]+)", (FOLDER / "slime_grpo.sh").read_text(), re.MULTILINE)}
    body = json.dumps(vars(sample_of_slime(flags, policy))).encode()
    request = urllib.request.Request(f"{server}/remote_rm", body)
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert "X-Foreign-Template-Rows" not in answer.headers
        reward = json.load(answer)
    np.testing.assert_allclose(reward, score_all(scorer, [CHAT]).sum(), **CLOSE)


def test_slime_script_trains_without_dropout_and_resumes(tmp_path: Path) -> None:
    """slime leaves to its launch scripts what Megatron requires before Blackwell."""
    models = tmp_path / "scripts/models"
    models.mkdir(parents=True)
    (models / "qwen3-4B.sh").write_text("MODEL_ARGS=()")
    given = arguments_of("slime_grpo.sh", tmp_path, "ray")
    command = given.index("--")  # the JSON before it has several lines
    environment = "".join(given[:command]).partition("--runtime-env-json=")[2]
    assert json.loads(environment)["env_vars"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    flags = dict(itertools.pairwise(given[command:]))
    assert (flags["--attention-dropout"], flags["--hidden-dropout"]) == ("0", "0")
    assert flags["--load"] == flags["--save"]


def test_slime_knows_the_flags_and_gets_the_reward(
    server: str, scorer: RewardScorer, policy: Path, modules: StandIns, tmp_path: Path
) -> None:
    slime = checkout("slime")
    shutil.copytree(slime / "scripts/models", tmp_path / "scripts/models")
    given = arguments_of("slime_grpo.sh", tmp_path, "ray")
    flags = {word[2:] for word in given[given.index("train.py") :] if word.startswith("--")}
    calls = [
        node
        for node in ast.walk(ast.parse((slime / "slime/utils/arguments.py").read_text()))
        if isinstance(node, ast.Call)
    ]
    words = [arg.value for call in calls for arg in call.args if isinstance(arg, ast.Constant)]
    known = {word[2:] for word in words if isinstance(word, str) and word.startswith("--")}
    assert flags - known <= MEGATRON_FLAGS
    url = given[given.index("--rm-url") + 1]
    for name, members in SLIME_MODULES.items():
        modules.add(name, **dict.fromkeys(members, object))
    hub = modules.load("slime.rollout.rm_hub", slime / "slime/rollout/rm_hub/__init__.py")
    sample = sample_of_slime(flags, policy)
    args = SimpleNamespace(rm_url=url.replace(SERVER, server))

    async def ask() -> float:
        try:
            return await hub.remote_rm(args, sample, max_retries=1)
        finally:
            await hub._get_shared_session().close()

    np.testing.assert_allclose(asyncio.run(ask()), score_all(scorer, [CHAT]).sum(), **CLOSE)
