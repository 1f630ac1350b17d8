"""Malicious requests: afterwards, the server gives the next good request bit-identical rewards.

Its memory stays bounded, too. ``serving/front/test_connection.py`` tests each limit. Here a whole
server with a model gets requests that have crashed other servers, and ``test_critic_server.py``
sends them to a critic.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from nemo_aligner.serving.client import RewardClient
from tests.serving.servers import FAKE, QUICK, SERVE, Server, running

INFER = "/v2/models/reward_model/infer"
TEXTS = ["a river", "the stone"]
CHUNKS = 600_000  # chunks of one byte: CVE-2025-23310
# Memory that the server may have gained after all attacks. A body may have 16 MiB, and is in memory
# as bytes, as JSON and as tensors at once.
MOST_GROWTH = 400 * 2**20


def exchange(url: str, content: bytes, timeout: float = 60.0) -> bytes:
    """Send bytes over one connection, and return the beginning of the answer."""
    parts = urlsplit(url)
    assert parts.hostname is not None
    with socket.create_connection((parts.hostname, parts.port), timeout=timeout) as connection:
        # The server may reject the request before all of it is sent.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(content)
        try:
            return connection.recv(65536)
        except ConnectionResetError:
            return b""


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode() + body


def chunked(path: str, chunk: bytes, count: int) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return head + (b"%x\r\n%s\r\n" % (len(chunk), chunk)) * count + b"0\r\n\r\n"


def lying_tensor(path: str, shape: list[int], size: int) -> bytes:
    """Eight bytes of token ids with a false shape and size."""
    parameters = {"binary_data_size": size}
    tensor = {"name": "tokens", "shape": shape, "datatype": "INT64", "parameters": parameters}
    text = json.dumps({"inputs": [tensor]}).encode()
    return post(path, text + bytes(8), f"Inference-Header-Content-Length: {len(text)}")


def rewards(texts: str) -> bytes:
    return post("/v1/rewards", f'{{"texts": {texts}}}'.encode())


DEEP = b"[" * 100_000
# (what is sent to an inference path, HTTP status of the answer)
TENSOR_ATTACKS: dict[str, tuple[Callable[[str], bytes], int]] = {
    "one-byte chunks": (lambda path: chunked(path, b"a", CHUNKS), 413),
    "300 MB in chunks": (lambda path: chunked(path, b"a" * 65536, 4600), 413),
    "300 MB by its header": (
        lambda path: (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 300000000\r\n\r\n".encode()
        ),
        413,
    ),
    "a gzip bomb": (
        lambda path: post(path, gzip.compress(bytes(400 * 10**6), 1), "Content-Encoding: gzip"),
        413,
    ),
    "deep JSON tensors": (lambda path: post(path, b'{"inputs": ' + DEEP), 400),
    "a tensor larger than its bytes": (lambda path: lying_tensor(path, [1, 2**40], 8), 400),
    "a tensor with too many bytes": (lambda path: lying_tensor(path, [1, 1], 2**40), 400),
    "a tensor of a negative size": (lambda path: lying_tensor(path, [1, -1], 8), 400),
    "two lengths": (
        lambda path: (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n"
            "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        ).encode(),
        400,
    ),
    "no HTTP": (lambda path: bytes(range(256)) * 64, 400),
    "1 MB of headers": (
        lambda path: f"GET {path} HTTP/1.1\r\nHost: x\r\nA: {'a' * 2**20}\r\n\r\n".encode(),
        431,
    ),
}
TEXT_ATTACKS: dict[str, tuple[Callable[[], bytes], tuple[int, ...]]] = {
    "deep JSON": (lambda: post("/v1/rewards", b'{"texts": ' + DEEP), (400,)),
    "a key twice": (lambda: post("/v1/rewards", b'{"texts": ["a"], "texts": ["b"]}'), (400,)),
    "half a surrogate pair": (lambda: rewards('["\\ud800"]'), (200, 400)),
    "an integer of 5,000 digits": (lambda: rewards(f"[{'1' * 5000}]"), (400,)),
    "NaN for a text": (lambda: rewards("[NaN]"), (400,)),
}


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.") else 0


def memory(server: Server) -> int:
    """Return the resident bytes of rank 0."""
    (line,) = [
        line
        for line in Path(f"/proc/{server.ranks[0].pid}/status").read_text().splitlines()
        if line.startswith("VmRSS")
    ]
    return int(line.split()[1]) * 1024


@pytest.fixture(scope="module")
def attacked(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = [f"rm_model_file={archive}", "server.port=0", "model.micro_batch_tokens=512"]
    with running(tmp_path_factory.mktemp("attacked"), SERVE, *settings) as started:
        yield started
        assert started.stop() == [0], started.output()[-3000:]


def check_survives(
    server: Server, attacks: Iterable[tuple[str, bytes, tuple[int, ...]]], good: Callable[[], bytes]
) -> None:
    """After every attack, the request ``good`` must get the same answer as before."""
    expected, grown_from, wrong = good(), memory(server), {}
    for name, content, statuses in attacks:
        answer = exchange(server.url, content)
        if status_of(answer) not in statuses:
            wrong[name] = answer[:300]
        assert good() == expected, name
    assert wrong == {}
    assert memory(server) - grown_from < MOST_GROWTH
    assert server.ranks[0].poll() is None


def attacks_on_tensors(path: str) -> Iterator[tuple[str, bytes, tuple[int, ...]]]:
    for name, (content, status) in TENSOR_ATTACKS.items():
        yield f"{path}: {name}", content(path), (status,)


def test_server_survives_what_ends_others(attacked: Server) -> None:
    texts = ((name, content(), statuses) for name, (content, statuses) in TEXT_ATTACKS.items())
    attacks = chain(attacks_on_tensors(INFER), texts)
    with RewardClient(attacked.url) as client:
        check_survives(attacked, attacks, lambda: client.score(TEXTS).tobytes())


def test_server_with_a_token_refuses_chunks_before_it_reads_them(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("s3cret")
    with running(tmp_path, FAKE, *QUICK, f"token_file={tmp_path / 'token'}") as server:
        for chunk, count in ((b"a", CHUNKS), (b"a" * 65536, 4600)):
            assert status_of(exchange(server.url, chunked(INFER, chunk, count))) in (401, 413)
        with RewardClient(server.url, token="s3cret") as client:
            assert client.score(["ab"])[0, 0] == 195
        assert server.stop() == [0], server.output()[-3000:]


def test_client_that_leaves_withdraws_its_rows(attacked: Server) -> None:
    """Rows of a client that has left are not computed, so the model is free for others."""
    rows = [[5] * 60] * 512
    body = json.dumps({"tokens": rows}).encode()
    with RewardClient(attacked.url) as client:
        before = client.score(TEXTS)

        def computed() -> float:
            with urllib.request.urlopen(f"{attacked.url}/metrics", timeout=30) as answer:
                lines = answer.read().decode().splitlines()
            name = "nemo_aligner_server_computed_tokens_total"
            (line,) = [line for line in lines if line.startswith(name)]
            return float(line.split()[-1])

        start = computed()
        parts = urlsplit(attacked.url)
        for _ in range(20):
            with socket.create_connection((parts.hostname, parts.port)) as connection:
                connection.sendall(post("/v1/rewards", body))
        np.testing.assert_array_equal(client.score(TEXTS), before)
        assert computed() - start < 10 * 512 * 60
