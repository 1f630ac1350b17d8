"""Files by weights: exact shares of every epoch, each file gone through evenly, by number alone."""

from __future__ import annotations

from collections import Counter

import pytest

from nemo_aligner.data.mixture import EpochOrder, weighted_order
from nemo_aligner.errors import ConfigError

SIZES = (10, 30, 5)


def stream(order: EpochOrder, epochs: int) -> list[int]:
    return [order.record(position) for position in range(epochs * order.size)]


def file_of(record: int) -> int:
    return 0 if record < 10 else 1 if record < 40 else 2


def test_without_weights_an_epoch_has_every_record_once() -> None:
    records = stream(weighted_order(SIZES, 5, ()), 3)
    for epoch in range(3):
        assert sorted(records[45 * epoch :][:45]) == list(range(45))


def test_every_epoch_has_the_share_of_each_file() -> None:
    order = weighted_order(SIZES, 5, (2, 1, 1))
    assert order.shares() == [23, 11, 11]  # of 22.5, 11.25, 11.25
    records = stream(order, 4)
    for epoch in range(4):
        found = Counter(map(file_of, records[45 * epoch :][:45]))
        assert [found[number] for number in range(3)] == order.shares()


def test_a_file_is_gone_through_pass_by_pass() -> None:
    order = weighted_order(SIZES, 5, (2, 1, 1))
    records = stream(order, 10)
    for number, size in enumerate(SIZES):
        found = Counter(record for record in records if file_of(record) == number)
        assert len(found) == size
        assert max(found.values()) - min(found.values()) <= 1


def test_files_are_mixed_and_epochs_differ() -> None:
    order = weighted_order((100, 100), 5, (1, 3))
    records = stream(order, 2)
    assert records[:200] != records[200:]
    firsts = sum(record < 100 for record in records[:100])
    assert 10 < firsts < 40  # of 50 in the epoch


def test_weights_are_in_any_unit_and_rounding_is_shared_out() -> None:
    assert weighted_order(SIZES, 5, (0.2, 0.1, 0.1)).shares() == [23, 11, 11]
    for weights in ((1, 1, 1), (3, 5, 7), (0.31, 0.11, 0.58)):
        assert sum(weighted_order(SIZES, 5, weights).shares()) == 45


@pytest.mark.parametrize(
    ("weights", "message"),
    [((1, 2), "got 2 weights, wanted one for each of the 3"), ((1, 1, 1e-6), "gives file 3 none")],
)
def test_weights_that_do_not_fit_are_refused(weights: tuple[float, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        weighted_order(SIZES, 5, weights)
