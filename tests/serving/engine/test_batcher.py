"""Continuous batching with a fake model, whose calls the test finishes explicitly."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nemo_aligner.serving import backpressure
from nemo_aligner.serving.backpressure import BackpressureLimit
from nemo_aligner.serving.engine.batcher import Batcher
from nemo_aligner.serving.engine.meter import Meter
from nemo_aligner.serving.engine.pace import CallClock
from nemo_aligner.serving.engine.rows import Row
from nemo_aligner.serving.failures import FailureKind, RequestError
from nemo_aligner.utils.errors import ServingError

WAIT_S = 30


class Model:
    """Collects calls; the reward of a token list is its sum."""

    def __init__(self) -> None:
        self.calls: list[list[list[int]]] = []
        self._answers: list[Future[list[np.ndarray]]] = []
        self._came = threading.Condition()

    def __call__(self, rows: Sequence[Row]) -> Future[list[np.ndarray]]:
        answer: Future[list[np.ndarray]] = Future()
        with self._came:
            self.calls.append([row.ids.tolist() for row in rows])
            self._answers.append(answer)
            self._came.notify_all()
        return answer

    def wait_for_calls(self, count: int) -> None:
        with self._came:
            assert self._came.wait_for(lambda: len(self.calls) >= count, WAIT_S), self.calls

    def begin(self, number: int) -> None:
        """Start to compute call ``number``, so that it cannot be cancelled any more."""
        self.wait_for_calls(number + 1)
        assert self._answers[number].set_running_or_notify_cancel()

    def finish(self, number: int) -> None:
        """Finish call ``number``; it fails if it has the token 666."""
        self.wait_for_calls(number + 1)
        token_lists = self.calls[number]
        if any(666 in ids for ids in token_lists):
            self._answers[number].set_exception(ServingError("666"))
        else:
            self._answers[number].set_result([np.array([sum(ids)]) for ids in token_lists])


@pytest.fixture
def model() -> Model:
    return Model()


def rows_of(token_lists: Sequence[Sequence[int]]) -> list[Row]:
    return [*map(Row.of, token_lists)]


def rewards(future: Future[list[np.ndarray]]) -> list[float]:
    return [float(array[0]) for array in future.result(WAIT_S)]


def test_what_calls_took_and_rows_waited_is_counted(model):
    meter = Meter()
    batcher = Batcher(model, tokens_per_call=2, meter=meter)
    first = batcher.submit(rows_of([[1, 2]]))
    model.wait_for_calls(1)
    # Prepared during the first call, and started when that one ends.
    second = batcher.submit(rows_of([[3], [4]]))
    model.wait_for_calls(2)
    time.sleep(0.05)
    for call, future in enumerate((first, second)):
        model.finish(call)
        future.result(WAIT_S)
    counted = meter.statistics()
    assert counted["calls"] == 2
    assert counted["forward_seconds"] >= 0.05
    assert counted["queue_seconds"] >= 0.1  # both rows of the second call waited for the first


def test_call_does_not_last_while_it_waits_for_the_call_of_another_model():
    models, meters, clock = [Model(), Model()], [Meter(), Meter()], CallClock()
    batchers = [
        Batcher(model, tokens_per_call=2, meter=meter, clock=clock)
        for model, meter in zip(models, meters, strict=True)
    ]
    futures = [batcher.submit(rows_of([[1, 2]])) for batcher in batchers]
    for model in models:
        model.wait_for_calls(1)
    time.sleep(0.2)
    first_ends = time.monotonic()
    for model, future in zip(models, futures, strict=True):
        model.finish(0)
        future.result(WAIT_S)
    after_first = time.monotonic() - first_ends
    seconds = [meter.statistics()["forward_seconds"] for meter in meters]
    assert seconds[0] >= 0.2
    assert seconds[1] <= after_first


def test_percentiles_are_of_requests_that_have_rewards() -> None:
    meter = Meter()
    meter.count_answer(1.0, rows=2, tokens=10)
    for _ in range(9):
        meter.count_answer(0.001, rows=0, tokens=0)  # all of its rows were rejected
        meter.count_failure()
    line = meter.take_line(0)
    assert line is not None
    assert line.endswith("0 in the queue | p50 1,000 ms, p99 1,000 ms | 9 refused")


# (tokens per call, first request, requests that come during its call, the calls they make)
CALLS: dict[str, tuple[int, list[list[int]], list[list[list[int]]], list[list[list[int]]]]] = {
    "one call of what came meanwhile": (
        10,
        [[1, 2]],
        [[[3]], [[4]], [[5]]],
        [[[1, 2]], [[3], [4], [5]]],
    ),
    "a large request in its order, before a later one": (
        3,
        [[n] for n in range(8)],
        [[[100]]],
        [[[0], [1], [2]], [[3], [4], [5]], [[6], [7], [100]]],
    ),
    "a row of more tokens than a call": (2, [[1] * 5, [2]], [], [[[1] * 5], [[2]]]),
}


def test_calls_are_made_of_what_waits_and_every_request_has_its_own_rewards():
    for name, (tokens_per_call, first, later, wanted) in CALLS.items():
        model = Model()
        batcher = Batcher(model, tokens_per_call)
        answers = [batcher.submit(rows_of(first))]
        model.wait_for_calls(1)
        answers += [batcher.submit(rows_of(rows)) for rows in later[:1]]
        time.sleep(0.02)  # time for a call that must not begin yet
        answers += [batcher.submit(rows_of(rows)) for rows in later[1:]]
        for call in range(len(wanted)):
            model.finish(call)
        found = [rewards(answer) for answer in answers]
        assert found == [[sum(row) for row in rows] for rows in (first, *later)], name
        assert model.calls == wanted, name
        batcher.close()


def test_a_full_call_is_ready_before_the_running_one_ends_and_a_third_is_not(model):
    batcher = Batcher(model, tokens_per_call=4)
    answers = [batcher.submit(rows_of([[1, 1]]))]
    model.wait_for_calls(1)
    answers += [batcher.submit(rows_of([[n, n]])) for n in range(2, 8)]
    model.wait_for_calls(2)
    assert model.calls[1] == [[2, 2], [3, 3]]
    assert batcher.waiting_rows == 4
    for call in range(4):
        model.finish(call)
    assert [rewards(each) for each in answers] == [[2 * n] for n in range(1, 8)]
    batcher.close()


def test_requests_that_have_to_wait_do_not_wake_the_thread(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wake-up costs a change of threads; only the request that fills a call wakes it."""
    woken: list[None] = []
    batcher = Batcher(model, tokens_per_call=10)
    notify = batcher._changed.notify
    monkeypatch.setattr(batcher._changed, "notify", lambda: (woken.append(None), notify()))
    futures = [batcher.submit(rows_of([[1]]))]
    while not batcher._calls:  # set a moment after the model has the call
        time.sleep(0.001)
    num_woken = len(woken)
    futures += [batcher.submit(rows_of([[2]])) for _ in range(9)]
    assert len(woken) == num_woken
    futures.append(batcher.submit(rows_of([[3]])))
    assert len(woken) == num_woken + 1
    model.wait_for_calls(2)
    for call in range(2):
        model.finish(call)
    assert [rewards(future) for future in futures] == [[1.0], *[[2.0]] * 9, [3.0]]
    batcher.close()


