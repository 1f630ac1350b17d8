"""Continuous batching, in front of a model that the test lets go on when it likes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from nemo_aligner.errors import ServingError
from nemo_aligner.serving.batcher import Batcher
from nemo_aligner.serving.meter import Meter

WAIT_S = 30


class Model:
    """Collects calls; the reward of a token list is its sum."""

    def __init__(self) -> None:
        self.calls: list[list[list[int]]] = []
        self._answers: list[Future[np.ndarray]] = []
        self._came = threading.Condition()

    def __call__(self, token_lists: Sequence[np.ndarray]) -> Future[np.ndarray]:
        answer: Future[np.ndarray] = Future()
        with self._came:
            self.calls.append([list(ids) for ids in token_lists])
            self._answers.append(answer)
            self._came.notify_all()
        return answer

    def wait_for_calls(self, count: int) -> None:
        with self._came:
            assert self._came.wait_for(lambda: len(self.calls) >= count, WAIT_S), self.calls

    def finish(self, number: int) -> None:
        """Answer call ``number``; a token 666 in it fails it."""
        self.wait_for_calls(number + 1)
        token_lists = self.calls[number]
        if any(666 in ids for ids in token_lists):
            self._answers[number].set_exception(ServingError("666"))
        else:
            rewards = np.array([[sum(ids)] for ids in token_lists], dtype=np.float32)
            self._answers[number].set_result(rewards)


@pytest.fixture
def model() -> Model:
    return Model()


def rewards(future: Future[np.ndarray]) -> list[float]:
    return future.result(WAIT_S)[:, 0].tolist()


def test_what_calls_took_and_rows_waited_is_counted(model):
    meter = Meter()
    batcher = Batcher(model, tokens_per_call=2, meter=meter)
    first = batcher.submit([[1, 2]])
    model.wait_for_calls(1)
    second = batcher.submit([[3], [4]])  # made ready beside the first, and begins as that ends
    model.wait_for_calls(2)
    time.sleep(0.05)
    for call, future in enumerate((first, second)):
        model.finish(call)
        future.result(WAIT_S)
    counted = meter.statistics()
    assert counted["calls"] == 2
    assert counted["forward_seconds"] >= 0.05
    assert counted["queue_seconds"] >= 0.1  # both rows of the second waited for the first


def test_a_free_model_scores_at_once_and_what_comes_meanwhile_is_the_next_call(model):
    batcher = Batcher(model, tokens_per_call=10)
    first = batcher.submit([[1, 2]])
    model.wait_for_calls(1)
    later = [batcher.submit([[n]]) for n in range(3, 6)]
    assert batcher.waiting_rows == 3
    model.finish(0)
    assert rewards(first) == [3]
    model.finish(1)
    assert [rewards(each) for each in later] == [[3], [4], [5]]
    assert model.calls == [[[1, 2]], [[3], [4], [5]]]
    batcher.close()


def test_a_full_call_is_ready_before_the_running_one_ends_and_a_third_is_not(model):
    batcher = Batcher(model, tokens_per_call=4)
    answers = [batcher.submit([[1, 1]])]
    model.wait_for_calls(1)
    answers += [batcher.submit([[n, n]]) for n in range(2, 8)]
    model.wait_for_calls(2)
    assert model.calls[1] == [[2, 2], [3, 3]]
    assert batcher.waiting_rows == 4
    for call in range(4):
        model.finish(call)
    assert [rewards(each) for each in answers] == [[2 * n] for n in range(1, 8)]
    assert [len(call) for call in model.calls] == [1, 2, 2, 2]
    batcher.close()


def test_a_large_request_is_split_and_its_rewards_are_in_its_order(model):
    batcher = Batcher(model, tokens_per_call=3)
    large = batcher.submit([[n] for n in range(8)])
    small = batcher.submit([[100]])
    for call in range(3):
        model.finish(call)
    assert rewards(large) == list(range(8))
    assert rewards(small) == [100]
    assert model.calls == [[[0], [1], [2]], [[3], [4], [5]], [[6], [7], [100]]]
    batcher.close()


def test_a_row_of_more_tokens_than_a_call_is_a_call(model):
    batcher = Batcher(model, tokens_per_call=2)
    answer = batcher.submit([[1] * 5, [2]])
    model.finish(0)
    model.finish(1)
    assert rewards(answer) == [5, 2]
    batcher.close()


def test_who_makes_a_call_fail_fails_alone(model):
    batcher = Batcher(model, tokens_per_call=100)
    blocker = batcher.submit([[0]])
    model.wait_for_calls(1)
    good, bad, other = (batcher.submit(rows) for rows in ([[1], [2]], [[3], [666]], [[4]]))
    for call in range(5):
        model.finish(call)
    assert rewards(blocker) == [0]
    assert rewards(good) == [1, 2]
    assert rewards(other) == [4]
    with pytest.raises(ServingError, match="666"):
        bad.result(WAIT_S)
    assert model.calls[2:] == [[[1], [2]], [[3], [666]], [[4]]]
    batcher.close()


def test_the_rest_of_a_request_that_failed_is_not_scored(model):
    batcher = Batcher(model, tokens_per_call=1)
    bad = batcher.submit([[666], [1], [2], [3]])
    good = batcher.submit([[5]])
    model.finish(0)
    with pytest.raises(ServingError, match="666"):
        bad.result(WAIT_S)
    number = 1
    while not good.done():
        model.finish(number)
        number += 1
    assert rewards(good) == [5]
    # One more row of it was in the call that stood ready.
    assert model.calls == [[[666]], [[1]], [[5]]]
    batcher.close()


def test_an_answer_that_nobody_waits_for_any_more_harms_nobody(model):
    batcher = Batcher(model, tokens_per_call=100)
    left = batcher.submit([[1]])
    model.wait_for_calls(1)
    assert not left.cancel()
    stays = batcher.submit([[2]])
    model.finish(0)
    model.finish(1)
    assert rewards(stays) == [2]
    batcher.close()


def test_a_model_that_refuses_to_begin_is_an_error_of_its_call():
    def broken(token_lists: Sequence[np.ndarray]) -> Any:
        raise RuntimeError("no thread")

    batcher = Batcher(broken, tokens_per_call=100)
    with pytest.raises(RuntimeError, match="no thread"):
        batcher.submit([[1]]).result(WAIT_S)
    batcher.close()


def test_a_close_scores_what_waits_and_refuses_what_comes(model):
    batcher = Batcher(model, tokens_per_call=1)
    answers = [batcher.submit([[n]]) for n in range(3)]
    closing = threading.Thread(target=batcher.close)
    closing.start()
    for call in range(3):
        model.finish(call)
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert [rewards(each) for each in answers] == [[0], [1], [2]]
    with pytest.raises(ServingError, match="stopping"):
        batcher.submit([[1]])


def test_many_threads_get_their_own_rewards():
    """A model in a thread of its own, and askers of every size."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as thread, ThreadPoolExecutor(8) as askers:

        def score(token_lists: Sequence[np.ndarray]) -> np.ndarray:
            assert sum(map(len, token_lists)) <= 50 or len(token_lists) == 1
            return np.array([[sum(ids)] for ids in token_lists], dtype=np.float32)

        batcher = Batcher(lambda lists: thread.submit(score, lists), tokens_per_call=50)

        def ask(seed: int) -> bool:
            draw = random.Random(seed)
            # No two begin alike.
            lists = [
                [9 * seed + row] + [1] * draw.randint(0, 29) for row in range(draw.randint(1, 9))
            ]
            return rewards(batcher.submit(lists)) == [sum(ids) for ids in lists]

        assert all(askers.map(ask, range(500)))
        batcher.close()
