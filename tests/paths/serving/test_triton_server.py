"""A server with NVIDIA Triton next to its HTTP front: what Triton answers, and how both end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from tests.harness import tiny
from tests.harness.environments import triton_python
from tests.serving.client.misbehaving import eventually
from tests.serving.fake_server import total
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

TOKEN = "s3cret"
INFER = "v2/models/reward_model/infer"
_ADDRESSES = re.compile(r"Triton serves .* at (\S+), and over gRPC at (\S+); .* at (\S+)")


@dataclass
class Door:
    """A server, and the addresses of its Triton."""

    server: Server
    url: str
    grpc_address: str
    metrics_url: str

    def post(
        self, body: dict[str, Any] | bytes, path: str = INFER, **headers: str
    ) -> tuple[int, dict[str, Any]]:
        """Send JSON to Triton over HTTP."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(f"{self.url}/{path}", data, named)
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or "{}")

    def score_over_grpc(self, texts: list[str], **headers: str) -> np.ndarray:
        rows = np.array([[text.encode()] for text in texts], dtype=np.object_)
        sentences = grpc.InferInput("sentences", list(rows.shape), "BYTES")
        sentences.set_data_from_numpy(rows)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        with grpc.InferenceServerClient(self.grpc_address) as client:
            answer = client.infer("reward_model", [sentences], headers=named)
        return answer.as_numpy("rewards")


@contextmanager
def with_triton(folder: Path, *settings: str, **how: Any) -> Iterator[Door]:
    with running(
        folder, FAKE, *QUICK, "triton_port=0", *settings, python=triton_python(), **how
    ) as server:
        # The following lines are printed after the server is ready.
        assert eventually(lambda: bool(_ADDRESSES.search(server.output())))
        found = _ADDRESSES.search(server.output())
        assert found is not None
        yield Door(server, *found.groups())


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    with with_triton(tmp_path_factory.mktemp("door"), "max_batch_size=32") as started:
        yield started


def test_triton_answers_what_the_front_answers(door: Door) -> None:
    for inputs in (
        [json_request("sentences", "BYTES", [["ab"], ["Grüße"]])],
        tokens_request([[5, 6, 7], [2, 3, 0]], 3, 2),
    ):
        status, from_front = door.server.post({"inputs": inputs})
        assert status == 200
        status, from_triton = door.post({"inputs": inputs})
        assert status == 200
        assert from_triton["outputs"] == from_front["outputs"]
    rewards = door.score_over_grpc(["ab", "Grüße"])
    expected = np.array([[total(text), -total(text)] for text in ("ab", "Grüße")], np.float32)
    assert rewards.dtype == np.float32
    assert rewards.tobytes() == expected.tobytes()
    status, contract = door.post({"inputs": []}, "v2/models/contract/infer")
    assert status == 200
    texts = {output["name"]: output["data"][0] for output in contract["outputs"]}
    assert json.loads(texts["contract"])["attributes"] == ["sum", "minus"]
    with urllib.request.urlopen(door.metrics_url, timeout=10) as response:
        metrics = response.read().decode()
    assert 'nv_inference_request_success{model="reward_model",version="1"} 3' in metrics


# Some are rejected by the endpoint, others by Triton itself.
REFUSED: list[tuple[list[dict[str, Any]], str]] = [
    (tokens_request([[1, 2]], 3), "row 0: got 3, wanted 1 to 2"),
    ([json_request("add_EOS", "BOOL", [[True]])], "wanted exactly one of sentences"),
    (tokens_request([[]], 1), "sequence_lengths, row 0: got 1, wanted 1 to 0"),
    ([json_request("sentences", "BYTES", [["a", "b"]])], "unexpected shape for input"),
    ([json_request("tokens", "FP32", [[1.0]])], "data-type"),
    ([json_request("sentences", "BYTES", [["a"]] * 33)], "32"),
]


def test_triton_answers_a_bad_request_in_one_line(door: Door) -> None:
    check_refused(door.post, REFUSED)
    assert door.post({"inputs": tokens_request([[666]])}) == (
        500,
        {"error": "the model failed: RuntimeError: token 666 cannot be scored"},
    )
    with pytest.raises(InferenceServerException, match="row 1: the text is empty") as caught:
        door.score_over_grpc(["a", ""])
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert door.score_over_grpc(["a"])[0, 0] == total("a")


