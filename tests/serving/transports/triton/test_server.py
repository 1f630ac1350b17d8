"""A real Triton in front of a fake scorer: the wire, bad company, and every way to end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from nemo_aligner.errors import ServingError
from tests.serving.fake_server import CONTRACT, total
from tests.serving.servers import FAKE, QUICK, Server, batches, json_request, running
from tests.tiny import ROOT

pytest.importorskip("pytriton")
pytestmark = pytest.mark.slow  # each starts a server of its own


class TestNemoAlignerClients:
    """Clients that were written for NeMo-Aligner's server."""

    def test_sentences(self, old_client):
        sentences = np.char.encode(np.array([["ab"], ["c"]]), "utf-8")
        answer = old_client.infer_batch(
            sentences=sentences, add_EOS=np.array([[True]] * 2)
        ).result()
        assert answer["rewards"][:, 0].tolist() == [195, 99]
        assert answer["exceeded"].tolist() == [[0], [0]]

    def test_tokens_padded_with_zeros(self, old_client):
        tokens = np.zeros((2, 48), dtype=np.int64)
        tokens[0, :3], tokens[1, :40] = 5, 2
        lengths = np.array([[3], [40]], dtype=np.int64)
        answer = old_client.infer_batch(tokens=tokens, sequence_lengths=lengths).result()
        assert answer["rewards"].dtype == np.float32
        assert answer["rewards"][:, 0].tolist() == [15, 80]

    def test_add_eos_that_contradicts_the_contract(self, old_client):
        from pytriton.client.exceptions import PyTritonClientInferenceServerError

        sentences = np.char.encode(np.array([["ab"]]), "utf-8")
        with pytest.raises(PyTritonClientInferenceServerError, match="add_EOS, row 0: got False"):
            old_client.infer_batch(sentences=sentences, add_EOS=np.array([[False]])).result()


def test_the_contract_is_loaded_before_what_is_scored_by_it(server):
    said = server.output()
    assert "Serving contract, reward_model at" in said
    assert 0 < said.index("loaded 'contract'") < said.index("loading: reward_model")


class TestPlainHttp:
    def test_sentences(self, server):
        status, answer = server.post(
            {"inputs": [json_request("sentences", "BYTES", [["ab"], ["c"]])]}
        )
        assert status == 200
        rewards, exceeded, contract_hash = answer["outputs"]
        assert contract_hash["data"] == [CONTRACT.hash] * 2
        assert (rewards["name"], rewards["datatype"], rewards["shape"]) == (
            "rewards",
            "FP32",
            [2, 2],
        )
        assert rewards["data"] == [195, -195, 99, -99]
        assert (exceeded["name"], exceeded["datatype"], exceeded["shape"]) == (
            "exceeded",
            "INT32",
            [2, 1],
        )

    @pytest.mark.parametrize(
        ("inputs", "message"),
        [
            ([json_request("sentences", "BYTES", [[""]])], "row 0: the text is empty"),
            ([json_request("sentences", "BYTES", [["a", "b"]])], "unexpected shape for input"),
            ([json_request("tokens", "INT64", [[1, 2]])], "tokens and sequence_lengths together"),
            (
                [
                    json_request("tokens", "INT64", [[1, 2]]),
                    json_request("sequence_lengths", "INT64", [[3]]),
                ],
                "row 0: got 3, wanted 1 to 2",
            ),
            (
                [
                    json_request("tokens", "INT64", [[1, -2]]),
                    json_request("sequence_lengths", "INT64", [[2]]),
                ],
                "row 0: got token id -2",
            ),
            ([json_request("add_EOS", "BOOL", [[True]])], "wanted exactly one of sentences"),
            ([json_request("tokens", "FP32", [[1.0]])], "data-type"),
            ([json_request("sentences", "BYTES", [["a"]] * 33)], "32"),
            (
                [
                    {"name": "tokens", "datatype": "INT64", "shape": [1, 0], "data": []},
                    json_request("sequence_lengths", "INT64", [[1]]),
                ],
                "tokens: got shape [1, 0], wanted no dimension of 0",
            ),
        ],
    )
    def test_a_bad_request_is_answered_in_one_line_with_400(self, server, inputs, message):
        status, answer = server.post({"inputs": inputs})
        assert status == 400
        assert message in answer["error"]
        assert "Traceback" not in answer["error"]

    def test_a_failing_model_is_500(self, server):
        inputs = [
            json_request("tokens", "INT64", [[666]]),
            json_request("sequence_lengths", "INT64", [[1]]),
        ]
        assert server.post({"inputs": inputs}) == (
            500,
            {"error": "the model failed: RuntimeError: token 666 cannot be scored"},
        )

    def test_malformed_json_harms_nobody(self, server):
        status, _ = server.post(b"{")
        assert status in (400, 500)
        assert server.post({"inputs": [json_request("sentences", "BYTES", [["a"]])]})[0] == 200


