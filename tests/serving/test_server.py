"""A server process around a fake scorer: its client, bad requests, and ways to start and stop."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Timer
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nemo_aligner.config.serving import ServerConfig
from nemo_aligner.serving import server as server_module
from nemo_aligner.serving.client import RewardClient
from nemo_aligner.serving.engine.running_calls import RunningCalls
from tests.harness import tiny
from tests.harness.launching import free_port
from tests.serving.client.misbehaving import eventually
from tests.serving.fake_server import CONTRACT, FINGERPRINT, total
from tests.serving.servers import (
    FAKE,
    QUICK,
    Server,
    batches,
    check_refused,
    json_request,
    running,
    tokens_request,
)


def test_server_answers_plain_json(server: Server) -> None:
    body = {"inputs": [json_request("sentences", "BYTES", [["ab"], ["c"]])]}
    status, answer = server.post(body)
    assert status == 200
    rewards, exceeded, contract_hash, fingerprint = answer["outputs"]
    assert contract_hash["data"] == [CONTRACT.hash] * 2
    assert fingerprint["data"] == [FINGERPRINT] * 2
    kinds = [(each["name"], each["datatype"], each["shape"]) for each in (rewards, exceeded)]
    assert kinds == [("rewards", "FP32", [2, 2]), ("exceeded", "INT32", [2, 1])]
    assert rewards["data"] == [195, -195, 99, -99]
    url = f"{server.url}/v2/models/contract/infer"
    with urllib.request.urlopen(url, data=b'{"inputs": []}', timeout=10) as response:
        outputs = {each["name"]: each["data"] for each in json.load(response)["outputs"]}
    assert outputs.pop("model_fingerprint") == [FINGERPRINT]
    found = {name: json.loads(text) for name, (text,) in outputs.items()}
    assert found["contract"] == CONTRACT.to_dict()
    assert found["statistics"]["tokens_per_call"] == 256
    assert found["turn_end"] is None  # the contract has no chat template
    said = server.output()
    assert "Serving at http" in said
    assert "KServe models: contract, reward_model" in said
    assert f"{server.url}/docs" in said


BAD: list[tuple[list[dict[str, Any]], str]] = [
    (tokens_request([[1, 2]], 3), "row 0: got 3, wanted 1 to 2"),
    ([json_request("add_EOS", "BOOL", [[True]])], "wanted exactly one of sentences"),
    (tokens_request([[]], 1), "tokens: got shape [1, 0], wanted no dimension of 0"),
    ([json_request("sentences", "BYTES", [["a"]] * 33)], "wanted at most 32"),
]


def test_server_answers_a_bad_request_in_one_line_and_goes_on(server: Server) -> None:
    check_refused(server.post, BAD)
    assert server.post({"inputs": tokens_request([[666]])}) == (
        500,
        {"error": "the model failed: RuntimeError: token 666 cannot be scored"},
    )
    assert server.post({"inputs": [json_request("sentences", "BYTES", [["a"]])]})[0] == 200


def test_client_of_a_real_server_has_every_form_of_request_and_answer(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests in its own and in Triton's format; tests/serving/client has fake servers."""
    chat = [{"role": "user", "content": "hi "}, {"role": "assistant", "content": "Grüße"}]
    many = ["x" * (1 + i % 7) for i in range(100)]  # the server accepts at most 32 per request
    rows = [[7] * length for length in (5, 1, 60)] * 20
    gone = f"http://127.0.0.1:{free_port()}"
    with RewardClient([server.url, gone], timeout_s=30) as client:
        (before, _) = asyncio.run(client.statistics_async()).values()
        assert client.score(["abc", "d"])[:, 0].tolist() == [total("abc"), total("d")]
        (after, nobody) = asyncio.run(client.statistics_async()).values()
        assert asyncio.run(client.probe_async())[server.url] is None
    assert before is not None
    assert after is not None
    assert nobody is None
    counted = {name: after[name] - before[name] for name in ("requests", "rows", "tokens")}
    assert counted == {"requests": 1, "rows": 2, "tokens": 4}
    assert all(after[name] > before[name] for name in ("calls", "forward_seconds"))
    with RewardClient(server.url, timeout_s=30) as client:
        assert client.contract() == CONTRACT
        rewards = client.score(["ab", chat, "c"])
        assert rewards.dtype == np.float32
        assert rewards[:, 0].tolist() == [195, total("hi Grüße"), 99]
        assert rewards[:, 1].tolist() == (-rewards[:, 0]).tolist()
        assert client.score(many)[:, 0].tolist() == [total(text) for text in many]
        assert client.score_tokens(rows)[:, 0].tolist() == [sum(row) for row in rows]
        scored = client.score_rows(["a" * 100, "", "b"])
        assert scored.exceeded.tolist() == [True, False, False]
        assert scored.rewards[0, 0] == 64 * ord("a")
        assert "1 of 3 samples were cut" in caplog.text
        assert (scored.contract_hash, [*scored.errors]) == (CONTRACT.hash, [1])
        scored = asyncio.run(client.score_token_rows_async([[1], [-1]]))
        assert scored.rewards[0].tolist() == [1.0, -1.0]
        assert "token id -1" in scored.errors[1]


