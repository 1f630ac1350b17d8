"""TRL's reward function: what it makes of prompts, completions, and of a server's answers."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_aligner.errors import ConfigError, ServingError
from nemo_aligner.integrations.trl import RewardFunction, reward_function
from tests.integrations.sums import Sums


def reward_of(client: Sums, attribute: str | None = "sum") -> RewardFunction:
    return RewardFunction(client, attribute, "good")  # type: ignore[arg-type]


def test_trl_texts_are_joined_and_messages_are_one_conversation() -> None:
    client = Sums()
    reward = reward_of(client)
    assert reward(["a", "b"], ["c", "d"], completion_ids=[[1], [2]]) == [196.0, 198.0]
    asked, said = {"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}
    assert reward(prompts=[[asked]], completions=[[said]]) == [196.0]
    assert client.asked == ["ac", "bd", [asked, said]]
    assert client.contracts == 1


def test_trl_attributes_are_weighed_by_the_contract_where_none_is_named() -> None:
    assert reward_of(Sums(), None)(["a"], ["c"]) == [196.0 - 0.5 * 196.0]
    assert reward_of(Sums(), "minus")(["a"], ["c"]) == [-196.0]
    with pytest.raises(ConfigError, match="got 'other', wanted one of sum, minus"):
        reward_of(Sums(), "other")(["a"], ["c"])


def test_trl_completion_that_is_refused_has_nan_and_is_logged() -> None:
    logged: dict[str, float] = {}
    reward = reward_of(Sums())
    found = reward(["a", "", "", "b"], ["c", "", "", "d"], log_metric=logged.__setitem__)
    assert found[0] == 196.0
    assert np.isnan(found[1:3]).all()
    assert logged == {"rewards/good/refused": 0.5}
    assert reward([], [], log_metric=logged.__setitem__) == []


def test_trl_prompts_and_completions_that_do_not_belong_together() -> None:
    with pytest.raises(TypeError, match="got str and list, wanted texts, or lists of messages"):
        reward_of(Sums())(["a"], [[{"role": "assistant", "content": "c"}]])
    with pytest.raises(ValueError, match=r"shorter|longer"):
        reward_of(Sums())(["a"], ["b", "c"])


def test_trl_server_that_is_gone_ends_training_with_its_url() -> None:
    reward = reward_function("http://127.0.0.1:9", retry_s=0, name="good")
    assert reward.__name__ == "good"
    with pytest.raises(ServingError, match=r"http://127\.0\.0\.1:9"):
        reward(["a"], ["b"])
