"""NeMo RL's environment: its interface, in process and on servers."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch

from nemo_aligner.config.evaluation import RewardEnvironmentConfig
from nemo_aligner.contract.messages import Conversation, messages_of
from nemo_aligner.contract.messages import flatten_message as said_by
from nemo_aligner.contract.scorer import score_all
from nemo_aligner.integrations import in_process, nemo_rl
from nemo_aligner.integrations.in_process import InProcessScorer
from nemo_aligner.integrations.nemo_rl import EnvironmentReturn, RewardModelEnvironment
from nemo_aligner.serving.client import ScoredRows
from nemo_aligner.serving.engine.scorer import load_scorer
from nemo_aligner.utils.errors import ConfigError, DataError, ServingError, SettingsError
from tests.serving.client.misbehaving import Misbehaving, refuse
from tests.serving.fake_server import CONTRACT, total

PLAIN = SimpleNamespace(system_prompt=None, prompt=None)


def said(question: str, answer: str) -> list[dict[str, Any]]:
    """Build a message log like NeMo RL: messages also have token ids."""
    return [
        {"role": "user", "content": question, "token_ids": torch.tensor([1, 2])},
        {"role": "assistant", "content": answer, "token_ids": torch.tensor([3])},
    ]


class Sums:
    """Scores like the fake server, in this process."""

    closed = 0

    contract = CONTRACT
    attributes = CONTRACT.attributes

    def score_rows(self, texts: Any) -> ScoredRows:
        self.asked = texts
        wholes = ["".join(map(said_by, messages_of(text))) for text in texts]
        errors = {row: "the text is empty" for row, text in enumerate(wholes) if not text}
        errors |= {row: "a mark" for row, text in enumerate(wholes) if "<|im_end|>" in text}
        sums = np.outer([total(text) for text in wholes], [1, -1]).astype(np.float32)
        sums[list(errors)] = np.nan
        return ScoredRows(sums, errors, np.zeros(len(texts), dtype=bool), CONTRACT.hash)

    def find_rejected(self, texts: Any) -> dict[int, str]:
        return self.score_rows(texts).errors

    def close(self) -> None:
        self.closed += 1


def environment(**config: Any) -> RewardModelEnvironment:
    return RewardModelEnvironment({"attribute": "sum", **config}, Sums())


def test_a_step_gives_what_nemo_rl_reads() -> None:
    step = environment().step([said("a", "b"), said("", "c")], [None, {"ground_truth": "x"}])
    observations, metadata, stop_strings, rewards, terminateds, answers = step
    assert torch.equal(rewards, torch.tensor([195.0, 99.0]))
    assert rewards.dtype == torch.float32
    assert torch.equal(terminateds, torch.tensor([True, True]))
    assert terminateds.dtype == torch.bool
    assert observations[0] == {"role": "environment", "content": "Environment: 195"}
    assert (metadata, stop_strings, answers) == ([None] * 2, [None] * 2, ["b", "c"])


def test_the_fields_of_a_return_are_those_of_nemo_rl_in_its_order() -> None:
    """A rollout unpacks all six fields; see nemo_rl/environments/interfaces.py."""
    assert EnvironmentReturn._fields == (
        "observations",
        "metadata",
        "next_stop_strings",
        "rewards",
        "terminateds",
        "answers",
    )


def test_the_attributes_are_weighed_by_the_contract_where_none_is_named() -> None:
    step = environment(attribute=None).step([said("a", "b")], [None])
    assert step.rewards.tolist() == [97.5]  # the sum, plus half of its negative


def test_components_add_up_to_the_reward() -> None:
    """A rollout of NeMo RL adds the values of a dict; GDPO reads the keys ``reward/NAME``."""
    options = {"attribute": None, "reward_components": True, "refused_reward": -5}
    rewards = environment(**options).step([said("a", "b"), said("", "")], [None] * 2).rewards
    assert {name: column.tolist() for name, column in rewards.items()} == {
        "reward/sum": [195.0, -2.5],
        "reward/minus": [-97.5, -2.5],
    }
    assert {column.dtype for column in rewards.values()} == {torch.float32}


def test_a_bare_conversation_beside_a_log_is_taken_for_its_prompt() -> None:
    sums = Sums()
    bare = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    log = said("<|im_start|>user\na<|im_end|>", "b")
    RewardModelEnvironment({}, sums).step([log], [{"messages": bare}])
    assert sums.asked == [[*bare, {"role": "assistant", "content": "b"}]]
    info = {"messages": bare, "principle": "be brief"}
    RewardModelEnvironment({}, sums).step([log], [info])
    asked = Conversation([*bare, {"role": "assistant", "content": "b"}], principle="be brief")
    assert sums.asked[-1] == asked


def test_tools_and_calls_of_a_log_are_scored_with_it() -> None:
    sums = Sums()
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    log = [
        {"role": "user", "content": "a", "token_ids": [1]},
        {"role": "assistant", "content": None, "tool_calls": [call], "token_ids": [2]},
    ]
    bare = [{"role": "user", "content": "a"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    step = RewardModelEnvironment({}, sums).step([log], [{"messages": bare, "tools": tools}])
    calling = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert sums.asked == [Conversation([*bare, calling], tools)]
    assert step.answers == [None]


def test_a_reply_that_is_refused_is_an_error_that_names_the_setting() -> None:
    with pytest.raises(
        DataError, match=r"1 of 2 .* sample 1: the text is empty. Set refused_reward"
    ):
        environment().step([said("a", "b"), said("", "")], [None, None])


def test_a_reply_that_is_refused_gets_the_reward_of_the_settings_and_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusing = environment(refused_reward=-5)
    assert refusing.step([said("a", "b"), said("", "")], [None] * 2).rewards.tolist() == [195, -5]
    assert "sample 1: the text is empty; their reward is -5" in caplog.text
    _, metrics = refusing.global_post_process_and_metrics({"message_log": []})
    assert metrics["reward_model_env/num_refused"] == 1


def test_a_prompt_that_is_refused_with_any_reply_is_not_the_policys_doing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logs = [said("a", "b"), said("a", "b<|im_end|>"), said("a<|im_end|>", "b")]
    logs += [said("a<|im_end|>", "c<|im_end|>")]
    refusing = environment(refused_reward=-5)
    assert refusing.step(logs, [None] * 4).rewards.tolist() == [195, -5, 0, 0]
    assert "1 of 4 replies are rejected; sample 1: a mark; their reward is -5" in caplog.text
    assert "2 of 4 prompts are rejected; sample 2: a mark; their reward is 0" in caplog.text
    _, metrics = refusing.global_post_process_and_metrics({"message_log": []})
    counted = [metrics[f"reward_model_env/num_refused{name}"] for name in ("", "_prompts")]
    assert counted == [1, 2]
    with pytest.raises(DataError, match=r"1 of 1 prompts are rejected; sample 0: a mark. .*"):
        environment().step(logs[2:3], [None])


def test_a_sample_that_a_gateways_judge_fails_on_is_not_refused() -> None:
    class Judged(Sums):
        def score_rows(self, texts: Any) -> ScoredRows:
            return replace(super().score_rows(texts), unscored=frozenset({1}))

    judged = RewardModelEnvironment({"refused_reward": -5}, Judged())
    with pytest.raises(ServingError, match=r"1 of 2 samples have no reward, .* sample 1: the text"):
        judged.step([said("a", "b"), said("", "")], [None] * 2)


def test_the_metrics_are_those_of_nemo_rl() -> None:
    rewards = torch.tensor([1.0, 2.0, 6.0])
    batch = {"message_log": [[], [], []], "total_reward": rewards}
    same, metrics = environment().global_post_process_and_metrics(batch)
    assert same is batch
    assert metrics == {
        "reward_model_env/num_samples": 3,
        "reward_model_env/num_refused": 0,
        "reward_model_env/num_refused_prompts": 0,
        "reward_model_env/mean_reward": 3.0,
        "reward_model_env/std_reward": pytest.approx(float(rewards.std())),
        "reward_model_env/min_reward": 1.0,
        "reward_model_env/max_reward": 6.0,
    }


def test_a_single_reward_has_no_deviation_and_none_has_no_metrics() -> None:
    one = {"message_log": [[]], "rewards": torch.tensor([1.0])}
    _, metrics = environment().global_post_process_and_metrics(one)
    assert metrics["reward_model_env/std_reward"] == 0.0
    _, metrics = environment().global_post_process_and_metrics({"message_log": [[]]})
    assert "reward_model_env/mean_reward" not in metrics


def test_no_samples_are_no_rewards() -> None:
    step = environment().step([], [])
    assert step.rewards.shape == (0,)
    assert step.observations == []


def test_an_environment_is_shut_down_once() -> None:
    sums = Sums()
    ended = RewardModelEnvironment({}, sums)
    ended.shutdown()
    ended.shutdown()
    assert sums.closed == 1
    with pytest.raises(ConfigError, match="was shut down"):
        ended.step([said("a", "b")], [None])


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, "got neither of url and rm_model_file"),
        ({"url": "http://x:1", "rm_model_file": "a"}, "got both of url and rm_model_file"),
        ({"rm_model_file": "a", "dtensor_cfg": {"enabled": True}}, "env: unknown key dtensor_cfg"),
        ({"rm_model_file": "a", "cpu_offload": True, "prefix_cache_tokens": 9}, "cpu_offload: got"),
        ({"rm_model_file": "a", "attribute": "b", "reward_components": True}, "reward_components:"),
        ({"rm_model_file": "a", "model": {"tensor_model_parallel_size": 2}}, "with torchrun"),
    ],
)
def test_settings_that_do_not_fit_are_errors(config: Mapping[str, Any], wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        RewardModelEnvironment(config)


def test_a_log_without_messages_and_a_prompt_that_is_none_are_errors() -> None:
    with pytest.raises(DataError, match="without messages"):
        environment().step([[]], [None])
    with pytest.raises(DataError, match=r"extra_env_info\.messages: got text, wanted a list of"):
        environment().step([said("a", "b")], [{"messages": "text"}])


def test_another_contract_than_the_expected_is_an_error() -> None:
    with pytest.raises(ConfigError, match="expect_contract: got a reward model with"):
        environment(expect_contract="0" * 64)
    environment(expect_contract=CONTRACT.hash)


def test_settings_are_errors_all_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        environment(retry_s=-1, precision="fp8")
    assert len(caught.value.problems) == 2


def test_servers_get_all_requests_of_an_actor_at_once_and_count_no_prompt_that_is_tried(
    lone: Misbehaving,
) -> None:
    served = nemo_rl._create_rewarder(RewardEnvironmentConfig(url=lone.url, retry_s=0))
    calls = nemo_rl._MOST_CONCURRENT
    all_asked = Barrier(calls)
    lone.answer = lambda texts: all_asked.wait(10) and None
    with ThreadPoolExecutor(calls) as threads:
        [*threads.map(lambda text: served.score_rows([text]), ["a"] * calls)]
    assert lone.most_at_once == calls
    lone.asked.clear()
    lone.answer = refuse
    assert served.find_rejected(["!a", "b"]) == {0: "no a"}
    assert sorted(lone.asked) == [["!a"], ["b"]]  # probes have one row
    served.close()


def test_a_step_of_any_size_has_only_the_deadline_of_its_requests(lone: Misbehaving) -> None:
    config = RewardEnvironmentConfig(url=lone.url, request_timeout_s=0.2)
    served = nemo_rl._create_rewarder(config)
    assert served._client._timeout_s is None
    lone.answer = lambda texts: time.sleep(0.5)
    with pytest.raises(ServingError, match=r"within 0\.2 s \(request_timeout_s\)"):
        served.score_rows(["a"])
    served.close()


def test_servers_are_asked(fake_server: str) -> None:
    asking = RewardModelEnvironment({"url": fake_server, "attribute": "minus"})
    step = asking.step([said("a", "b"), said("c", "d")], [None, None])
    assert step.rewards.tolist() == [-195.0, -199.0]
    with pytest.raises(DataError, match="sample 0: the text is empty"):
        asking.step([said("", "")], [None])
    asking.shutdown()


class Overlapping:
    """A scorer that counts calls in flight."""

    contract = CONTRACT
    attributes = CONTRACT.attributes

    def __init__(self) -> None:
        self.running = self.most_running = 0

    def score_rows(self, texts: Any, *, on_error: str = "nan") -> ScoredRows:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        time.sleep(0.02)
        self.running -= 1
        return Sums().score_rows(texts)


@pytest.mark.parametrize(("is_local", "most_running"), [(False, 4), (True, 1)])
def test_steps_of_an_actor_s_threads_run_at_once_unless_the_model_is_local(
    is_local: bool, most_running: int
) -> None:
    """Asynchronous rollouts make a step of each sample."""
    scorer: Any = Overlapping()
    shared = RewardModelEnvironment({}, InProcessScorer(scorer) if is_local else scorer)
    with ThreadPoolExecutor(4) as threads:
        steps = threads.map(lambda text: shared.step([said("a", text)], [None]), "bcde")
    assert [step.rewards.tolist() for step in steps] == [[97.5], [98.0], [98.5], [99.0]]
    assert scorer.most_running == most_running


def test_model_on_the_cpu_of_a_node_with_gpus_gives_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, capsys: Any
) -> None:
    monkeypatch.setattr(in_process, "_DEVICE_FILES", tmp_path)
    cpu = torch.device("cpu")
    in_process._report_device("rm.nemo", cpu)
    assert capsys.readouterr().out == "rm.nemo: the reward model scores on cpu\n"
    assert not caplog.messages
    (tmp_path / "nvidia0").touch()
    in_process._report_device("rm.nemo", torch.device("cuda", 0))
    assert not caplog.messages
    in_process._report_device("rm.nemo", cpu)
    assert "on the CPU, which is slow, because this process sees none of" in caplog.text


class TestInProcess:
    LOGS = (said("what is the river", "thank you"), said("who sings", "the bird in the tree"))

    @pytest.mark.parametrize("cpu_offload", [False, True])
    def test_rewards_are_those_of_the_scorer(self, reward_model: Path, cpu_offload: bool) -> None:
        config = {"rm_model_file": str(reward_model), "cpu_offload": cpu_offload}
        local = RewardModelEnvironment({**config, "attribute": "verbosity", "refused_reward": 0.0})
        step = local.step([*self.LOGS, said("", "<|im_end|>")], [None] * 3)
        assert isinstance(local._rewarder, InProcessScorer)
        bare = [
            [{key: turn[key] for key in ("role", "content")} for turn in log] for log in self.LOGS
        ]
        weights = local._rewarder._weights
        assert (weights is not None and not weights.is_on_device) == cpu_offload
        with local._rewarder._weights_on_device():
            wanted = score_all(local._rewarder._scorer, bare)[:, 1]
        assert step.rewards[:2].tolist() == wanted.tolist()
        assert step.rewards[2] == 0.0
        local.shutdown()

    def test_a_scorer_of_several_ranks_can_be_given(self, reward_model: Path, layout: Any) -> None:
        scorer = load_scorer(reward_model, layout)
        given = RewardModelEnvironment({"attribute": "helpfulness"}, InProcessScorer(scorer))
        rewards = given.step(self.LOGS, [None, None]).rewards
        given.shutdown()
        assert rewards[0] != rewards[1]

    def test_a_reward_that_is_not_finite_is_an_error(
        self, reward_model: Path, layout: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        scorer = load_scorer(reward_model, layout)
        made = np.array([[1.0, 2.0], [np.nan, 2.0]], dtype=np.float32)
        monkeypatch.setattr(scorer, "compute", lambda rows: np.split(made, len(rows)))
        config = {"attribute": "helpfulness", "refused_reward": 0.0}
        given = RewardModelEnvironment(config, InProcessScorer(scorer))
        with pytest.raises(ServingError, match="row 2: the model's reward is not a finite number"):
            given.step([self.LOGS[0], said("", "<|im_end|>"), self.LOGS[1]], [None] * 3)


def test_the_processor_gives_the_policy_its_template_and_the_environment_the_messages(
    tokenizer_folder: Path,
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    spec = SimpleNamespace(system_prompt="you sing", prompt="please {}")
    reply = {"role": "assistant", "content": "no"}
    datum = {"messages": [{"role": "user", "content": "why"}, reply], "task_name": "chat"}
    made = nemo_rl.messages_processor(datum, spec, tokenizer, 64, 3)
    bare = [
        {"role": "system", "content": "you sing"},
        {"role": "user", "content": "please why"},
    ]
    assert made["extra_env_info"] == {"messages": bare}
    (message,) = made["message_log"]
    assert message["content"] == tokenizer.apply_chat_template(
        bare, tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(message["token_ids"]) == message["content"]
    assert made["length"] == len(message["token_ids"])
    assert (made["loss_multiplier"], made["idx"], made["task_name"]) == (1.0, 3, "chat")
    assert datum["messages"][0]["content"] == "why"
    tools = [{"type": "function", "function": {"name": "f"}}]
    made = nemo_rl.messages_processor({**datum, "tools": json.dumps(tools)}, spec, tokenizer, 64, 3)
    assert made["extra_env_info"] == {"messages": bare, "tools": tools}
    made = nemo_rl.messages_processor({**datum, "principle": "be brief"}, spec, tokenizer, 64, 3)
    assert made["extra_env_info"] == {"messages": bare, "principle": "be brief"}
    bad = SimpleNamespace(system_prompt=None, prompt="{} in \\boxed{answer}")
    with pytest.raises(ConfigError, match=r"^prompt_file: .* has the field \{answer\}\. Write"):
        nemo_rl.messages_processor(datum, bad, tokenizer, 64, 3)


def test_rows_of_arrow_lose_the_nulls_of_tools_and_calls(tokenizer_folder: Path) -> None:
    """In a data set every struct has the keys of all: an argument of one call is null in others."""
    from transformers import AutoTokenizer

    def row(argument: str) -> dict[str, Any]:
        function = {"name": "f", "arguments": {argument: 1}}
        call = {"role": "assistant", "content": "b", "tool_calls": [{"function": function}]}
        parameters = {"properties": {argument: {"type": "number"}}}
        tool = {"type": "function", "function": {"name": argument, "parameters": parameters}}
        turns = [call, {"role": "user", "content": "c"}]
        return {"messages": [{"role": "user", "content": "a"}, *turns], "tools": [tool]}

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    rows = [row("city"), row("day")]
    stored = pyarrow.Table.from_pylist(rows).to_pylist()
    assert stored[0]["tools"] != rows[0]["tools"]
    for datum, expected in zip(stored, rows, strict=True):
        made = nemo_rl.messages_processor(datum, PLAIN, tokenizer, 64, 0)["extra_env_info"]
        assert made["tools"] == expected["tools"]
        assert made["messages"][1]["tool_calls"] == expected["messages"][1]["tool_calls"]


def test_a_prompt_that_is_too_long_has_no_part_in_the_loss(tokenizer_folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    datum = {"messages": [{"role": "user", "content": "why " * 40}]}
    made = nemo_rl.messages_processor(datum, PLAIN, tokenizer, 16, 0)
    assert made["loss_multiplier"] == 0.0
    assert len(made["message_log"][0]["token_ids"]) == 4
    assert made["length"] > 40
    # A prompt that fills the model's length leaves no token for a reply.
    for most, multiplier in ((made["length"], 0.0), (made["length"] + 1, 1.0)):
        again = nemo_rl.messages_processor(datum, PLAIN, tokenizer, most, 0)
        assert again["loss_multiplier"] == multiplier
        assert len(again["message_log"][0]["token_ids"]) == (made["length"] if multiplier else 4)
    with pytest.raises(DataError, match="datum 5: messages: got no prompt"):
        nemo_rl.messages_processor({"messages": []}, PLAIN, tokenizer, 16, 5)


def test_it_is_registered_where_nemo_rl_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for the four names of NeMo RL that are used."""
    environments: dict[str, str] = {}
    processors: dict[str, Any] = {}
    pythons: dict[str, str] = {}
    stand_ins = {
        "nemo_rl": {},
        "nemo_rl.data": {},
        "nemo_rl.data.processors": {"register_processor": processors.__setitem__},
        "nemo_rl.distributed": {},
        "nemo_rl.distributed.ray_actor_environment_registry": {
            "ACTOR_ENVIRONMENT_REGISTRY": pythons
        },
        "nemo_rl.environments": {},
        "nemo_rl.environments.utils": {"register_env": environments.__setitem__},
        "ray": {"remote": lambda **options: lambda cls: ("actor", cls, options)},
    }
    for name, members in stand_ins.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    variable = "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"  # else ray 2.55 hides the GPUs
    monkeypatch.setenv(variable, "")  # so that its old value is restored
    monkeypatch.delenv(variable)
    nemo_rl.register("mine", "/there/python")
    assert os.environ[variable] == "0"
    actor = environments["mine"]
    assert pythons == {actor: "/there/python"}
    assert processors == {"nemo_aligner_messages": nemo_rl.messages_processor}
    made = getattr(nemo_rl, actor.rpartition(".")[2])
    assert made == ("actor", RewardModelEnvironment, {"max_concurrency": 64})
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        _ = nemo_rl.Other