def test_who_makes_a_call_fail_fails_alone(model):
    batcher = Batcher(model, tokens_per_call=100)
    blocker = batcher.submit(rows_of([[0]]))
    model.wait_for_calls(1)
    good, bad, other = (batcher.submit(rows_of(rows)) for rows in ([[1], [2]], [[3], [666]], [[4]]))
    for call in range(5):
        model.finish(call)
    assert rewards(blocker) == [0]
    assert rewards(good) == [1, 2]
    assert rewards(other) == [4]
    with pytest.raises(ServingError, match="666"):
        bad.result(WAIT_S)
    assert model.calls[2:] == [[[1], [2]], [[3], [666]], [[4]]]
    batcher.close()


def test_close_waits_for_the_retries_of_a_call_that_is_just_failing(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_failing, may_fail = threading.Event(), threading.Event()
    fail = Batcher._fail

    def fail_later(*arguments: Any) -> None:
        is_failing.set()
        assert may_fail.wait(WAIT_S)
        fail(*arguments)

    batcher = Batcher(model, tokens_per_call=100)
    batcher.submit(rows_of([[0]]))
    model.wait_for_calls(1)
    good, bad = batcher.submit(rows_of([[1]])), batcher.submit(rows_of([[666]]))
    model.finish(0)
    model.wait_for_calls(2)
    with monkeypatch.context() as patches:
        patches.setattr(Batcher, "_fail", fail_later)
        finishing = threading.Thread(target=model.finish, args=(1,))
        finishing.start()
        assert is_failing.wait(WAIT_S)
    closing = threading.Thread(target=batcher.close)
    closing.start()
    closing.join(0.2)
    may_fail.set()
    for call in (2, 3):
        model.finish(call)
    assert rewards(good) == [1]
    with pytest.raises(ServingError, match="666"):
        bad.result(WAIT_S)
    for thread in (finishing, closing):
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_the_rest_of_a_request_that_failed_is_not_scored(model):
    batcher = Batcher(model, tokens_per_call=1)
    bad = batcher.submit(rows_of([[666], [1], [2], [3]]))
    good = batcher.submit(rows_of([[5]]))
    model.finish(0)
    with pytest.raises(ServingError, match="666"):
        bad.result(WAIT_S)
    number = 1
    while not good.done():
        model.finish(number)
        number += 1
    assert rewards(good) == [5]
    # One more row of it was in the prepared call.
    assert model.calls == [[[666]], [[1]], [[5]]]
    batcher.close()


def test_a_model_that_refuses_to_begin_is_an_error_of_its_call():
    def broken(rows: Sequence[Row]) -> Any:
        raise RuntimeError("no thread")

    batcher = Batcher(broken, tokens_per_call=100)
    with pytest.raises(RuntimeError, match="no thread"):
        batcher.submit(rows_of([[1]])).result(WAIT_S)
    batcher.close()


def test_call_with_a_wrong_number_of_arrays_is_an_error_of_its_requests() -> None:
    def compute(rows: Sequence[Row]) -> Future[list[np.ndarray]]:
        answer: Future[list[np.ndarray]] = Future()
        answer.set_result([np.zeros(1)] * (len(rows) + 1))
        return answer

    batcher = Batcher(compute, tokens_per_call=100)
    answers = [batcher.submit(rows_of([[1], [2]])) for _ in range(2)]
    for answer in answers:
        with pytest.raises(ServingError, match=r"the model returned 3 arrays for 2 rows"):
            answer.result(WAIT_S)
    batcher.close()


def test_request_without_rows_tells_nothing_about_the_rate_of_a_full_queue() -> None:
    limit = BackpressureLimit(4, "server.max_queue_rows", "harmless")
    with limit.admit(0):
        pass
    with limit.admit(4):
        full = pytest.raises(
            RequestError, match=r"of harmless is full: 4 rows are.* allows 4; retry after 1 s"
        )
        with full as refusal, limit.admit(1):
            pass
        assert (refusal.value.kind, refusal.value.retry_after_s) == (FailureKind.busy, 1)


def test_wait_for_a_full_queue_follows_the_rows_over_time_and_ends_in_half_a_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lone row that took a minute does not mean that a thousand take hours."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(backpressure, "time", SimpleNamespace(monotonic=lambda: clock.now))
    limit = BackpressureLimit(1000, "gateway.max_queue_rows", "judged")

    def wait_if_full(seconds: float) -> Any:
        """Return how long a row is told to wait behind 1000 rows, which take ``seconds``."""
        with limit.admit(1000):
            with pytest.raises(RequestError) as refusal, limit.admit(1):
                pass
            clock.now += seconds
        return refusal.value.retry_after_s

    with limit.admit(1):
        clock.now += 60
    assert wait_if_full(seconds=10) == 30
    assert wait_if_full(seconds=10) == 20
    clock.now += 9999  # idle
    assert [wait_if_full(seconds=10) for _ in range(3)] == [14, 12, 11]
    with suppress(KeyError), limit.admit(1):
        clock.now += 99999
        raise KeyError
    assert wait_if_full(seconds=10) == 30


def test_a_close_scores_what_waits_and_refuses_what_comes(model):
    batcher = Batcher(model, tokens_per_call=1)
    answers = [batcher.submit(rows_of([[n]])) for n in range(3)]
    closing = threading.Thread(target=batcher.close)
    closing.start()
    for call in range(3):
        model.finish(call)
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert [rewards(each) for each in answers] == [[0], [1], [2]]
    with pytest.raises(ServingError, match="stopping"):
        batcher.submit(rows_of([[1]]))


def test_rows_that_nobody_waits_for_do_not_delay_a_live_request(model):
    batcher = Batcher(model, tokens_per_call=2)
    gone = batcher.submit(rows_of([[n] for n in range(64)]))
    model.begin(0)
    model.wait_for_calls(2)
    live = batcher.submit(rows_of([[100]]))
    assert batcher.waiting_rows == 61
    assert gone.cancel()
    # Neither waiting rows nor those of the prepared call are computed.
    assert batcher.waiting_rows <= 1
    model.finish(0)
    model.finish(2)
    assert rewards(live) == [100]
    assert model.calls == [[[0], [1]], [[2], [3]], [[100]]]
    assert not live.cancel()
    batcher.close()


def test_request_that_is_cancelled_while_its_call_runs_is_not_tried_again(model):
    batcher = Batcher(model, tokens_per_call=100)
    blocker = batcher.submit(rows_of([[0]]))
    model.wait_for_calls(1)
    bad, gone, live = (batcher.submit(rows_of([[n]])) for n in (666, 1, 2))
    model.finish(0)
    model.begin(1)
    assert gone.cancel()
    for call in (1, 2, 3):
        model.finish(call)
    assert (rewards(blocker), rewards(live)) == ([0], [2])
    with pytest.raises(ServingError, match="666"):
        bad.result(WAIT_S)
    assert model.calls[1:] == [[[666], [1], [2]], [[666]], [[2]]]
    batcher.close()


def test_many_threads_get_their_own_rewards_while_others_cancel():
    """The model runs in another thread, and requests have all sizes."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as thread, ThreadPoolExecutor(8) as askers:

        def compute(rows: Sequence[Row]) -> list[np.ndarray]:
            assert sum(len(row.ids) for row in rows) <= 50 or len(rows) == 1
            return [np.array([row.ids.sum()]) for row in rows]

        batcher = Batcher(lambda rows: thread.submit(compute, rows), tokens_per_call=50)

        def ask(seed: int) -> bool:
            draw = random.Random(seed)
            # No two of them share a prefix.
            lists = [
                [9 * seed + row] + [1] * draw.randint(0, 29) for row in range(draw.randint(1, 9))
            ]
            answer = batcher.submit(rows_of(lists))
            if seed % 3 == 0:
                time.sleep(draw.random() / 500)
                if answer.cancel():
                    return True
            return rewards(answer) == [sum(ids) for ids in lists]

        assert all(askers.map(ask, range(500)))
        batcher.close()
        assert batcher.waiting_rows == 0
