"""Numbers of files are read within limits; errors name the location."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nemo_aligner.config.common import MAX_COUNT, read_count, read_number
from nemo_aligner.utils.errors import CheckpointError

NO_COUNTS = [0, -1, MAX_COUNT + 1, 10**5000, 2.0, True, "7", None, [7]]
NO_NUMBERS = [0, 0.0, -1.0, 1e13, float("nan"), float("inf"), 10**400, True, "7", None]


def check_refused(read: Callable[..., object], values: list[Any]) -> None:
    for value in values:
        with pytest.raises(CheckpointError, match=r"^a\.json: key: got .{1,310}, wanted one$"):
            read(value, "a.json: key", "one")


def test_count_read_from_a_file_is_in_its_limits() -> None:
    assert [read_count(value, "key", "a count") for value in (1, 7, MAX_COUNT)] == [1, 7, MAX_COUNT]
    assert read_count(0, "key", "", minimum=0) == 0
    assert read_count(MAX_COUNT + 1, "key", "", maximum=MAX_COUNT + 1) == MAX_COUNT + 1
    with pytest.raises(CheckpointError):
        read_count(5, "key", "", maximum=4)
    check_refused(read_count, NO_COUNTS)


def test_number_read_from_a_file_is_in_its_limits() -> None:
    values = [1, 1e-12, 0.5, 1e12]
    assert [read_number(value, "key", "a number") for value in values] == values
    check_refused(read_number, NO_NUMBERS)
