"""A real Triton in front of a fake scorer: the wire, bad company, and every way to end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nemo_aligner.errors import ServingError
from tests.serving import servers
from tests.serving.fake_server import CONTRACT
from tests.serving.servers import Server, json_request, running
from tests.tiny import ROOT

pytest.importorskip("pytriton")

FAKE = "tests/serving/fake_server.py"
QUICK = ("heartbeat_secs=0.5", "exit_timeout_secs=10")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    # The delay gathers what the tests send side by side into one batch.
    with running(
        folder, FAKE, *QUICK, "max_queue_delay_microseconds=100000", "max_batch_size=32"
    ) as started:
        yield started
        assert started.stop() == [0], started.output()[-3000:]
        started.assert_nothing_is_left()
        assert not (folder / "ready").exists()


def total(text: str) -> float:
    return float(sum(map(ord, text)))


def batches(server: Server) -> list[tuple[int, int]]:
    lines = [line.split() for line in server.output().splitlines() if line.startswith("BATCH")]
    return [(int(sequences), int(tokens)) for _, sequences, tokens in lines]


@pytest.fixture(scope="module")
def client(server):
    from nemo_aligner.serving.client.reward import RewardClient

    with RewardClient(server.url, timeout_s=30, init_timeout_s=30) as client:
        yield client


@pytest.fixture(scope="module")
def old_client(server):
    from pytriton.client import FuturesModelClient

    with FuturesModelClient(
        server.url, "reward_model", init_timeout_s=60, inference_timeout_s=60
    ) as client:
        yield client


class TestClient:
    def test_texts_and_conversations_in_one_call_keep_their_order(self, client):
        chat = [{"role": "user", "content": "hi "}, {"role": "assistant", "content": "Grüße"}]
        rewards = client.score(["ab", chat, "c"])
        assert rewards.dtype == np.float32
        assert rewards[:, 0].tolist() == [195, total("hi Grüße"), 99]
        assert rewards[:, 1].tolist() == (-rewards[:, 0]).tolist()

    def test_the_contract_is_published_and_expected(self, server, client):
        from nemo_aligner.serving.client.reward import RewardClient

        assert client.contract() == CONTRACT
        for expect in (CONTRACT, CONTRACT.hash):
            with RewardClient(server.url, expect=expect) as other:
                assert other.score(["a"])[0, 0] == 97
        wanted = replace(CONTRACT, seq_length=9, add_eos=False)
        with RewardClient(server.url, expect=wanted) as other:
            differ = "model.data.add_eos: False -> True; model.data.seq_length: 9 -> 64"
            with pytest.raises(
                ServingError, match=f"{CONTRACT.hash}, wanted {wanted.hash}: {differ}"
            ):
                other.score(["a"])
        with RewardClient(server.url, expect="0" * 64) as other:
            with pytest.raises(
                ServingError, match=f"got the scoring .*{CONTRACT.hash}, wanted 000"
            ):
                asyncio.run(other.score_async(["a"]))
            # Another server in the place of the one that was asked for its contract.
            other._max_batch_size = 32
            with pytest.raises(
                ServingError, match=f"got the scoring .*{CONTRACT.hash}, wanted 000"
            ):
                other.score(["a"])
        with pytest.raises(ValueError, match="expect: got 'abc', wanted a ScoringContract or"):
            RewardClient(server.url, expect="abc")

    def test_the_contract_needs_no_input(self, server):
        url = f"{server.url}/v2/models/contract/infer"
        with urllib.request.urlopen(url, data=b'{"inputs": []}', timeout=10) as response:
            (output,) = json.load(response)["outputs"]
        assert json.loads(output["data"][0]) == CONTRACT.to_dict()

    def test_more_texts_than_fit_a_request(self, client, server):
        texts = ["x" * (1 + i % 7) for i in range(100)]
        assert client.score(texts)[:, 0].tolist() == [total(text) for text in texts]
        assert max(sequences for sequences, _ in batches(server)) <= 32

    def test_tokens(self, client):
        rows = [[7] * length for length in (5, 1, 60)] * 20
        assert client.score_tokens(rows)[:, 0].tolist() == [sum(row) for row in rows]

    def test_nothing_is_nothing(self, client):
        assert len(client.score([])) == 0

    def test_one_string_is_not_a_list(self, client):
        with pytest.raises(TypeError, match="wanted a list"):
            client.score("oops")

    def test_futures_and_asyncio_give_the_same(self, client):
        texts = ["a", "bc", "d" * 50]
        expected = client.score(texts)

        async def both() -> list[np.ndarray]:
            return await asyncio.gather(client.score_async(texts), client.score_async(texts[:1]))

        future = client.score_future(texts)
        all_three, first = asyncio.run(both())
        np.testing.assert_array_equal(future.result(), expected)
        np.testing.assert_array_equal(all_three, expected)
        np.testing.assert_array_equal(first, expected[:1])

    def test_the_servers_own_words_reach_every_form(self, client):
        wanted = "reward_model: row 1: the text is empty$"
        with pytest.raises(ServingError, match=wanted):
            client.score(["a", ""])
        with pytest.raises(ServingError, match=wanted):
            client.score_future(["a", ""]).result()
        with pytest.raises(ServingError, match=wanted):
            asyncio.run(client.score_async(["a", ""]))

    def test_a_cut_text_is_scored_and_told(self, client, caplog):
        assert client.score(["y" * 100])[0, 0] == 64 * ord("y")
        assert "1 of 1 texts were cut" in caplog.text

    def test_no_server_is_an_error_within_the_timeout(self):
        from nemo_aligner.serving.client.reward import RewardClient

        with (
            RewardClient(f"http://127.0.0.1:{servers.free_port()}", init_timeout_s=1) as lonely,
            pytest.raises(ServingError, match="timed out"),
        ):
            lonely.score(["a"])


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


def test_requests_of_all_lengths_meet_in_one_batch_and_bad_ones_harm_nobody(server):
    from nemo_aligner.serving.client.reward import RewardClient

    before = len(batches(server))
    with RewardClient(server.url, timeout_s=30) as client:
        client.score(["warm"])
        good = {
            text: client.score_future([text]) for text in ("z" * length for length in range(1, 25))
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
    made = batches(server)[before:]
    assert max(sequences for sequences, _ in made) > 8, made


def one_slow_request(server: Server) -> tuple[int, dict]:
    inputs = [
        json_request("tokens", "INT64", [[700]]),
        json_request("sequence_lengths", "INT64", [[1]]),
    ]
    return server.post({"inputs": inputs})


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
def test_a_dead_triton_ends_the_server(tmp_path, victim):
    with running(tmp_path, FAKE, *QUICK) as server:
        pids = server.processes(victim)
        assert pids, "nothing to kill"
        os.kill(max(pids), signal.SIGKILL)
        assert server.wait(timeout=8) == [1]
        assert "The server cannot go on" in server.output()
        server.assert_nothing_is_left()
        assert not list(Path("/dev/shm").glob(f"pytrtion{server.ranks[0].pid}-*"))


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
                assert status == 500
                assert "a rank died" in answer["error"]
            server.assert_nothing_is_left()

    def test_a_killed_leader_ends_all(self, tmp_path):
        with running(tmp_path, FAKE, *QUICK, ranks=2) as server:
            server.ranks[0].kill()
            assert server.wait(timeout=8) == [-signal.SIGKILL, 1]
            server.assert_nothing_is_left(killed=True)

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
                assert status == 500
                assert server.wait(timeout=10) == codes, server.output()[-3000:]
                server.assert_nothing_is_left()


def start_and_fail(*arguments: str, **env: str) -> str:
    """Start a server that cannot start; what it says."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
    done = subprocess.run(
        [sys.executable, str(ROOT / FAKE), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert done.returncode == 1
    return done.stderr


def test_a_taken_port_is_an_error_at_once():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        said = start_and_fail(f"port={port}")
    assert f"server.port: 127.0.0.1:{port} is not free" in said


def test_a_triton_that_does_not_start_is_an_error_at_once():
    said = start_and_fail(PYTRITON_TRITON_CONFIG_HTTP_THREAD_COUNT="-1")
    assert "Triton did not start" in said
