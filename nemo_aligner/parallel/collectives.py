"""The few collectives on Python objects and flags that the package needs beside Megatron's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from nemo_aligner.processes import is_main
from nemo_aligner.transfer import to_device

T = TypeVar("T")
_FIRST_WAIT_S = 0.01
_LONGEST_WAIT_S = 1.0


def barrier() -> None:
    dist.barrier()


def broadcast_object(value: T) -> T:
    """Rank 0's ``value``, on every rank."""
    box: list[Any] = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gather_objects(value: T) -> list[T]:
    """Every rank's ``value``, in rank order, on every rank."""
    box: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(box, value)
    return box


def agree(flag: bool, device: torch.device | str) -> bool:
    """Whether ``flag`` is set on any rank; the same answer on all of them."""
    return agree_on([flag], device)[0]


def agree_on(flags: Sequence[bool], device: torch.device | str) -> list[bool]:
    """Which of ``flags`` are set on any rank, in one collective."""
    if dist.get_world_size() == 1:
        return list(flags)
    box = to_device(torch.tensor([int(flag) for flag in flags]), device)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return [bool(value) for value in box.tolist()]


def on_main(function: Callable[[], T]) -> T:
    """Run ``function`` on rank 0 and give its result, or raise its error, on every rank."""
    outcome: tuple[T | None, Exception | None] = (None, None)
    if is_main():
        outcome = _attempt(function)
    if dist.is_initialized():
        outcome = broadcast_object(outcome)
    return _result(outcome)


def run_on_some(function: Callable[[], T] | None) -> list[T | None]:
    """Run ``function`` on the ranks that have one; what it gave on every rank, in rank order.

    The others wait in short collectives, as none may wait for one as long as the work may take. It
    runs in a thread, and must not call any itself. An error on one rank is raised on all.
    """
    if not dist.is_initialized():
        return [None if function is None else function()]
    box: list[tuple[T | None, Exception | None]] = []
    if function is None:
        box.append((None, None))
    else:
        work = partial(_attempt, function)
        Thread(target=lambda: box.append(work()), daemon=True).start()
    wait = _FIRST_WAIT_S
    while True:
        outcomes = gather_objects(box[0] if box else None)
        failed = [each for each in outcomes if each is not None and each[1] is not None]
        if failed or None not in outcomes:
            return [_result(each) for each in (failed or outcomes) if each is not None]
        time.sleep(wait)
        wait = min(2 * wait, _LONGEST_WAIT_S)


def _attempt(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return function(), None
    except Exception as error:
        return None, error


def _result(outcome: tuple[T | None, Exception | None]) -> T:
    value, error = outcome
    if error is not None:
        raise error
    return value  # type: ignore[return-value]