def test_server_gathers_what_comes_while_it_is_busy(server: Server) -> None:
    before = len(batches(server))
    with RewardClient(server.url, timeout_s=30) as client:
        client.score(["warm"])
        slow = client.score_tokens_future([[700]])
        assert eventually(lambda: len(batches(server)) > before + 1)
        good = {"z" * length: client.score_future(["z" * length]) for length in range(1, 20)}
        assert [future.result()[0, 0] for future in good.values()] == [*map(total, good)]
        assert slow.result()[0, 0] == 700
    made = batches(server)[before:]
    assert max(sequences for sequences, _ in made) > 8, made


@contextmanager
def scoring(folder: Path, *settings: str, **how: Any) -> Iterator[tuple[Server, Future[Any]]]:
    """A server that is computing a call of three seconds, and the future of its answer."""
    with running(folder, FAKE, *settings, **how) as server, ThreadPoolExecutor(1) as pool:
        yield server, begin_slow(server, pool)


def begin_slow(server: Server, pool: ThreadPoolExecutor) -> Future[Any]:
    return begin_call(server, pool, 700)


def begin_call(server: Server, pool: ThreadPoolExecutor, token: int) -> Future[Any]:
    before = len(batches(server))
    answer = pool.submit(server.post, {"inputs": tokens_request([[token]])})
    assert eventually(lambda: len(batches(server)) > before)
    return answer


def check_slow_answer(slow: Future[Any]) -> None:
    status, answer = slow.result()
    assert (status, answer["outputs"][0]["data"][0]) == (200, 700), answer


def test_server_that_is_full_says_when_to_come_again_and_a_stop_answers_what_is_in_flight(
    tmp_path: Path,
) -> None:
    with (
        scoring(tmp_path, *QUICK, "max_queue_rows=2") as (server, slow),
        ThreadPoolExecutor(1) as pool,
    ):
        status, answer = server.post({"inputs": [json_request("sentences", "BYTES", [["a"]] * 2)]})
        assert status == 503
        assert answer["error"].startswith(
            "the queue of reward_model is full: 1 rows are in flight, "
        )
        assert answer["error"].endswith("retry after 1 s")
        with RewardClient(server.url) as client:  # which answers
            assert client.score(["a", "b"])[:, 0].tolist() == [97, 98]
        check_slow_answer(slow)
        slow = begin_slow(server, pool)
        assert server.stop(signal.SIGINT) == [0], server.output()[-3000:]
        check_slow_answer(slow)
        server.assert_nothing_is_left()


def test_server_of_two_ranks_that_is_stopped_answers_what_is_in_flight(tmp_path: Path) -> None:
    """engine/test_executor.py tests errors, idleness and lost ranks without a server."""
    with scoring(tmp_path, *QUICK, ranks=2) as (server, slow):
        assert server.stop() == [0, 0], server.output()[-3000:]
        check_slow_answer(slow)
        server.assert_nothing_is_left()


def is_rank(pid: int, rank: int) -> bool:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return f"RANK={rank}".encode() in variables


@pytest.mark.parametrize("launcher", ["none", "torchrun"])
def test_server_ends_when_a_worker_is_killed_while_it_scores(tmp_path: Path, launcher: str) -> None:
    by_torchrun = launcher == "torchrun"
    settings = () if by_torchrun else QUICK
    with scoring(tmp_path, *settings, ranks=2, torchrun=by_torchrun) as (server, slow):
        os.kill(next(pid for pid in server.processes(FAKE) if is_rank(pid, 1)), signal.SIGKILL)
        killed = time.monotonic()
        assert server.wait(timeout=10) == ([1] if by_torchrun else [1, -signal.SIGKILL])
        server.assert_nothing_is_left(within=killed + 10 - time.monotonic())
        status, answer = slow.result()
        assert status == 503
        assert by_torchrun or answer["error"].startswith("the server cannot continue: a rank died")
        assert "The server cannot continue: " in server.output()


