"""A step that does not end neither blocks the pool, nor makes other jobs wait."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_aligner.contract.chat_template import ChatTemplate
from nemo_aligner.serving.engine import timed_threads
from nemo_aligner.serving.engine.timed_threads import (
    RunStep,
    ThreadsHangError,
    TimedThreads,
    TooSlowError,
)

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
MESSAGES = [{"role": "user", "content": "a"}]


def alive() -> int:
    return sum(thread.name == "timed" for thread in threading.enumerate())


def wait_until(is_done: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not is_done():
        assert time.monotonic() < end
        time.sleep(0.02)


def loop_forever() -> None:
    while True:
        try:
            for _ in range(1000):
                pass
        except Exception:  # like the code of a template may do
            continue


def job(*steps: Callable[[], Any]) -> Callable[[RunStep], list[Any]]:
    """Run a job of these steps; return their results, or the messages of those too slow."""

    def work(run_step: RunStep) -> list[Any]:
        results = []
        for step in steps:
            try:
                results.append(run_step(step))
            except TooSlowError as error:
                results.append((str(error), error.step))
        return results

    return work


def test_endless_steps_end_and_the_next_ones_of_their_jobs_are_done() -> None:
    async def scenario() -> None:
        threads = TimedThreads(2, "timed", 0.6, "too slow")

        def render_endless() -> str:
            return ChatTemplate(ENDLESS).render(MESSAGES)

        hanging = [
            asyncio.ensure_future(threads.run(job(step, lambda: "next")))
            for step in (loop_forever, render_endless, loop_forever)
        ]
        await asyncio.sleep(0.1)
        # While both threads are blocked, others replace them.
        begun = time.monotonic()
        assert await threads.run(job(lambda: 7)) == [7]
        assert time.monotonic() - begun < 20
        for answer in hanging:
            assert await answer == [("too slow", 0), "next"]
        for number in range(100):
            assert await threads.run(job(lambda n=number: n)) == [number]
        threads.close()

    asyncio.run(scenario())
    wait_until(lambda: alive() == 0)


def test_steps_that_code_in_c_holds_are_answered_and_the_job_of_a_caller_that_left_ends() -> None:
    release, has_ended = threading.Event(), threading.Event()

    async def scenario() -> None:
        threads = TimedThreads(1, "timed", 0.3, "too slow")
        with pytest.raises(TooSlowError) as refused:
            await threads.run(job(lambda: 1, release.wait))
        assert refused.value.step == 1
        done: list[Any] = []

        def work(run_step: RunStep) -> None:
            try:
                run_step(loop_forever)
            finally:
                has_ended.set()

        leaving = asyncio.ensure_future(threads.run(work))
        unwanted = asyncio.ensure_future(threads.run(lambda run_step: done.append(1)))
        await asyncio.sleep(0.1)
        unwanted.cancel()
        leaving.cancel()
        await asyncio.gather(leaving, unwanted, return_exceptions=True)
        with pytest.raises(ValueError, match="a fault"):
            await threads.run(lambda run_step: run_step(int, "a fault"))
        assert await asyncio.to_thread(has_ended.wait, 30)
        assert done == []
        release.set()
        threads.close()

    asyncio.run(scenario())
    wait_until(lambda: alive() == 0)


def test_step_whose_caller_left_runs_to_its_end_if_it_must_not_be_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timed_threads, "_WATCH_SECS", 0.02)
    begun, release, ended, order = threading.Event(), threading.Event(), threading.Event(), []

    def hold() -> None:
        begun.set()
        while not release.is_set():  # in bytecode, where an exception would arrive
            pass
        order.append("released")

    def work(run_step: RunStep) -> None:
        try:
            run_step(hold)
            run_step(order.append, "next step")
        finally:
            ended.set()

    async def scenario() -> None:
        threads = TimedThreads(1, "timed", 30.0, "too slow", interrupts_abandoned=False)
        leaving = asyncio.ensure_future(threads.run(work))
        assert await asyncio.to_thread(begun.wait, 30)
        leaving.cancel()
        await asyncio.sleep(0.1)  # the job is watched meanwhile
        release.set()
        assert await asyncio.to_thread(ended.wait, 30)
        threads.close()

    asyncio.run(scenario())
    assert order == ["released"]
    wait_until(lambda: alive() == 0)


def test_job_that_ends_while_it_is_watched_leaves_the_pool_as_large_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step ends when the watch releases the job's lock, and then the thread is idle."""
    release, loop_thread = threading.Event(), threading.get_ident()
    clock = SimpleNamespace(now=0.0)

    def wait() -> bool:
        clock.now = 1.0  # long enough for a replacement
        return release.wait(30)

    class Watched:
        """The lock of a job whose step ends right after the event loop has released it."""

        def __init__(self) -> None:
            self._lock = threading.Lock()
            self.acquire = self._lock.acquire

        def release(self) -> None:
            self._lock.release()
            if threading.get_ident() == loop_thread:
                release.set()
                time.sleep(0.2)

        def __enter__(self) -> None:
            self.acquire()

        def __exit__(self, *unused: object) -> None:
            self._lock.release()

    monkeypatch.setattr(timed_threads, "Lock", Watched)
    monkeypatch.setattr(timed_threads, "time", SimpleNamespace(monotonic=lambda: clock.now))

    async def scenario() -> None:
        threads = TimedThreads(1, "timed", 60.0, "too slow")
        assert await threads.run(job(wait)) == [True]
        wait_until(lambda: alive() == 1)
        for number in range(3):
            assert await threads.run(job(lambda n=number: n)) == [number]
        assert alive() == 1
        threads.close()

    asyncio.run(scenario())
    wait_until(lambda: alive() == 0)


