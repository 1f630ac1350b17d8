"""Rewards of late against those that the contract was measured on."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_aligner.serving.drift import AttributeDrift, RecentRewards
from tests.serving.fake_server import CONTRACT

MEASURED = CONTRACT.with_statistics([1.0, 0.0], [2.0, 0.5], "held-out pairs")


def rows(*values: float) -> np.ndarray:
    return np.array([[value, 2 * value] for value in values], dtype=np.float32)


def test_mean_and_deviation_are_of_the_last_rows() -> None:
    recent = RecentRewards(3)
    assert recent.drift(None) == []
    recent.add(rows(100, 1))
    recent.add(rows(2, 3))
    first, second = recent.drift(None)
    assert first == AttributeDrift(3, 2.0, pytest.approx(np.std([1, 2, 3])), None, None)
    assert (second.mean, second.rows) == (4.0, 3)


def test_drift_is_in_the_contracts_deviations() -> None:
    recent = RecentRewards(10)
    recent.add(rows(4, 6))
    first, second = recent.drift(MEASURED)
    assert (first.mean_drift, first.std_ratio) == (2.0, 0.5)
    assert (second.mean_drift, second.std_ratio) == (20.0, 4.0)


def test_rows_without_a_reward_do_not_count() -> None:
    recent = RecentRewards(10)
    recent.add(rows(np.nan))
    assert recent.drift(None) == []
    recent.add(np.concatenate([rows(5), rows(np.nan)]))
    assert recent.drift(None)[0].rows == 1


def test_a_contract_without_a_spread_has_no_drift() -> None:
    recent = RecentRewards(10)
    recent.add(rows(4))
    flat = CONTRACT.with_statistics([1.0, 0.0], [0.0, 0.0], "one text")
    for contract in (flat, CONTRACT):
        assert [each.mean_drift for each in recent.drift(contract)] == [None, None]
