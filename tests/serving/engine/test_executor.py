"""Ranks that score together, without a server: they stay in step, or all notice a failure."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
import pytest

from nemo_aligner.serving.engine import executor as ranks_module
from nemo_aligner.serving.engine.batcher import Batcher
from nemo_aligner.serving.engine.executor import Launch, ModelRanks, RanksLostError
from nemo_aligner.serving.engine.meter import Meter
from nemo_aligner.serving.engine.rows import Row
from nemo_aligner.serving.engine.running_calls import LongOperation, RunningCalls
from nemo_aligner.utils.errors import CheckpointError, ServingError
from nemo_aligner.utils.host_transfer import Arriving
from tests.harness import tiny
from tests.serving.engine.forked_ranks import led


def total(token_lists: list[list[int]]) -> np.ndarray:
    if token_lists == [[666]]:
        raise RuntimeError("no such token")
    if token_lists == [[777]]:
        raise CheckpointError("rm.nemo: the disk is full")
    return np.array([[sum(ids)] for ids in token_lists], dtype=np.float32)


def test_one_rank_alone_outlives_an_error(caplog: pytest.LogCaptureFixture) -> None:
    forgotten: list[None] = []
    ranks = ModelRanks({"score": total}, lambda: forgotten.append(None))
    assert (ranks.rank, ranks.world_size) == (0, 1)
    with led(ranks):
        assert ranks.execute("score", [[1, 2], [3]]).tolist() == [[3], [3]]
        with pytest.raises(ServingError, match=r"^RuntimeError: no such token$"):
            ranks.execute("score", [[666]])
        assert len(forgotten) == 1
        assert ranks.failure is None
        assert ranks.execute("score", [[4]]).tolist() == [[4]]
        with pytest.raises(ServingError, match=r"^CheckpointError: rm\.nemo: the disk is full$"):
            ranks.execute("score", [[777]])
    ranks.stop()
    # Only an error that no user can act on is logged with its traceback.
    assert [(record.getMessage(), bool(record.exc_info)) for record in caplog.records] == [
        ("rank 0 could not score: no such token", True),
        ("rank 0 could not score: rm.nemo: the disk is full", False),
    ]


def test_a_device_that_is_lost_is_a_rank_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some CUDA errors, every later call on the device raises the same error."""

    def raise_again() -> None:
        raise RuntimeError("CUDA error: an illegal memory access\nwas encountered")

    device = ModelRanks({"score": total})
    monkeypatch.setattr(ranks_module, "wait_for_device", raise_again)
    with led(device):
        assert device.execute("score", [[4]]).tolist() == [[4]]
        with pytest.raises(RanksLostError, match=r"illegal memory access$"):
            device.execute("score", [[666]])
        with pytest.raises(RanksLostError, match="the device of rank 0 is lost"):
            device.execute("score", [[4]])
    device.stop()


def test_calls_of_all_threads_are_computed_where_they_are_led_until_that_fails() -> None:
    threads = set()

    def score(token_lists: list[list[int]]) -> np.ndarray:
        threads.add(threading.current_thread())
        return total(token_lists)

    ranks = ModelRanks({"score": score})

    def drive() -> None:
        askers = [threading.Thread(target=ranks.execute, args=["score", [[n]]]) for n in range(4)]
        for asker in askers:
            asker.start()
        for asker in askers:
            asker.join()
        raise ServingError("no port")

    with pytest.raises(ServingError, match="no port"):
        ranks.run_leader(drive)
    ranks.stop()
    assert threads == {threading.current_thread()}


def test_what_is_lost_is_told_to_whoever_waits_and_whoever_comes() -> None:
    started, may_end = threading.Event(), threading.Event()

    def score(token_lists: list[list[int]]) -> np.ndarray:
        started.set()
        may_end.wait(30)
        return total(token_lists)

    ranks = ModelRanks({"score": score})
    said = []
    with led(ranks):

        def ask() -> None:
            try:
                ranks.execute("score", [[1]])
            except ServingError as error:
                said.append(str(error))

        waiting = threading.Thread(target=ask)
        waiting.start()
        assert started.wait(30)
        ranks.fail("a rank died")
        ranks.fail("another one, too")
        waiting.join(30)
        assert not waiting.is_alive()
        assert said == ["a rank died"]
        assert ranks.failure == "a rank died"
        with pytest.raises(ServingError, match=r"^a rank died$"):
            ranks.execute("score", [[2]])
        may_end.set()
    ranks.stop()


def test_call_that_hangs_loses_the_ranks_but_training_may_take_any_time() -> None:
    may_end = threading.Event()
    operations = {"score": may_end.wait, "train": LongOperation(time.sleep)}
    ranks = ModelRanks(operations, max_stuck_secs=0.5)
    with led(ranks):
        training = ranks.submit("train", 1.0)
        while not training.done():
            assert ranks.running.find_delay() is None
            time.sleep(0.02)
        assert training.result() is None
        hung, waiting = ranks.submit("score"), ranks.submit("train", 0.0)
        delays = set()
        while not hung.done():
            delays.add(ranks.running.find_delay())
            time.sleep(0.02)
        for answer in (hung, waiting):
            with pytest.raises(
                RanksLostError, match=r"^the model hangs: a call has not ended \(sc"
            ):
                answer.result(30)
        assert ranks.failure is not None
        assert {delay and delay[:22] for delay in delays} == {None, "the model may hang: a "}
        may_end.set()
    ranks.stop()


