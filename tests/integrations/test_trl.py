"""TRL's reward function: what it sends for prompts and completions, and how it reads answers."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nemo_aligner.config.common import Aggregate
from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.contract.messages import Conversation
from nemo_aligner.contract.sample_frame import SampleFrame
from nemo_aligner.contract.steps import StepSpan
from nemo_aligner.integrations.trl import RewardFunction, reward_function
from nemo_aligner.serving.client import ScoredRows
from nemo_aligner.serving.protocols import StepRewards
from nemo_aligner.utils.errors import ConfigError, ServingError
from tests.serving.client.misbehaving import Misbehaving
from tests.serving.fake_server import CONTRACT, total


class Client:
    """A fake client that scores like the fake server and rejects empty texts."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.contracts = 0
        self.frame: SampleFrame | None = None

    def contract(self) -> ScoringContract:
        self.contracts += 1
        return CONTRACT

    def sample_frame(self) -> SampleFrame | None:
        return self.frame

    def score_rows(self, texts: Any) -> ScoredRows:
        self.asked += texts
        totals = [total(text) if isinstance(text, str) else 1.0 for text in texts]
        rewards = np.outer(totals, [1, -1]).astype(np.float32)
        errors = {row: "the text is empty" for row, text in enumerate(texts) if not text}
        rewards[list(errors)] = np.nan
        return ScoredRows(rewards, errors, np.zeros(len(texts), dtype=bool), CONTRACT.hash)


def reward_of(client: Client, attribute: str | None = "sum") -> RewardFunction:
    return RewardFunction(client, attribute, "good")  # type: ignore[arg-type]


def test_texts_are_joined_and_messages_are_one_conversation() -> None:
    client = Client()
    reward = reward_of(client)
    assert reward(["a", "b"], ["c", "d"], completion_ids=[[1], [2]]) == [196.0, 198.0]
    asked, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}
    assert reward(prompts=[[asked]], completions=[[said]]) == [1.0]
    assert client.asked == ["ac", "bd", [asked, said]]
    assert client.contracts == 1


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    return city


def test_tools_are_those_of_the_row_or_of_the_trainer() -> None:
    asked = [{"role": "user", "content": "a"}]
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
    said = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "name": "weather", "content": "dry"},
        {"role": "assistant", "content": "It is dry."},
    ]
    tool = {"type": "function", "function": {"name": "f"}}
    client = Client()
    reward = RewardFunction(client, "sum", "good", [tool])  # type: ignore[arg-type]
    rows = [None, [{**tool, "row": 1}], json.dumps([tool])]
    # In Arrow, every row has the keys of all rows.
    given = [None, [{**tool, "row": 1, "other": None}], rows[2]]
    assert reward(prompts=[asked] * 3, completions=[said] * 3, tools=given) == [1.0] * 3
    whole = [*asked, *said]
    assert client.asked == [Conversation(whole, tools) for tools in ([tool], *rows[1:])]  # type: ignore[arg-type]
    reward_of(client)(prompts=[asked], completions=[said])
    assert client.asked[-1] == whole
    described = reward_function("http://127.0.0.1:1", tools=[weather, tool])
    (schema, same) = described._tools or ()
    assert (schema["function"]["name"], same) == ("weather", tool)


def test_attributes_are_weighed_by_the_contract_where_none_is_named() -> None:
    assert reward_of(Client(), None)(["a"], ["c"]) == [196.0 - 0.5 * 196.0]
    assert reward_of(Client(), "minus")(["a"], ["c"]) == [-196.0]
    with pytest.raises(ConfigError, match="got 'other', wanted one of sum, minus"):
        reward_of(Client(), "other")(["a"], ["c"])


def test_a_refused_completion_has_nan_and_is_logged() -> None:
    logged: dict[str, float] = {}
    reward = reward_of(Client())
    found = reward(["a", "", "", "b"], ["c", "", "", "d"], log_metric=logged.__setitem__)
    assert found[0] == 196.0
    assert np.isnan(found[1:3]).all()
    assert logged == {"rewards/good/refused": 0.5}
    assert reward([], [], log_metric=logged.__setitem__) == []


def test_a_refused_completion_gets_the_reward_that_is_set_for_it() -> None:
    """Beside another reward function, TRL takes NaN for 0, which may be the best reward."""
    reward = reward_function("http://127.0.0.1:1", attribute="minus", refused_reward=-500.0)
    reward._client = Client()  # type: ignore[assignment]
    assert reward(["a", "", "b"], ["c", "", "d"]) == [-196.0, -500.0, -198.0]


