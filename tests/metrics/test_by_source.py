"""Which sources are reported apart, and in what order."""

from __future__ import annotations

import pytest

from nemo_aligner.metrics.by_source import by_source


@pytest.mark.parametrize(("count", "reported"), [(1, 0), (2, 2), (50, 50), (51, 0)])
def test_two_to_fifty_sources_are_reported_in_the_order_of_their_names(
    count: int, reported: int
) -> None:
    sources = [f"source {number:02d}" for number in reversed(range(count))]
    found = by_source(sources * 2, lambda records: {"last": float(records[-1])})
    wanted = {f"by_source/{name}/last": 2 * count - 1 - i for i, name in enumerate(sorted(sources))}
    assert list(found.items()) == list(wanted.items())[:reported]


def test_a_source_that_is_called_none_is_not_those_without_one() -> None:
    found = by_source(["none", "", ""], lambda records: {"count": float(len(records))})
    assert found == {"by_source/none/count": 1.0, "by_source/(none)/count": 2.0}
