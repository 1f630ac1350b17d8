"""Which number a trainer learns from, of several attributes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from nemo_aligner.errors import ConfigError
from nemo_aligner.text.one_reward import one_reward, reward_weights
from tests.serving.fake_server import CONTRACT

WEIGHED = dataclasses.replace(CONTRACT, attribute_weights=(0.25, 2.0))


def test_the_contract_weighs_the_attributes_where_none_is_named() -> None:
    rewards = np.array([[4.0, 1.0], [np.nan, np.nan]], dtype=np.float32)
    found = one_reward(rewards, reward_weights(WEIGHED, None))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.array([3.0, np.nan], dtype=np.float32))


def test_rows_that_nobody_scored_may_have_any_number_of_columns() -> None:
    weights = reward_weights(WEIGHED, None)
    assert np.isnan(one_reward(np.full((2, 1), np.nan, dtype=np.float32), weights)).all()
    assert one_reward(np.zeros((0, 1), dtype=np.float32), weights).shape == (0,)


def test_a_named_attribute_is_taken_as_it_is() -> None:
    rewards = np.array([[0.1, 0.3]], dtype=np.float32)
    assert one_reward(rewards, reward_weights(WEIGHED, "minus"))[0] == rewards[0, 1]


def test_an_attribute_that_the_model_lacks_is_an_error() -> None:
    with pytest.raises(ConfigError, match="got 'helpful', wanted one of sum, minus"):
        reward_weights(WEIGHED, "helpful")
