"""Readouts: from outputs to rewards and spreads, and from several rewards to one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nemo_aligner.contract.readout import (
    Readout,
    one_reward,
    reward_weights,
    sigmoid,
    weighted_components,
)
from nemo_aligner.contract.scorer import ScoredRows
from nemo_aligner.evaluation.sources import RewardSource
from nemo_aligner.integrations.trl import RewardFunction
from nemo_aligner.losses.value import merge_attributes
from nemo_aligner.serving.protocols.base import Served
from nemo_aligner.utils.errors import ConfigError, DataError
from tests.contract.refusals import assert_refused
from tests.serving.fake_server import CONTRACT

BINS = Readout("bins", ((0.0, 1.0, 4.0), (-1.0, 0.0, 1.0)))
QUANTILES = Readout("quantiles", ((0.1, 0.5, 0.9),) * 2)
SIGMOIDS = Readout("sigmoid", ((1.0,),) * 2)
HEADS = Readout("heads", ((1.0, 2.0, 3.0),) * 2)
OUTPUTS = np.array([[0.0, 0.0, math.log(2), 3.0, 3.0, 3.0], [5.0, 1.0, 2.0, 0.0, 0.5, -1.0]])


def test_readout_of_bins_is_the_expected_value_and_its_deviation() -> None:
    # Probabilities 1/4, 1/4, 1/2 for the first attribute, thirds for the second.
    rewards, spreads = BINS.rewards(OUTPUTS), BINS.spreads(OUTPUTS)
    assert rewards.dtype == spreads.dtype == np.float32
    np.testing.assert_allclose(rewards[0], [2.25, 0.0], atol=1e-7)
    np.testing.assert_allclose(spreads[0] ** 2, [0.25 + 0.5 * 16 - 2.25**2, 2 / 3], rtol=1e-6)
    powers = [math.exp(value) for value in OUTPUTS[1, :3]]
    assert rewards[1, 0] == pytest.approx((powers[1] + 4 * powers[2]) / sum(powers))


def test_readout_of_quantiles_is_the_median_and_their_distance_also_where_they_cross() -> None:
    np.testing.assert_array_equal(
        QUANTILES.rewards(OUTPUTS), np.array([[0, 3], [1, 0.5]], np.float32)
    )
    np.testing.assert_allclose(QUANTILES.spreads(OUTPUTS), [[math.log(2), 0], [-3, -1]], rtol=1e-6)


def test_readout_of_heads_is_their_mean_and_how_far_they_are_apart() -> None:
    heads = HEADS.rewards(OUTPUTS)
    np.testing.assert_allclose(heads, OUTPUTS.reshape(2, 2, 3).mean(2), rtol=1e-6)
    np.testing.assert_allclose(HEADS.spreads(OUTPUTS), OUTPUTS.reshape(2, 2, 3).std(2), rtol=1e-6)
    np.testing.assert_allclose(HEADS.plain_rows(OUTPUTS.T).T, heads, rtol=1e-6)


def test_readout_of_a_row_has_the_same_bits_in_any_company() -> None:
    outputs = np.random.RandomState(0).standard_normal((97, 6)).astype(np.float32)
    for readout in (BINS, QUANTILES, HEADS):
        together = readout.rewards(outputs)
        alone = np.concatenate([readout.rewards(row[None]) for row in outputs])
        assert together.tobytes() == alone.tobytes()
        assert readout.rewards(outputs[:0]).shape == readout.spreads(outputs[:0]).shape == (0, 2)


def test_readout_of_large_outputs_stays_finite() -> None:
    assert BINS.rewards(np.full((1, 6), 1e30)).tolist() == [[pytest.approx(5 / 3), 0.0]]
    assert BINS.rewards(np.array([[0, 0, 1e30, -1e30, 0, 1e30]])).tolist() == [[4.0, 1.0]]


def test_readout_of_a_sigmoid_is_a_probability_and_its_deviation() -> None:
    outputs = np.array([[0.0, math.log(3)], [-800.0, 800.0]], dtype=np.float32)
    np.testing.assert_allclose(SIGMOIDS.rewards(outputs), [[0.5, 0.75], [0.0, 1.0]], rtol=1e-6)
    deviations = [[0.5, math.sqrt(3) / 4], [0.0, 0.0]]
    np.testing.assert_allclose(SIGMOIDS.spreads(outputs), deviations, rtol=1e-6, atol=1e-30)
    elements = sigmoid(np.array([[0.0, math.log(3)], [-800.0, 800.0]]))
    np.testing.assert_allclose(elements, [[0.5, 0.75], [0.0, 1.0]], rtol=1e-15)
    # The same as two bins with outputs 0 and the log-odds.
    two = Readout("bins", ((0.0, 1.0),))
    odds = np.array([[-3.5], [0.25], [7.0]], dtype=np.float32)
    pairs = np.concatenate([np.zeros_like(odds), odds], axis=1)
    one = Readout("sigmoid", ((1.0,),))
    np.testing.assert_allclose(one.rewards(odds), two.rewards(pairs), rtol=1e-6)
    np.testing.assert_allclose(one.spreads(odds), two.spreads(pairs), rtol=1e-6)
    assert one.gives_probabilities
    assert two.gives_probabilities
    assert not any(readout.gives_probabilities for readout in (BINS, QUANTILES, HEADS))


def test_readout_survives_json() -> None:
    for readout, width in ((BINS, 3), (QUANTILES, 3), (SIGMOIDS, 1)):
        assert Readout.from_json(readout.to_json()) == readout
        assert readout.width == width
    texts = ("", "[]", "{}", '{"kind": "bins"}', '{"kind": "bins", "numbers": [["x", 1]]}', "1")
    cases = [(text, "readout: got") for text in texts]
    assert_refused(Readout.from_json, cases, DataError)


def test_readout_of_other_numbers_is_refused() -> None:
    cases: list[tuple[Any, str]] = [
        (("mean", ((0, 1),)), "got 'mean', wanted bins or quantiles or heads or sigmoid"),
        (("bins", ((0, 1), (0, 1, 2))), "attributes of different numbers of outputs"),
        (("bins", ()), "different numbers"),
        (("bins", ((1,),)), r"got \[1\], wanted 2 to 1000 ascending numbers"),
        (("bins", ((1, 1),)), "ascending numbers"),
        (("bins", ((0, math.inf),)), "ascending numbers"),
        (("quantiles", ((0.1, 0.9),)), "one of them 0.5: the median is the reward"),
        (("quantiles", ((0.0, 0.5),)), "wanted levels above 0 and below 1"),
        (("sigmoid", ((0.0, 1.0),)), r"sigmoid: got the numbers \[0.0, 1.0\], wanted \[1\]"),
    ]
    assert_refused(lambda case: Readout(*case), cases, DataError)


WEIGHED = dataclasses.replace(CONTRACT, attribute_weights=(0.25, 2.0))


def test_one_reward_is_weighed_by_the_contract_where_no_attribute_is_named() -> None:
    weights = reward_weights(WEIGHED, None)
    rewards = np.array([[4.0, 1.0], [np.nan, np.nan]], dtype=np.float32)
    weighted = one_reward(rewards, weights)
    assert weighted.dtype == np.float32
    np.testing.assert_array_equal(weighted, np.array([3.0, np.nan], dtype=np.float32))
    # Rows without any reward may have any number of columns.
    assert np.isnan(one_reward(np.full((2, 1), np.nan, dtype=np.float32), weights)).all()
    assert one_reward(np.zeros((0, 1), dtype=np.float32), weights).shape == (0,)


class Harm:
    """Scores texts by one attribute, whose weight is -1; rejects empty texts."""

    contract = dataclasses.replace(
        CONTRACT, attributes=("harm",), attribute_weights=(-1.0,), label_means=(0.0,)
    )
    attributes = contract.attributes

    def score_rows(self, texts: Sequence[str], *, on_error: str = "nan") -> ScoredRows:
        rewards = np.array([[len(text) / 3 if text else np.nan] for text in texts], np.float32)
        errors = {row: "it is empty" for row, text in enumerate(texts) if not text}
        return ScoredRows(rewards, errors, np.zeros(len(texts), dtype=bool))


def in_trl(model: Any, texts: list[str]) -> Any:
    client = SimpleNamespace(
        contract=lambda: model.contract, sample_frame=lambda: None, score_rows=model.score_rows
    )
    return RewardFunction(client, None, "harm")([""] * len(texts), texts)  # type: ignore[arg-type]


def on_server(model: Any, texts: list[str]) -> Any:
    served = Served("reward_model", model.attributes, model.contract.attribute_weights)
    return served.one_reward(model.score_rows(texts).rewards)


def by_components(model: Any, texts: list[str]) -> Any:
    rewards = model.score_rows(texts).rewards
    return weighted_components(rewards, model.contract.attribute_weights).sum(axis=1)


@pytest.mark.parametrize(
    "consume",
    [
        pytest.param(
            lambda model, texts: RewardSource.of(model).score_as_one(texts, texts), id="evaluate"
        ),
        pytest.param(in_trl, id="trl"),
        pytest.param(on_server, id="server"),
        pytest.param(by_components, id="components"),
    ],
)
def test_one_attribute_is_weighed_everywhere_as_in_training(
    consume: Callable[[Any, list[str]], Any],
) -> None:
    model, texts = Harm(), ["a", "bb", ""]
    outputs = torch.from_numpy(model.score_rows(texts).rewards)
    trained = merge_attributes(outputs, model.contract.attribute_weights)
    np.testing.assert_array_equal(np.float32(consume(model, texts)), trained.numpy())


def test_one_reward_of_a_named_attribute_is_taken_as_it_is() -> None:
    rewards = np.array([[0.1, 0.3]], dtype=np.float32)
    assert one_reward(rewards, reward_weights(WEIGHED, "minus"))[0] == rewards[0, 1]
    with pytest.raises(ConfigError, match="got 'helpful', wanted one of sum, minus"):
        reward_weights(WEIGHED, "helpful")
