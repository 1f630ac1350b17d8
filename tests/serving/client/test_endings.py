"""A client that nobody closes: programs end, forks go on, what is forgotten leaves no thread."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from nemo_aligner.errors import ServingError
from tests import tiny
from tests.launching import ROOT
from tests.serving.fake_server import total

pytest.importorskip("pytriton")

BEGIN = """
import asyncio, os, sys, threading
from nemo_aligner.serving.client import RewardClient
client = RewardClient(sys.argv[1], wait_s=20)
"""


class Proxy:
    """In front of a server: it can go, come back, and be stuck on every request for rewards."""

    def __init__(self, url: str) -> None:
        self.is_stuck, self._ends = False, threading.Event()
        self._http: ThreadingHTTPServer | None = None
        self._port = 0

        class Handler(BaseHTTPRequestHandler):
            def do_GET(handler) -> None:
                self._forward(handler, url, None)

            def do_POST(handler) -> None:
                body = handler.rfile.read(int(handler.headers["Content-Length"]))
                if self.is_stuck:
                    self._ends.wait()
                self._forward(handler, url, body)

            def log_message(handler, *unused: object) -> None:
                pass

        self._handler = Handler

    def _forward(self, handler: BaseHTTPRequestHandler, url: str, body: bytes | None) -> None:
        names = ("Inference-Header-Content-Length", "Content-Type")
        headers = {name: handler.headers[name] for name in names if name in handler.headers}
        request = urllib.request.Request(url + handler.path, data=body, headers=headers)
        with urllib.request.urlopen(request) as response:
            handler.send_response(response.status)
            for name in names:
                if name in response.headers:
                    handler.send_header(name, response.headers[name])
            handler.end_headers()
            handler.wfile.write(response.read())

    def come(self) -> str:
        """Its URL, the same each time."""
        self._http = ThreadingHTTPServer(("127.0.0.1", self._port), self._handler)
        self._http.daemon_threads = True
        self._port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._port}"

    def answer(self) -> None:
        """No longer stuck: also those that wait are answered."""
        self._ends.set()

    def go(self) -> None:
        self.answer()
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()


@pytest.fixture
def proxy(server: Any) -> Iterator[Proxy]:
    proxy = Proxy(server.url)
    yield proxy
    proxy.go()


@pytest.fixture
def stuck(proxy: Proxy) -> str:
    """The URL of a server that is ready, and answers no request for rewards."""
    proxy.is_stuck = True
    return proxy.come()


def run(url: str, program: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program, url],
        capture_output=True,
        text=True,
        timeout=60,
        env=tiny.environment(),
        cwd=ROOT,
    )
    return done.returncode, done.stdout, done.stderr


def test_a_program_that_closes_nothing_ends(server: Any) -> None:
    assert run(server.url, 'print(client.score(["a"])[0, 0])') == (0, "97.0\n", "")


def test_a_program_that_closes_nothing_and_fails_ends(server: Any) -> None:
    code, out, err = run(server.url, 'print(client.score(["a"])[0, 0])\n1 / 0')
    assert (code, out) == (1, "97.0\n")
    assert err.endswith("ZeroDivisionError: division by zero\n")
    assert err.count("Traceback") == 1


@pytest.mark.parametrize("ending", ["", "\nsys.exit(3)", "\n1 / 0"])
def test_a_program_does_not_wait_for_what_is_in_flight(stuck: str, ending: str) -> None:
    program = 'futures = [client.score_future(["a"]) for _ in range(100)]' + ending
    code, _, err = run(stuck, program)
    assert code == {"": 0, "\nsys.exit(3)": 3, "\n1 / 0": 1}[ending]
    assert err.count("Traceback") == ("/" in ending)
    assert "client" not in err


@pytest.mark.parametrize("block", ["if True", "with client"])
def test_an_interrupted_program_ends(stuck: str, block: str) -> None:
    program = f"{BEGIN}{block}:\n  print(flush=True)\n  client.score(['a'])"
    command = [sys.executable, "-c", program, stuck]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=tiny.environment()
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (-signal.SIGINT, 130)
    assert err.endswith("KeyboardInterrupt\n")


def test_a_program_with_asyncio_ends(server: Any) -> None:
    program = """
async def main():
    print(*[float(rewards[0, 0]) for rewards in await asyncio.gather(
        client.score_async(["a"]), client.score_async(["b"]))])
