"""The longest call is estimated from earlier calls."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from time import sleep

import numpy as np
import pytest

from nemo_aligner.serving.engine.batcher import Batcher
from nemo_aligner.serving.engine.pace import ModelPace
from nemo_aligner.serving.engine.rows import Row

FIRST, LEAST, MOST = 1024, 512, 8192


def test_limit_follows_the_median_of_the_last_calls_and_no_outlier() -> None:
    pace = ModelPace(2.0, MOST)
    assert pace.limit == FIRST
    for _ in range(4):
        pace.add(3000, 2.5)
    assert pace.limit == 2400
    # A hiccup of the machine, and calls of few tokens, whose costs are mostly fixed.
    pace.add(3000, 20.0)
    for _ in range(3):
        pace.add(10, 1.0)
    assert pace.limit == 2400
    for _ in range(16):
        pace.add(100, 10.0)
    assert pace.limit == LEAST
    # The model is fast again: calls are measured until calls of all tokens fit.
    count = 0
    while pace.needs(0.01):
        pace.add(100, 0.01)
        count += 1
    assert pace.limit == MOST
    assert 8 <= count <= 16


def test_calls_of_a_fast_model_are_not_measured() -> None:
    pace = ModelPace(1.0, MOST)
    assert pace.needs(0.001)
    pace.add(4, 0.02)
    assert pace.limit == LEAST
    pace.add(512, 0.03)
    assert (pace.limit, pace.needs(0.05), pace.needs(0.07)) == (MOST, False, True)
    unlimited = ModelPace(0.0, MOST)
    assert (unlimited.limit, unlimited.needs(1e9)) == (MOST, False)


def test_calls_of_a_slow_model_take_the_rows_of_the_longest_call() -> None:
    """Shared prefixes count once, in the estimate as in the calls."""
    calls: list[int] = []

    def compute(rows: list[Row]) -> list[np.ndarray]:
        calls.append(len(rows))
        sleep((900 + 100 * len(rows)) / 10_000)
        return [np.zeros((1, 1))] * len(rows)

    prefix = np.arange(900)
    rows = [Row(np.append(prefix, np.full(100, 2000 + n))) for n in range(60)]
    with ThreadPoolExecutor(1) as model:
        batcher = Batcher(lambda taken: model.submit(compute, taken), 100_000, max_call_secs=0.2)
        batcher.submit(rows).result()
        batcher.close()
    # The first two calls begin before any was measured; then about 2,000 tokens fit.
    assert calls[:2] == [1, 1]
    assert max(calls) <= 11, calls
    assert min(calls[2:-1]) >= 4, calls


def test_calls_that_fail_say_nothing_about_the_pace() -> None:
    """They end at once, as if the model could compute calls of any length."""
    calls: list[int] = []

    def compute(rows: list[Row]) -> list[np.ndarray]:
        calls.append(sum(len(row.ids) for row in rows))
        if len(calls) == 1:
            raise ValueError("no number")
        return [np.zeros((1, 1))] * len(rows)

    with ThreadPoolExecutor(1) as model:
        batcher = Batcher(lambda taken: model.submit(compute, taken), 100_000, max_call_secs=0.2)
        with pytest.raises(ValueError, match="no number"):
            batcher.submit([Row.of([1])]).result()
        batcher.submit([Row(np.full(100, n)) for n in range(40)]).result()
        batcher.close()
    assert calls[:2] == [1, 1000]