def test_what_comes_while_the_model_is_busy_is_one_call_and_bad_requests_harm_nobody(server):
    from nemo_aligner.serving.client.reward import RewardClient

    before = len(batches(server))
    with RewardClient(server.url, timeout_s=30) as client:
        client.score(["warm"])
        slow = client.score_tokens_future([[700]])
        time.sleep(0.5)
        good = {
            text: client.score_future([text]) for text in ("z" * length for length in range(1, 20))
        }
        bad = [
            client.score_future([""]),
            client.score_tokens_future([[1] * 65]),
            client.score_tokens_future([[666]]),
            client.score_tokens_future([[701]]),
        ]
        for text, future in good.items():
            assert future.result()[0, 0] == total(text)
        for future in bad:
            with pytest.raises(ServingError):
                future.result()
        assert slow.result()[0, 0] == 700
    made = batches(server)[before:]
    assert max(sequences for sequences, _ in made) > 8, made


def one_slow_request(server: Server) -> tuple[int, dict]:
    inputs = [
        json_request("tokens", "INT64", [[700]]),
        json_request("sequence_lengths", "INT64", [[1]]),
    ]
    return server.post({"inputs": inputs})


def test_a_full_queue_says_when_to_come_again(tmp_path):
    from nemo_aligner.serving.client import RewardClient

    settings = [*QUICK, "max_queue_rows=2"]
    with running(tmp_path, FAKE, *settings) as server, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(one_slow_request, server)
        time.sleep(1)
        body = {"inputs": [json_request("sentences", "BYTES", [["a"], ["b"]])]}
        status, answer = server.post(body)
        assert status == 503
        assert answer["error"].startswith("the queue is full (1 rows wait of 2, ")
        assert answer["error"].endswith("retry after 1 s")
        with RewardClient(server.url) as client:  # which does
            assert client.score(["a", "b"])[:, 0].tolist() == [97, 98]
        assert slow.result()[0] == 200