def send_in_chunks(url: str, number: int) -> bytes:
    """POST this many chunks of one byte, and return the beginning of the answer."""
    host, port = url.removeprefix("http://").split(":")
    head = f"POST /{INFER} HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(head.encode())
        for _ in range(number // 10_000):
            connection.sendall(b"1\r\n{\r\n" * 10_000)
        connection.sendall(b"0\r\n\r\n")
        return connection.recv(64)


def test_triton_survives_600000_chunks_needs_the_token_and_ends_with_its_server(
    tmp_path: Path,
) -> None:
    """Without larger stacks, these chunks from a client without the token would crash Triton."""
    file = tmp_path / "token"
    file.write_text(TOKEN)
    body = {"inputs": [json_request("sentences", "BYTES", [["a"]])]}
    with with_triton(tmp_path, f"token_file={file}", "triton_host=0.0.0.0") as door:
        output = door.server.output()
        assert "Warning: server.triton_host=0.0.0.0 lets other machines reach Triton" in output
        assert "CVE-2025-23310 and CVE-2025-23311" in output
        door.url = door.url.replace("0.0.0.0", "127.0.0.1")
        door.grpc_address = door.grpc_address.replace("0.0.0.0", "127.0.0.1")
        assert send_in_chunks(door.url, 600_000).startswith(b"HTTP/1.1 500 ")
        for headers in ({}, {"Authorization": "Bearer other"}, {"triton_access_token": "other"}):
            status, answer = door.post(body, **headers)
            assert (status, "bearer token is missing or wrong" in answer["error"]) == (400, True)
            named = {name.lower(): value for name, value in headers.items()}
            with pytest.raises(InferenceServerException, match="token is missing or wrong"):
                door.score_over_grpc(["a"], **named)
        for headers in ({"Authorization": f"Bearer {TOKEN}"}, {"triton_access_token": TOKEN}):
            status, answer = door.post(body, **headers)
            assert (status, answer["outputs"][0]["data"][0]) == (200, total("a"))
            named = {name.lower(): value for name, value in headers.items()}
            assert door.score_over_grpc(["a"], **named)[0, 0] == total("a")
        # Not even the server's token allows loading models, mapping memory or changing the log.
        for path in ("repository/index", "systemsharedmemory/status", "logging"):
            status, _ = door.post({}, f"v2/{path}", triton_access_token=TOKEN)
            assert status == 403, path
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in door.server.processes()]
        assert not any(TOKEN.encode() in command for command in commands)
        assert TOKEN not in door.server.output()
        door.server.ranks[0].kill()
        assert door.server.wait(timeout=8) == [-signal.SIGKILL]
        door.server.assert_nothing_is_left()


@contextmanager
def scoring(folder: Path, *settings: str, **how: Any) -> Iterator[tuple[Door, Future[Any]]]:
    """A server that is computing a call of three seconds, and the future of Triton's answer."""
    with with_triton(folder, *settings, **how) as door, ThreadPoolExecutor(1) as pool:
        before = len(batches(door.server))
        slow = pool.submit(door.post, {"inputs": tokens_request([[700]])})
        assert eventually(lambda: len(batches(door.server)) > before)
        yield door, slow


def test_server_that_is_stopped_answers_what_triton_has_in_flight(tmp_path: Path) -> None:
    with scoring(tmp_path) as (door, slow):
        assert door.server.stop(timeout=90) == [0], door.server.output()[-3000:]
        status, answer = slow.result()
        assert (status, answer["outputs"][0]["data"][0]) == (200, 700)
        door.server.assert_nothing_is_left()


@pytest.mark.parametrize("victim", ["bin/tritonserver", "triton_python_backend_stub"])
def test_server_ends_when_its_triton_dies(tmp_path: Path, victim: str) -> None:
    with scoring(tmp_path) as (door, slow):
        pids = door.server.processes(victim)
        assert pids, "nothing to kill"
        killed = time.monotonic()
        os.kill(min(pids), signal.SIGKILL)
        assert door.server.wait(timeout=8) == [1]
        assert time.monotonic() - killed < 3
        assert slow.exception(timeout=8) is not None or slow.result()[0] >= 500
        output = door.server.output()
        assert "The server cannot continue: Triton's " in output
        assert "died; the end of Triton's log:\n  " in output
        door.server.assert_nothing_is_left()


def test_server_whose_triton_does_not_start_is_an_error_at_once() -> None:
    begun = time.monotonic()
    done = subprocess.run(
        [triton_python(), FAKE, "triton_port=0"],
        capture_output=True,
        text=True,
        timeout=60,
        env=tiny.environment(PYTRITON_TRITON_CONFIG_CACHE_CONFIG="nonsense"),
        cwd=tiny.ROOT,
    )
    assert done.returncode == 1
    assert time.monotonic() - begun < 40  # PyTriton alone would wait for two minutes
    _, _, ending = done.stderr.partition("Triton did not start; the end of Triton's log:\n")
    lines = ending.splitlines()
    assert 1 < len(lines) <= 20, done.stderr
    assert all(line.startswith("  ") for line in lines)
