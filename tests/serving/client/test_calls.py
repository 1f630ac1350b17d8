"""A client that is not closed: programs end, forks work, and a collected client ends its thread."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from nemo_aligner.serving.client import RewardClient
from nemo_aligner.utils.errors import ServingError
from tests.harness import tiny
from tests.harness.launching import ROOT
from tests.serving.client.misbehaving import Misbehaving, eventually

BEGIN = """
import asyncio, multiprocessing, os, sys, threading
from nemo_aligner.serving.client import RewardClient
client = RewardClient(sys.argv[1], wait_s=20)
def child():
    # In one write: another may print at the same moment.
    print(f'{float(client.score(["b"])[0, 0])}\\n', end="", flush=True)
"""
SCORE = 'print(float(client.score(["a"])[0, 0]))\n'
TWICE = """
async def main():
    print(*[float(rewards[0, 0]) for rewards in await asyncio.gather(
        client.score_async(["a"]), client.score_async(["b"]))])
asyncio.run(main())
asyncio.run(main())
"""
FORK = f"""
pid = os.fork()
if pid == 0:
    child()
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
{SCORE}"""
WORKERS = f"""
client.score(["a"])
workers = [multiprocessing.get_context("fork").Process(target=child) for _ in range(2)]
[worker.start() for worker in workers]
[worker.join() for worker in workers]
print([worker.exitcode for worker in workers])
{SCORE}"""
FUTURES = 'futures = [client.score_future(["a"]) for _ in range(100)]\n'
# (program, whether the server answers, exit code, output)
PROGRAMS: dict[str, tuple[str, bool, int, str]] = {
    "alone": (SCORE, True, 0, "97.0\n"),
    "asyncio": (TWICE, True, 0, "97.0 98.0\n" * 2),
    "fork": (FORK, True, 0, "98.0\n97.0\n"),
    "later fork": ('client.score(["a"])\n' + FORK, True, 0, "98.0\n97.0\n"),
    "workers": (WORKERS, True, 0, "98.0\n98.0\n[0, 0]\n97.0\n"),
    "error": (SCORE + "1 / 0", True, 1, "97.0\n"),
    "in flight": (FUTURES, False, 0, ""),
    "exit in flight": (FUTURES + "sys.exit(3)", False, 3, ""),
    "error in flight": (FUTURES + "1 / 0", False, 1, ""),
}


@pytest.fixture
def stuck(lone: Misbehaving) -> Iterator[threading.Event]:
    """The server is ready, but answers no request for rewards until the event is set."""
    held = threading.Event()
    lone.answer = lambda texts: held.wait(60) and None
    yield held
    held.set()


@pytest.mark.parametrize("name", PROGRAMS)
def test_client_that_is_left_open_lets_a_program_and_its_forks_end(
    lone: Misbehaving, stuck: threading.Event, name: str
) -> None:
    program, is_answered, *wanted = PROGRAMS[name]
    if is_answered:
        stuck.set()
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program, lone.url],
        capture_output=True,
        text=True,
        timeout=60,
        env=tiny.environment(),
        cwd=ROOT,
    )
    assert [done.returncode, done.stdout] == wanted, done.stderr
    if "1 / 0" in program:
        assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert done.stderr.count("Traceback") == ("1 / 0" in program)
    assert "client" not in done.stderr


@pytest.mark.parametrize("block", ["if True", "with client"])
@pytest.mark.usefixtures("stuck")
def test_client_lets_an_interrupted_program_end(lone: Misbehaving, block: str) -> None:
    program = f"{BEGIN}{block}:\n  client.score(['a'])"
    command = [sys.executable, "-c", program, lone.url]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=tiny.environment())
    assert eventually(lambda: lone.asked)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGINT, 130)
    assert err.endswith("KeyboardInterrupt\n")


def clients() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "reward client"}


def test_client_that_is_forgotten_leaves_no_thread_once_its_futures_are_done(
    lone: Misbehaving,
) -> None:
    before = clients()
    for _ in range(3):
        assert RewardClient(lone.url).score(["a"])[0, 0] == 97
    future = RewardClient(lone.url).score_future(["a"])
    gc.collect()
    assert future.result()[0, 0] == 97
    del future
    gc.collect()
    assert eventually(lambda: clients() <= before)


def test_client_that_is_closed_has_finished_and_refuses(lone: Misbehaving) -> None:
    before = clients()
    client = RewardClient(lone.url)
    futures = [client.score_future(["a" * length]) for length in range(1, 30)]
    client.close()
    assert clients() == before
    assert [future.result()[0, 0] for future in futures] == [97 * n for n in range(1, 30)]
    client.close()
    with pytest.raises(ServingError, match="the client is closed"):
        client.score(["a"])


@pytest.mark.usefixtures("stuck")
def test_client_goes_on_when_its_futures_are_cancelled(lone: Misbehaving) -> None:
    with RewardClient(lone.url, max_connections=1) as client:
        waiting = [client.score_future(["a"]) for _ in range(3)]
        assert all(future.cancel() for future in waiting)


def test_client_tells_a_callback_that_it_would_wait_for_itself(
    lone: Misbehaving, stuck: threading.Event
) -> None:
    told: list[str] = []
    with RewardClient(lone.url) as client:

        def ask(future: Any) -> None:
            try:
                client.score(["b"])
            except RuntimeError as error:
                told.append(str(error))

        client.score_future(["a"]).add_done_callback(ask)
        stuck.set()
        assert eventually(lambda: told)
    assert told == [
        "a callback of a future must not wait for another call; use the *_future methods"
    ]


IMPORTS = """
import logging, sys, warnings
import aiohttp, numpy
finders, filters = list(sys.meta_path), list(warnings.filters)
import nemo_aligner, nemo_aligner.serving.client, nemo_aligner.contract.contract
import nemo_aligner.data.formats
from nemo_aligner.serving.client import RewardClient
assert sys.meta_path == finders, sys.meta_path
assert warnings.filters == filters, warnings.filters
heavy = {"torch", "megatron", "transformers", "jinja2", "omegaconf", "pytriton", "tritonclient"}
heavy &= set(sys.modules)
assert not heavy, heavy
import nemo_aligner.metrics.table
assert sys.meta_path == finders, sys.meta_path
"""
THEN_MEGATRON = """
import importlib.machinery, torch
import megatron.core.tensor_parallel.random
assert type(megatron.core.__spec__.loader) is importlib.machinery.SourceFileLoader
assert torch.cuda.current_device.__module__ == "torch.cuda"
assert megatron.core.tensor_parallel.random._get_cuda_rng_state.__defaults__[0] == "cuda"
"""


def test_client_and_contract_change_nothing_for_others_when_imported() -> None:
    """Imports change neither module finders nor warning filters, and load no megatron or torch."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS + THEN_MEGATRON],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
