"""Pairs of ranks without a server: ``forked_ranks.py FOLDER`` prints the outcome of scenarios.

The reward of a token list is its sum, of which every rank computes a part. Special ids: 666 fails
on both ranks, 667 kills the second, 668 fails only on the second, 669 only on the first.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from nemo_aligner.serving.engine.executor import Launch, ModelRanks
from nemo_aligner.utils.errors import ServingError
from nemo_aligner.utils.host_transfer import Arriving

HEARTBEAT_SECS, TIMEOUT_SECS, LAUNCHED_SECS = 0.1, 2.0, 0.2


# What a rank records when its cache is reset.
FORGOT: list[list[int]] = []


def make_score(rank: int, heard: list[list[list[int]]]) -> Callable[[list[list[int]]], Any]:
    def score(token_lists: list[list[int]]) -> np.ndarray:
        heard.append([list(map(int, ids)) for ids in token_lists])
        mark = token_lists[0][0]
        if mark == 666 or mark == 668 + (1 - rank):
            raise RuntimeError(f"rank {rank}\ncannot")
        if mark == 667 and rank == 1:
            os._exit(9)
        rewards = torch.tensor([float(sum(ids[rank::2])) for ids in token_lists])
        dist.all_reduce(rewards)
        return rewards.unsqueeze(1).numpy()

    return score


def make_launch(rank: int, heard: list[list[list[int]]]) -> Callable[[list[list[int]]], Any]:
    def begin(token_lists: list[list[int]]) -> Arriving[np.ndarray]:
        heard.append(token_lists)
        mark, begun = token_lists[0][0], time.monotonic()
        if mark == 668 and rank == 1:
            raise RuntimeError(f"rank {rank}\ncannot")

        def wait() -> np.ndarray:
            time.sleep(max(0.0, begun + LAUNCHED_SECS - time.monotonic()))
            if mark == 666:
                raise RuntimeError(f"rank {rank}\ncannot")
            return np.array([[float(sum(ids))] for ids in token_lists])

        return Arriving(lambda: time.monotonic() > begun + LAUNCHED_SECS, wait)

    return begin


@contextmanager
def led(ranks: ModelRanks) -> Iterator[None]:
    """Run the leader's calls in a thread, which may hang in a failing one."""
    done = threading.Event()
    threading.Thread(target=ranks.run_leader, args=[done.wait], daemon=True).start()
    try:
        yield
    finally:
        done.set()


def attempt(ranks: ModelRanks, token_lists: list[list[int]]) -> Any:
    try:
        return ranks.execute("score", token_lists).tolist()
    except ServingError as error:
        return str(error)


def work_together(ranks: ModelRanks) -> dict[str, Any]:
    found = {"first": attempt(ranks, [[1, 2, 3], [4], [5, 6]]), "error": attempt(ranks, [[666]])}
    time.sleep(1.5 * TIMEOUT_SECS)  # no calls for longer than a rank may be silent
    found["second"] = attempt(ranks, [[7]])
    found["failure"] = ranks.failure
    ranks.stop()
    return found


def meet(mark: int) -> Callable[[ModelRanks], dict[str, Any]]:
    def run(ranks: ModelRanks) -> dict[str, Any]:
        start = time.monotonic()
        found = {"first": attempt(ranks, [[1]]), "error": attempt(ranks, [[mark]])}
        found["seconds"] = time.monotonic() - start
        found["second"], found["failure"] = attempt(ranks, [[7]]), ranks.failure
        if mark == 667:
            ranks.stop()  # does not wait for a dead rank
        return found

    return run


def launch(*marks: int) -> Callable[[ModelRanks], dict[str, Any]]:
    """Start calls before the device has finished the first one."""

    def run(ranks: ModelRanks) -> dict[str, Any]:
        answers = [ranks.submit("launch", [[mark]]) for mark in marks]
        errors = [answer.exception() for answer in answers]
        found = [
            str(error) if error else answer.result().tolist()
            for error, answer in zip(errors, answers, strict=True)
        ]
        ranks.stop()
        return {"found": found, "failure": ranks.failure}

    return run


def notice_in_idleness(ranks: ModelRanks) -> dict[str, Any]:
    """The second rank dies while there are no calls."""
    end = time.monotonic() + 15
    while ranks.failure is None and time.monotonic() < end:
        time.sleep(0.05)
    return {"failure": ranks.failure}


def leave(ranks: ModelRanks) -> dict[str, Any]:
    """The first rank dies without notifying the second."""
    return {"first": attempt(ranks, [[1]])}


SCENARIOS: dict[str, Callable[[ModelRanks], dict[str, Any]]] = {
    "together": work_together,
    "second_fails_alone": meet(668),
    "first_fails_alone": meet(669),
    "second_dies": meet(667),
    "launched": launch(1, 2, 666, 3, 4),
    "launched_alone": launch(668, 3),
    "second_dies_idle": notice_in_idleness,
    "first_dies_idle": leave,
}


def be_rank(rank: int, name: str, folder: Path) -> None:
    store = dist.FileStore(str(folder / name), 2)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )
    heard: list[list[list[int]]] = []
    ranks = ModelRanks(
        {"score": make_score(rank, heard), "launch": Launch(make_launch(rank, heard))},
        lambda: heard.append(FORGOT),
        heartbeat_secs=HEARTBEAT_SECS,
        worker_timeout_secs=TIMEOUT_SECS,
    )
    if rank == 0:
        store.set("has_begun", "1")
        with led(ranks):
            found = SCENARIOS[name](ranks)
    elif name == "second_dies_idle":
        store.wait(["has_begun"])  # else the first could still be connecting to this rank
        os._exit(9)
    else:
        ranks.run_worker()
        ranks.stop()
        found = {"heard": heard}
    (folder / f"{name}{rank}.json").write_text(json.dumps(found))


def fork(rank: int, name: str, folder: Path) -> int:
    child = os.fork()
    if child == 0:
        try:
            be_rank(rank, name, folder)
        except BaseException as error:
            print(name, rank, repr(error), file=sys.stderr, flush=True)
            os._exit(3)
        os._exit(0)
    return child


def main(folder: str) -> None:
    root = Path(folder)
    children = {name: [fork(rank, name, root) for rank in (0, 1)] for name in SCENARIOS}
    found: dict[str, Any] = {}
    for name, pids in children.items():
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        files = [root / f"{name}{rank}.json" for rank in (0, 1)]
        said = [json.loads(file.read_text()) if file.exists() else {} for file in files]
        found[name] = {"codes": codes, "leader": said[0], "follower": said[1]}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
