"""Work that may stand beside other work, and work that must be alone, in the order it came."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import pytest

from nemo_aligner.serving.turns import Turns


class Work:
    """Begins when it is told to, and ends when the test likes."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.futures: dict[str, Future[str]] = {}

    def __call__(self, name: str) -> Callable[[], Future[str]]:
        def begin() -> Future[str]:
            self.begun.append(name)
            self.futures[name] = Future()
            return self.futures[name]

        return begin


def test_what_came_first_is_whole_before_what_must_be_alone() -> None:
    turns, work = Turns(), Work()
    values = [turns.take(work(name), alone=False) for name in ("a", "b")]
    train = turns.take(work("train"), alone=True)
    later = turns.take(work("c"), alone=False)
    again = turns.take(work("train again"), alone=True)
    assert work.begun == ["a", "b"]
    assert turns.is_reserved
    work.futures["a"].set_result("A")
    assert work.begun == ["a", "b"]
    work.futures["b"].set_result("B")
    assert [each.result(0) for each in values] == ["A", "B"]
    assert work.begun == ["a", "b", "train"]
    work.futures["train"].set_result("T")
    assert train.result(0) == "T"
    assert work.begun == ["a", "b", "train", "c"]
    work.futures["c"].set_result("C")
    assert later.result(0) == "C"
    work.futures["train again"].set_result("T")
    assert again.done()
    assert not turns.is_reserved


def test_a_turn_that_fails_or_cannot_begin_ends_and_the_next_comes() -> None:
    turns, work = Turns(), Work()
    failing = turns.take(work("a"), alone=True)

    def refuse() -> Future[str]:
        raise ValueError("closed")

    refused, last = turns.take(refuse, alone=True), turns.take(work("b"), alone=False)
    work.futures["a"].set_exception(KeyError("a"))
    with pytest.raises(KeyError):
        failing.result(0)
    with pytest.raises(ValueError, match="closed"):
        refused.result(0)
    work.futures["b"].set_result("B")
    assert last.result(0) == "B"
