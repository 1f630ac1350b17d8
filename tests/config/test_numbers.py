"""A number, or an error that says where it was read."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_aligner.config.numbers import MOST, read_count, read_number
from nemo_aligner.errors import CheckpointError


@pytest.mark.parametrize("value", [1, 7, MOST])
def test_a_count_is_what_was_read(value: int) -> None:
    assert read_count(value, "key", "a count") == value


@pytest.mark.parametrize(
    "value",
    [0, -1, MOST + 1, 10**5000, 2.0, True, "7", None, [7]],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_count_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^a\.json: key: got .{1,310}, wanted a count$"):
        read_count(value, "a.json: key", "a count")


def test_a_count_has_the_limits_that_were_asked_for() -> None:
    assert read_count(0, "key", "", least=0) == 0
    assert read_count(MOST + 1, "key", "", most=MOST + 1) == MOST + 1
    with pytest.raises(CheckpointError):
        read_count(5, "key", "", most=4)


@pytest.mark.parametrize("value", [1, 1e-12, 0.5, 1e12])
def test_a_number_is_what_was_read(value: float) -> None:
    assert read_number(value, "key", "a number") == value


@pytest.mark.parametrize(
    "value",
    [0, 0.0, -1.0, 1e13, float("nan"), float("inf"), 10**400, True, "7", None],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"^key: got .{1,310}, wanted a number$"):
        read_number(value, "key", "a number")