def test_server_ends_when_its_first_rank_is_killed(tmp_path: Path) -> None:
    with scoring(tmp_path, *QUICK, ranks=2) as (server, slow):
        server.ranks[0].kill()
        assert server.wait(timeout=8) == [-signal.SIGKILL, 1]
        assert isinstance(slow.exception(), OSError)  # no process is left to answer it
        server.assert_nothing_is_left()


def test_server_whose_model_hangs_becomes_unready_and_ends(tmp_path: Path) -> None:
    """Heartbeats go on, because they come from another thread than the calls."""

    def is_unready() -> bool:
        try:
            urllib.request.urlopen(f"{server.url}/ready", timeout=10)
        except urllib.error.HTTPError as error:
            body = error.read().decode()
            assert "the model may hang: a call has not ended (compute rewards, for " in body
            return True
        return False

    settings = (*QUICK, "max_stuck_secs=5")
    with running(tmp_path, FAKE, *settings, ranks=2) as server, ThreadPoolExecutor(2) as pool:
        hung = begin_call(server, pool, 702)
        waiting = pool.submit(server.post, {"inputs": tokens_request([[1]])})
        assert eventually(is_unready)
        assert server.ranks[0].poll() is None
        assert server.wait(timeout=20) == [1, 1]
        for answer in (hung, waiting):
            status, body = answer.result()
            assert status == 503
            assert body["error"].startswith("the server cannot continue: the model hangs: a call ")
        assert "The server cannot continue: the model hangs: a call" in server.output()
        assert "server.max_stuck_secs allows 5 s" in server.output()
        server.assert_nothing_is_left()


def test_server_whose_model_hangs_ends_after_a_signal(tmp_path: Path) -> None:
    settings = ("exit_timeout_secs=1",)
    with running(tmp_path, FAKE, *settings) as server, ThreadPoolExecutor(1) as pool:
        hung = begin_call(server, pool, 702)
        assert server.stop(timeout=20) == [1]
        assert hung.result()[0] == 503
        assert "The server exits at once: a call (compute rewards, for " in server.output()
        server.assert_nothing_is_left()


class ExitedError(BaseException):
    """Raised instead of the end of the process."""


def test_ready_file_of_a_server_that_dies_is_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def raise_exit(code: int) -> None:
        raise ExitedError(code)

    monkeypatch.setattr(server_module, "_LAST_WORDS_SECS", 0.0)
    monkeypatch.setattr(os, "_exit", raise_exit)
    ready = tmp_path / "ready"
    unused: Any = None
    ready.write_text("http://127.0.0.1:5555\n")
    ranks: Any = SimpleNamespace(failure="rank 1 is gone")
    config = ServerConfig(ready_file=str(ready))
    with pytest.raises(ExitedError, match="1"):
        server_module._Leader([], ranks, config, unused, unused)._check_ranks()
    assert not ready.exists()


def test_services_that_do_not_end_are_left_unless_the_model_trains(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raise_exit(leader: server_module._Leader, line: str) -> None:
        raise ExitedError(line)

    monkeypatch.setattr(server_module, "_STOP_SECS", 0.3)
    monkeypatch.setattr(server_module._Leader, "_die", raise_exit)

    def stop_with(calls: RunningCalls, stop: Callable[[], Any]) -> None:
        ranks: Any = SimpleNamespace(running=calls, failure=None)
        unused: Any = None
        leader = server_module._Leader([], ranks, ServerConfig(), unused, unused)
        leader._stop_services([SimpleNamespace(stop=stop)], 0.0)  # type: ignore[list-item]

    never, training, trained = Event(), Future[Any](), Event()
    calls = RunningCalls(0.0)
    with pytest.raises(ExitedError, match=r"^The server exits at once: a part of it has not ended"):
        stop_with(calls, never.wait)
    calls.begin(training, "train", is_long=True)
    Timer(1.0, trained.set).start()
    stop_with(calls, trained.wait)
    assert trained.is_set()
    assert capsys.readouterr().out == "The server ends after a call (train, for 0 s)\n"
    # A call that hangs behind the training does not get its time.
    calls.begin(Future(), "score", is_long=False)
    calls.end(training)
    with pytest.raises(ExitedError, match=r"exits at once: a call \(score, for 0 s\) has not end"):
        stop_with(calls, never.wait)
    never.set()


def test_server_that_cannot_start_says_so_in_one_line_of_one_rank(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        beginnings = {
            f"port={port}": f"server.port: 127.0.0.1:{port} is not free",
            f"ready_file={tmp_path}": f"server.ready_file: {tmp_path}: cannot be written",
        }
        for setting, beginning in beginnings.items():
            done = tiny.run_script(FAKE, "port=0", setting, processes=2, check=False)
            assert done.returncode == 1
            (line,) = done.stderr.splitlines()
            assert line.startswith(f"ServingError: {beginning}")