@pytest.mark.parametrize(("number", "ranks"), [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_a_stop_answers_what_is_in_flight(tmp_path, number, ranks):
    with running(tmp_path, FAKE, *QUICK, ranks=ranks) as server, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(one_slow_request, server)
        time.sleep(1)
        assert server.stop(number) == [0] * ranks, server.output()[-3000:]
        status, answer = slow.result()
        assert (status, answer["outputs"][0]["data"][0]) == (200, 700)
        server.assert_nothing_is_left()


@pytest.mark.parametrize("victim", ["bin/tritonserver", "triton_python_backend_stub"])
def test_a_triton_that_dies_while_it_waits_for_rewards_ends_the_server(tmp_path, victim):
    with running(tmp_path, FAKE, *QUICK) as server, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(one_slow_request, server)
        time.sleep(1)
        pids = server.processes(victim)
        assert pids, "nothing to kill"
        os.kill(min(pids), signal.SIGKILL)
        assert server.wait(timeout=8) == [1]
        assert slow.exception(timeout=8) is not None or slow.result()[0] >= 500
        assert "The server cannot go on" in server.output()
        server.assert_nothing_is_left()


def is_rank(pid: int, rank: int) -> bool:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return f"RANK={rank}".encode() in variables


class TestTwoRanks:
    def test_they_score_together_and_outlive_errors_that_both_have(self, tmp_path):
        from nemo_aligner.serving.client.reward import RewardClient

        with (
            running(tmp_path, FAKE, *QUICK, "worker_timeout_secs=2", ranks=2) as server,
            RewardClient(server.url, timeout_s=30) as client,
        ):
            assert client.score(["abc"])[0, 0] == total("abc")
            with pytest.raises(ServingError, match=r"rank 0: .* 666 .*; rank 1: .* 666 "):
                client.score_tokens([[666]])
            time.sleep(4)  # idle for longer than the ranks' timeout
            assert client.score_tokens([[2] * 60, [1]])[:, 0].tolist() == [120, 1]
            client.close()
            assert server.stop() == [0, 0], server.output()[-3000:]
            server.assert_nothing_is_left()

    @pytest.mark.parametrize("busy", [False, True])
    def test_a_killed_worker_ends_all(self, tmp_path, busy):
        with running(tmp_path, FAKE, *QUICK, ranks=2) as server, ThreadPoolExecutor(1) as pool:
            slow = pool.submit(one_slow_request, server) if busy else None
            time.sleep(1)
            server.ranks[1].kill()
            assert server.wait(timeout=8) == [1, -signal.SIGKILL]
            if slow is not None:
                status, answer = slow.result()
                assert status == 503
                assert answer["error"].startswith("the server cannot go on: a rank died")
            server.assert_nothing_is_left()

    def test_a_killed_leader_ends_all(self, tmp_path):
        with running(tmp_path, FAKE, *QUICK, ranks=2) as server:
            server.ranks[0].kill()
            assert server.wait(timeout=8) == [-signal.SIGKILL, 1]
            server.assert_nothing_is_left()

    @pytest.mark.parametrize("victim", [0, 1])
    def test_a_rank_killed_while_it_scores_ends_all_and_the_launcher(self, tmp_path, victim):
        with (
            running(tmp_path, FAKE, ranks=2, torchrun=True) as server,
            ThreadPoolExecutor(1) as pool,
        ):
            slow = pool.submit(one_slow_request, server)
            time.sleep(1)
            pid = next(pid for pid in server.processes(FAKE) if is_rank(pid, victim))
            os.kill(pid, signal.SIGKILL)
            killed = time.monotonic()
            assert server.wait(timeout=10) == [1]
            server.assert_nothing_is_left(within=killed + 10 - time.monotonic())
            if victim == 0:
                assert isinstance(slow.exception(), OSError)  # nobody is left to answer it
            else:
                assert slow.result()[0] == 503
                assert "The server cannot go on: " in server.output()

    def test_a_rank_that_dies_or_fails_alone_while_it_scores_ends_all(self, tmp_path):
        for number, (mark, codes) in enumerate([(667, [1, 9]), (668, [1, 1])]):
            folder = tmp_path / str(number)
            folder.mkdir()
            with running(folder, FAKE, *QUICK, "worker_timeout_secs=2", ranks=2) as server:
                inputs = [
                    json_request("tokens", "INT64", [[mark]]),
                    json_request("sequence_lengths", "INT64", [[1]]),
                ]
                status, _ = server.post({"inputs": inputs})
                assert status == 503
                assert server.wait(timeout=10) == codes, server.output()[-3000:]
                server.assert_nothing_is_left()


START = """
import sys
from nemo_aligner.parallel.local import run_ranks
sys.exit(run_ranks(sys.argv[1:], 2))
"""


def start_and_fail(*arguments: str, launcher: tuple[str, ...] = (), **env: str) -> str:
    """Start a server that cannot start; what it says."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run(
        [sys.executable, *launcher, str(ROOT / FAKE), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert done.returncode == 1
    return done.stderr


@pytest.mark.parametrize(("launcher", "speaker"), [((), ""), (("-c", START), "rank 0: ")])
def test_a_taken_port_is_an_error_at_once(launcher, speaker):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        said = start_and_fail(f"port={port}", launcher=launcher)
    beginning = f"{speaker}ServingError: server.port: 127.0.0.1:{port} is not free"
    assert [line[: len(beginning)] for line in said.splitlines()] == [beginning]


def test_a_triton_that_does_not_start_is_an_error_at_once():
    said = start_and_fail(PYTRITON_TRITON_CONFIG_CACHE_CONFIG="nonsense")
    assert "Triton did not start" in said