asyncio.run(main())
asyncio.run(main())
"""
    assert run(server.url, program) == (0, "97.0 98.0\n" * 2, "")


FORK = """
def child():
    print(float(client.score(["b"])[0, 0]), flush=True)
"""


@pytest.mark.parametrize("used", [False, True])
def test_a_forked_process_has_a_connection_of_its_own(server: Any, used: bool) -> None:
    program = f"""{FORK}
if {used}:
    client.score(["a"])
pid = os.fork()
if pid == 0:
    child()
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
print(float(client.score(["a"])[0, 0]))
"""
    assert run(server.url, program) == (0, "98.0\n97.0\n", "")


def test_workers_of_multiprocessing_score(server: Any) -> None:
    program = f"""{FORK}
import multiprocessing
client.score(["a"])
workers = [multiprocessing.get_context("fork").Process(target=child) for _ in range(2)]
[worker.start() for worker in workers]
[worker.join() for worker in workers]
print([worker.exitcode for worker in workers], float(client.score(["a"])[0, 0]))
"""
    assert run(server.url, program) == (0, "98.0\n98.0\n[0, 0] 97.0\n", "")


def clients() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "reward client"]


def end_soon(before: list[threading.Thread]) -> bool:
    end = time.monotonic() + 20
    while set(clients()) - set(before) and time.monotonic() < end:
        time.sleep(0.02)
    return not set(clients()) - set(before)


def test_a_client_that_is_forgotten_leaves_no_thread(server: Any) -> None:
    from nemo_aligner.serving.client.reward import RewardClient

    before = clients()
    for _ in range(3):
        assert RewardClient(server.url).score(["a"])[0, 0] == 97
    gc.collect()
    assert end_soon(before)


def test_a_future_outlives_its_client(server: Any) -> None:
    from nemo_aligner.serving.client.reward import RewardClient

    before = clients()
    future = RewardClient(server.url).score_future(["a"])
    gc.collect()
    assert future.result()[0, 0] == 97
    del future
    gc.collect()
    assert end_soon(before)


def test_a_closed_client_has_finished_and_refuses(server: Any) -> None:
    from nemo_aligner.serving.client.reward import RewardClient

    before = clients()
    client = RewardClient(server.url)
    futures = [client.score_future(["a" * length]) for length in range(1, 30)]
    client.close()
    assert set(clients()) == set(before)
    assert [future.result()[0, 0] for future in futures] == [97 * n for n in range(1, 30)]
    client.close()
    with pytest.raises(ServingError, match="the client is closed"):
        client.score(["a"])


def test_many_threads_share_a_client(client: Any) -> None:
    def score(number: int) -> float:
        return float(client.score([f"text {number}"])[0, 0])

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(score, range(200)))
    assert found == [total(f"text {number}") for number in range(200)]


def test_a_future_can_be_cancelled_and_the_client_goes_on(stuck: str) -> None:
    from nemo_aligner.serving.client.reward import RewardClient

    with RewardClient(stuck, max_connections=1) as client:
        waiting = [client.score_future(["a"]) for _ in range(3)]
        assert all(future.cancel() for future in waiting)


def test_a_callback_that_would_wait_for_itself_is_told(proxy: Proxy, stuck: str) -> None:
    from nemo_aligner.serving.client.reward import RewardClient

    client = RewardClient(stuck)
    told: list[str] = []

    def ask(future: Any) -> None:
        try:
            client.score(["b"])
        except RuntimeError as error:
            told.append(str(error))

    future = client.score_future(["a"])
    future.add_done_callback(ask)
    proxy.answer()
    end = time.monotonic() + 20
    while not told and time.monotonic() < end:
        time.sleep(0.02)
    assert told == ["a callback of a future may not wait for another: submit a future"]


def test_a_server_that_goes_is_an_error_and_one_that_comes_back_is_used(proxy: Proxy) -> None:
    from nemo_aligner.serving.client.reward import RewardClient

    url = proxy.come()
    with RewardClient(url, retry_s=0.3) as client:
        assert client.score(["a"])[0, 0] == 97
        proxy.go()
        for _ in range(2):
            with pytest.raises(ServingError, match=f"{url}, reward_model: .*onnect.*retry_s"):
                client.score(["a"])
        assert proxy.come() == url
        assert client.score(["a"])[0, 0] == 97