def test_a_completion_that_a_gateways_judge_fails_on_has_nan_and_is_not_refused() -> None:
    class Judged(Client):
        def score_rows(self, texts: Any) -> ScoredRows:
            return replace(super().score_rows(texts), unscored=frozenset({1}))

    logged: dict[str, float] = {}
    reward = RewardFunction(Judged(), "sum", "good", refused_reward=-5.0)  # type: ignore[arg-type]
    found = reward(["a", "", ""], ["c", "", ""], log_metric=logged.__setitem__)
    assert (found[0], str(found[1]), found[2]) == (196.0, "nan", -5.0)
    assert logged == {"rewards/good/refused": 1 / 3}


def test_a_reward_function_works_in_a_process_of_its_own(lone: Misbehaving) -> None:
    """TRL's rollout worker is spawned, so the reward functions are pickled."""
    reward = reward_function(lone.url, attribute="sum", tools=[weather])
    expected = [[float(total("ac"))], reward.__name__]
    assert [reward(["a"], ["c"]), reward.__name__] == expected
    other = pickle.loads(pickle.dumps(reward))
    assert [other(["a"], ["c"]), other.__name__] == expected


class WithoutReasoning(Client):
    """A fake client of a model whose chat template has no reasoning."""

    def score_rows(self, texts: Any) -> ScoredRows:
        scored = super().score_rows(texts)
        reason = "messages[1]: the chat template does not write its reasoning"
        keys = {"reasoning_content", "thinking"}
        errors = {
            row: reason for row, text in enumerate(texts) if any(keys & {*turn} for turn in text)
        }
        scored.rewards[list(errors)] = np.nan
        return replace(scored, errors=errors)


def test_reasoning_that_trl_has_parsed_may_be_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """``parse_response`` writes it as reasoning_content, for LFM2.5 as thinking."""
    asked, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}
    earlier = [asked, {**said, "reasoning_content": "of the data"}, asked]
    thoughts = [{**said, "reasoning_content": "hm"}, {**said, "thinking": "hm"}, said]
    given = {"prompts": [[asked]] * 3, "completions": [[turn] for turn in thoughts]}
    reward = reward_of(WithoutReasoning())
    for _ in range(2):
        found = reward(**given)
        assert np.isnan(found).tolist() == [True, True, False]
    (warning,) = caplog.messages
    assert "completion 0, which has reasoning, gets no reward: messages[1]: the chat" in warning
    assert "pass reasoning='drop' to reward_function" in warning
    client = WithoutReasoning()
    dropping = RewardFunction(client, "sum", "good", drops_reasoning=True)  # type: ignore[arg-type]
    assert dropping(**given) == [1.0] * 3
    assert client.asked == [[asked, said]] * 3
    assert given["completions"][0] == [thoughts[0]]
    # Only the policy's is dropped; and a string has none.
    assert np.isnan(dropping(prompts=[earlier], completions=[[thoughts[0]]])).all()
    assert client.asked[-1] == [*earlier, said]
    dropping = RewardFunction(Client(), "sum", "good", drops_reasoning=True)  # type: ignore[arg-type]
    assert dropping(["a"], ["c"]) == [196.0]
    for reasoning, drops in (("keep", False), ("drop", True)):
        made = reward_function("http://127.0.0.1:1", reasoning=reasoning)
        assert made._drops_reasoning == drops
    with pytest.raises(ConfigError, match="reasoning: got 'hide', wanted keep or drop"):
        reward_function("http://127.0.0.1:1", reasoning="hide")


def test_what_does_not_belong_together_is_an_error() -> None:
    with pytest.raises(TypeError, match="got str and list, wanted strings, or lists of messages"):
        reward_of(Client())(["a"], [[{"role": "assistant", "content": "c"}]])
    with pytest.raises(ValueError, match=r"shorter|longer"):
        reward_of(Client())(["a"], ["b", "c"])


FRAME = SampleFrame(("<s>user: ",), ((1, 2),), "|bot:", "</s>\n")


@pytest.mark.parametrize(
    ("frame", "prompt", "completion", "fault"),
    [
        (FRAME, "What is red?", " A rose.", "it begins with 'What is red? A rose.', and the model"),
        (FRAME, "<s>user: a|bot:", " b", "it ends without '</s>', because TRL removes special"),
        (FRAME, "<s>user: a|bot:", " b</s>", None),
        (FRAME, [{"role": "user", "content": "a"}], [{"role": "assistant", "content": "b"}], None),
        (None, "What is red?", " A rose.", None),
    ],
)
def test_strings_outside_the_models_template_are_reported_once(
    frame: SampleFrame | None, prompt: Any, completion: Any, fault: str | None, caplog: Any
) -> None:
    """A raw text gets a reward that means little, and nothing else would say so."""
    client = Client()
    client.frame = frame
    reward = reward_of(client)
    for _ in range(2):
        reward([prompt, prompt], [completion, completion])
    assert [fault in message for message in caplog.messages] == [True] * (fault is not None)
    if fault is not None:
        assert "prompts that are lists of messages. Ignore this if" in caplog.text
    assert reward_of(client)([], []) == []


