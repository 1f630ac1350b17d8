"""The longest call, estimated from those before it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from time import sleep

import numpy as np

from nemo_aligner.serving.engine.batcher import Batcher
from nemo_aligner.serving.engine.pace import ModelPace
from nemo_aligner.serving.engine.rows import Row

LEAST = 512


def test_limit_follows_the_median_of_the_last_calls_and_no_outlier() -> None:
    pace = ModelPace(2.0)
    assert pace.limit(8192) == 8192
    for _ in range(4):
        pace.note(3000, 2.5)
    assert pace.limit(8192) == 2400
    assert pace.limit(1000) == 1000
    # A hiccup of the machine, and calls of a few tokens, which are mostly fixed costs.
    pace.note(3000, 20.0)
    for _ in range(3):
        pace.note(10, 1.0)
    assert pace.limit(8192) == 2400
    for _ in range(16):
        pace.note(100, 10.0)
    assert pace.limit(8192) == LEAST


def test_limit_is_lifted_once_calls_are_short() -> None:
    pace = ModelPace(1.0)
    assert not pace.notes(0.05)
    assert pace.notes(0.07)
    pace.note(10, 0.07)
    assert pace.limit(8192) == LEAST
    for _ in range(15):
        assert pace.notes(0.001)
        pace.note(10, 0.001)
    assert pace.limit(8192) == 8192
    assert pace.notes(0.001)
    pace.note(10, 0.001)
    assert not pace.notes(0.001)
    assert not ModelPace(0.0).notes(1e9)


def test_calls_of_a_slow_model_take_the_rows_of_the_longest_call() -> None:
    """Prefixes in common count once, in the estimate as in the calls."""
    calls: list[int] = []

    def compute(rows: list[Row]) -> list[np.ndarray]:
        calls.append(len(rows))
        sleep(0.02 * len(rows))  # 200 tokens of their own, or 10,000 tokens/s
        return [np.zeros((1, 1))] * len(rows)

    prefix = np.arange(1000)
    rows = [Row(np.append(prefix, np.full(200, 2000 + n))) for n in range(60)]
    with ThreadPoolExecutor(1) as model:
        batcher = Batcher(lambda taken: model.submit(compute, taken), 100_000, max_call_secs=0.2)
        batcher.submit(rows[:20]).result()  # a call without a limit
        batcher.submit(rows[20:]).result()
        batcher.close()
    assert calls[0] == 20
    # (1,000 + 20 * 200) tokens took 0.4 s or a little more, so 0.2 s are for 1,000 and some 7 rows
    # of 200.
    assert max(calls[1:]) <= 7, calls
    assert min(calls[1:-1]) >= 3, calls
    assert sum(calls) == 60