def test_time_of_a_call_begins_when_the_one_in_front_of_it_ends() -> None:
    calls, first, second = RunningCalls(100.0), Future[Any](), Future[Any]()
    calls.begin(first, "a", is_long=False)
    calls.begin(second, "b", is_long=False)
    time.sleep(0.3)
    assert calls.first is not None
    assert calls.first.seconds >= 0.3
    calls.end(first)
    assert calls.first is not None
    assert (calls.first.operation, calls.first.seconds < 0.2) == ("b", True)
    calls.end(second)
    assert calls.first is None


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The outcome of each scenario of ``forked_ranks.py``."""
    folder = tmp_path_factory.mktemp("ranks")
    # The ranks connect on this machine, whatever its host name resolves to.
    env = {"GLOO_SOCKET_IFNAME": "lo"}
    script = "tests/serving/engine/forked_ranks.py"
    done = tiny.run_script(script, str(folder), timeout=120, env=env)
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_two_ranks_hear_the_same_and_outlive_an_error_that_both_have(pairs: dict) -> None:
    found = pairs["together"]
    assert found["leader"] == {
        "first": [[6], [4], [11]],
        "error": "rank 0: RuntimeError: rank 0\ncannot; rank 1: RuntimeError: rank 1\ncannot",
        "second": [[7]],
        "failure": None,
    }
    assert found["follower"]["heard"] == [[[1, 2, 3], [4], [5, 6]], [[666]], [], [[7]]]
    assert found["codes"] == [0, 0]


def test_two_ranks_begin_a_call_while_their_devices_compute_the_one_before(pairs: dict) -> None:
    """If a call fails, the calls that were begun behind it fail, too, and are begun again."""
    found = pairs["launched"]
    error = "rank 0: RuntimeError: rank 0\ncannot; rank 1: RuntimeError: rank 1\ncannot"
    assert found["leader"] == {"found": [[[1]], [[2]], error, [[3]], [[4]]], "failure": None}
    assert found["follower"]["heard"] == [[[1]], [[2]], [[666]], [[3]], [], [[3]], [[4]]]
    assert found["codes"] == [0, 0]
    # If only one rank fails to begin a call, and another call is behind it, the ranks diverge.
    apart = pairs["launched_alone"]
    failure = "only some ranks could launch: rank 1: RuntimeError: rank 1\ncannot"
    assert apart["leader"] == {"found": [failure, failure], "failure": failure}
    assert apart["codes"] == [0, 1]


def test_call_of_a_batcher_does_not_last_while_it_waits_for_another_operation() -> None:
    submitted = threading.Event()

    def train() -> None:
        assert submitted.wait(30)
        time.sleep(0.5)

    ranks, meter = ModelRanks({"train": LongOperation(train), "score": _score_rows}), Meter()
    with led(ranks):
        ranks.submit("train")
        batcher = Batcher(partial(ranks.submit, "score"), 8, meter, clock=ranks.clock)
        scored = batcher.submit([Row.of([1, 2])])
        submitted.set()
        (rewards,) = scored.result(30)
        batcher.close()
    ranks.stop()
    assert rewards == [3]
    counted = meter.statistics()
    assert counted["queue_seconds"] > 0.4
    assert counted["forward_seconds"] < 0.3
    # The next requests must not be waited for as after a call of 0.5 s.
    assert batcher._last_seconds < 0.3


def _score_rows(rows: list[Row]) -> list[np.ndarray]:
    return [np.array([row.ids.sum()]) for row in rows]


def test_one_rank_begins_what_waits_while_its_device_computes() -> None:
    order: list[str] = []
    done = threading.Event()

    def begin(name: str) -> Arriving[str]:
        order.append(f"begin {name}")

        def wait() -> str:
            done.wait(30)
            order.append(f"end {name}")
            return name

        return Arriving(done.is_set, wait)

    ranks = ModelRanks({"launch": Launch(begin), "plain": order.append})
    with led(ranks):
        first = ranks.submit("launch", "a")
        while not order:
            time.sleep(0.001)
        second, plain = ranks.submit("launch", "b"), ranks.submit("plain", "alone")
        while len(order) < 2:
            time.sleep(0.001)
        assert not first.done()
        done.set()
        assert (first.result(), second.result(), plain.result()) == ("a", "b", None)
    ranks.stop()
    # A plain operation may use what a launched one uses, so it waits for it.
    assert order == ["begin a", "begin b", "end a", "end b", "alone"]


def test_a_rank_that_is_lost_ends_all_while_it_scores_and_while_nobody_asks(pairs: dict) -> None:
    apart = ("a rank died or froze: ", "the ranks lost each other: ")
    for scenario, why, code in (
        ("second_dies", apart, 9),
        ("second_fails_alone", apart, 1),
        ("first_fails_alone", ("rank 0 failed alone: RuntimeError: rank 0",), 1),
    ):
        found = pairs[scenario]
        leader = found["leader"]
        assert leader["first"] == [[1]], scenario
        assert leader["failure"].startswith(why), scenario
        assert "\n" not in leader["failure"] or scenario == "first_fails_alone"
        assert leader["second"] == leader["failure"], scenario
        assert isinstance(leader["error"], str), scenario
        assert leader["seconds"] < 15, scenario
        assert found["codes"] == [0, code], scenario
    second, first = pairs["second_dies_idle"], pairs["first_dies_idle"]
    assert second["leader"]["failure"].startswith("a rank died or froze: ")
    assert first["leader"] == {"first": [[1]]}
    assert (second["codes"], first["codes"]) == ([0, 9], [0, 1])