def test_a_step_of_any_size_has_only_the_deadline_of_its_requests() -> None:
    client = reward_function("http://127.0.0.1:9")._client
    assert (client._timeout_s, client._connect.args[-1]) == (None, 600.0)
    assert reward_function("http://127.0.0.1:9", timeout_s=9.0)._client._timeout_s == 9.0


def test_a_server_that_is_gone_ends_training_with_its_url() -> None:
    reward = reward_function("http://127.0.0.1:9", retry_s=0, wait_s=0, name="good")
    assert reward.__name__ == "good"
    options = ({}, {"attribute": "humor"}, {"attribute": "humor", "name": "funny"})
    names = [reward_function("http://127.0.0.1:9", **arguments).__name__ for arguments in options]
    assert names == ["reward_model", "humor", "funny"]
    with pytest.raises(ServingError, match=r"http://127\.0\.0\.1:9"):
        reward(["a"], ["b"])


def test_turns_of_a_completion_make_one_reward() -> None:
    """Turns of the prompt are left out, and a rejected row stays NaN."""
    turns = np.array([[-9, 9], [2, 1], [-1, 3], [0, -4]], dtype=np.float32)
    asked, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}
    prompt = [asked, said, asked]

    class Stepped(Client):
        def score_rows(self, texts: Any) -> ScoredRows:
            self.asked += texts
            spans = {None: (3, 4, 6, 8), 1: (1, 3, 5, 7)}
            steps = np.full(len(texts), None, dtype=np.object_)
            for row, text in enumerate(texts):
                if isinstance(text, str):
                    ends = [StepSpan(None, 0, end) for end in spans[None]]
                else:
                    ends = [StepSpan(message, 0, 1) for message in spans[1]]
                steps[row] = StepRewards(turns, tuple(ends)) if text else None
            errors = {row: "it is empty" for row, text in enumerate(texts) if not text}
            rewards = np.stack([turns[-1]] * len(texts))
            rewards[list(errors)] = np.nan
            exceeded = np.zeros(len(texts), dtype=bool)
            return ScoredRows(rewards, errors, exceeded, CONTRACT.hash, steps=steps)

    # Over the last three turns of both attributes; sum and minus weigh 1 and 0.5.
    log_sigmoid = [-np.log1p(np.exp(-own)).sum() for own in turns[1:].astype(float).T]
    for how, (first, second) in {
        "last": (0.0, -4.0),
        "min": (-1.0, -4.0),
        "mean": (1 / 3, 0.0),
        "product": log_sigmoid,
    }.items():
        client = Stepped()
        reward = RewardFunction(client, None, "good", None, Aggregate(how))  # type: ignore[arg-type]
        found = reward(["abc", ""], ["defgh", ""])
        assert found[0] == pytest.approx(first + 0.5 * second, rel=1e-6), how
        assert np.isnan(found[1])
        assert reward([prompt], [[said, asked, said, asked, said]]) == found[:1]

    class Merging(Stepped):
        """A client of a model whose contract has a rule: its rewards are those of samples."""

        def contract(self) -> ScoringContract:
            return replace(CONTRACT, scored_position="turns", aggregate="min")

        def score_rows(self, texts: Any) -> ScoredRows:
            scored = super().score_rows(texts)
            return replace(scored, rewards=np.full_like(scored.rewards, -20))

    for how, wanted in ((None, -30.0), (Aggregate.last, -2.0), (Aggregate.min, -3.0)):
        reward = RewardFunction(Merging(), None, "good", None, how)  # type: ignore[arg-type]
        assert reward(["abc"], ["defgh"]) == [wanted], how
    # A model without steps has none to merge.
    plain = RewardFunction(Client(), "sum", "good", None, Aggregate.min)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="aggregate: got min, but the server returns no"):
        plain(["a"], ["b"])
    assert np.isnan(plain([""], [""])).all()
    with pytest.raises(ConfigError, match="aggregate: got 'max', wanted one of last, min, mean"):
        reward_function("http://127.0.0.1:9", aggregate="max")
