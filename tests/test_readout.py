"""Outputs to rewards: the expected bin, the median, and how sure they are."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nemo_aligner.errors import DataError
from nemo_aligner.readout import Readout

BINS = Readout("bins", ((0.0, 1.0, 4.0), (-1.0, 0.0, 1.0)))
QUANTILES = Readout("quantiles", ((0.1, 0.5, 0.9),) * 2)
OUTPUTS = np.array([[0.0, 0.0, math.log(2), 3.0, 3.0, 3.0], [5.0, 1.0, 2.0, 0.0, 0.5, -1.0]])


def test_bins_give_the_expected_value_and_its_deviation() -> None:
    # Probabilities 1/4, 1/4, 1/2 of the first attribute, thirds of the second.
    rewards, spreads = BINS.rewards(OUTPUTS), BINS.spreads(OUTPUTS)
    assert rewards.dtype == spreads.dtype == np.float32
    np.testing.assert_allclose(rewards[0], [2.25, 0.0], atol=1e-7)
    np.testing.assert_allclose(spreads[0] ** 2, [0.25 + 0.5 * 16 - 2.25**2, 2 / 3], rtol=1e-6)
    powers = [math.exp(value) for value in OUTPUTS[1, :3]]
    assert rewards[1, 0] == pytest.approx((powers[1] + 4 * powers[2]) / sum(powers))


def test_quantiles_give_the_median_and_their_distance_also_where_they_cross() -> None:
    np.testing.assert_array_equal(
        QUANTILES.rewards(OUTPUTS), np.array([[0, 3], [1, 0.5]], np.float32)
    )
    np.testing.assert_allclose(QUANTILES.spreads(OUTPUTS), [[math.log(2), 0], [-3, -1]], rtol=1e-6)


@pytest.mark.parametrize("readout", [BINS, QUANTILES])
def test_a_row_has_the_same_bits_in_any_company(readout: Readout) -> None:
    outputs = np.random.RandomState(0).standard_normal((97, 6)).astype(np.float32)
    together = readout.rewards(outputs)
    alone = np.concatenate([readout.rewards(row[None]) for row in outputs])
    assert together.tobytes() == alone.tobytes()
    assert readout.rewards(outputs[:0]).shape == readout.spreads(outputs[:0]).shape == (0, 2)


def test_large_outputs_stay_finite() -> None:
    assert BINS.rewards(np.full((1, 6), 1e30)).tolist() == [[pytest.approx(5 / 3), 0.0]]
    assert BINS.rewards(np.array([[0, 0, 1e30, -1e30, 0, 1e30]])).tolist() == [[4.0, 1.0]]


@pytest.mark.parametrize("readout", [BINS, QUANTILES])
def test_it_survives_json(readout: Readout) -> None:
    assert Readout.from_json(readout.to_json()) == readout
    assert readout.width == 3


@pytest.mark.parametrize(
    ("kind", "numbers", "message"),
    [
        ("mean", ((0, 1),), "got 'mean', wanted bins or quantiles"),
        ("bins", ((0, 1), (0, 1, 2)), "attributes of different numbers of outputs"),
        ("bins", (), "different numbers"),
        ("bins", ((1,),), r"got \[1\], wanted 2 to 1000 numbers that go up"),
        ("bins", ((1, 1),), "numbers that go up"),
        ("bins", ((0, math.inf),), "numbers that go up"),
        ("quantiles", ((0.1, 0.9),), "with 0.5, which is the reward"),
        ("quantiles", ((0.0, 0.5),), "wanted levels between 0 and 1"),
    ],
)
def test_what_is_no_readout_is_refused(kind: str, numbers: tuple, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Readout(kind, numbers)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"kind": "bins"}', '{"kind": "bins", "numbers": [["x", 1]]}', "1"]
)
def test_a_text_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(DataError, match="readout: got"):
        Readout.from_json(text)