def test_slow_jobs_run_as_many_at_once_as_there_are_threads() -> None:
    counted, running, most_running = threading.Lock(), 0, 0

    def work(run_step: RunStep) -> None:
        nonlocal running, most_running
        with counted:
            running += 1
            most_running = max(most_running, running)
        run_step(time.sleep, 0.4)
        with counted:
            running -= 1

    async def scenario() -> None:
        threads = TimedThreads(8, "timed", 30.0, "too slow", replaces_slow=False)
        assert alive() == 0
        begun = time.monotonic()
        await asyncio.gather(*(threads.run(work) for _ in range(16)))
        assert time.monotonic() - begun < 4  # one after the other, they take 6.4 s
        assert (most_running, alive()) == (8, 8)
        threads.close()

    asyncio.run(scenario())
    wait_until(lambda: alive() == 0)


def test_calls_are_refused_while_too_many_hang_and_run_again_when_these_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timed_threads, "_GRACE_SECS", 0.1)
    release = threading.Event()

    async def scenario() -> None:
        threads = TimedThreads(2, "timed", 0.1, "too slow", max_replaced=3, replaces_slow=False)
        hanging = [threads.run(lambda run_step: run_step(release.wait)) for _ in range(20)]
        errors = await asyncio.gather(*hanging, return_exceptions=True)
        texts = {str(error) for error in errors}
        assert texts == {"too slow", "4 earlier calls still hang, so no more are made"}
        assert alive() == 4  # two after the other, until at least three hang
        with pytest.raises(ThreadsHangError, match="4 earlier calls still hang"):
            await asyncio.wait_for(threads.run(job(lambda: 1)), 0.1)
        assert threads.problem is not None
        release.set()
        while threads.problem is not None:
            await asyncio.sleep(0.02)
        assert await threads.run(job(lambda: 1)) == [1]
        wait_until(lambda: alive() <= 2)
        threads.close()

    asyncio.run(scenario())
    wait_until(lambda: alive() == 0)


def test_job_for_which_no_thread_can_be_started_fails_and_nothing_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A container limits the number of threads."""
    monkeypatch.setattr(timed_threads, "_GRACE_SECS", 0.1)
    release = threading.Event()

    class Limited(threading.Thread):
        def start(self) -> None:
            if alive() >= 1 and not release.is_set():
                raise RuntimeError("can't start new thread")
            super().start()

    monkeypatch.setattr(timed_threads, "Thread", Limited)

    async def scenario() -> None:
        threads = TimedThreads(2, "timed", 0.6, "too slow")
        hung, waiting = (threads.run(job(release.wait)) for _ in range(2))
        errors = await asyncio.wait_for(
            asyncio.gather(hung, waiting, return_exceptions=True), timeout=20
        )
        none = "no thread can be started (can't start new thread); 1 earlier calls still hang"
        assert [str(error) for error in errors] == ["too slow", none]
        with pytest.raises(ThreadsHangError, match="no thread can be started"):
            await asyncio.wait_for(threads.run(job(lambda: 1)), 1.0)
        release.set()
        assert await threads.run(job(lambda: 1)) == [1]
        threads.close()

    asyncio.run(scenario())
    wait_until(lambda: alive() == 0)
