"""TLS handshakes: they count as connections, and end in time."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from pathlib import Path

import pytest

from nemo_aligner.serving.front import limits
from nemo_aligner.serving.front.limits import FAILED_HANDSHAKE, NO_ROOM_FOR_HANDSHAKE
from tests.serving.front.running import Client, post, running, wait_until

MEGABYTE = 2**20


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("certificate")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=front"
    command += f" -addext subjectAltName=IP:127.0.0.1 -out {certificate} -keyout {key}"
    subprocess.run(command.split(), check=True, capture_output=True)
    return certificate, key


def test_refusals_arrive_over_tls(certificate: tuple[Path, Path]) -> None:
    with running(certificate) as front:
        front.assert_serves()
        for request, status in (
            (post("/", b"x" * 2 * MEGABYTE), 413),
            (post("/early", b"x" * MEGABYTE), 401),
        ):
            with Client(front) as client:
                client.send(request)
                assert client.answer().status == status
        wait_until(lambda: not front.connections)
        front.assert_serves()


def test_idle_clients_make_room_even_if_they_do_not_answer_the_end_of_tls(
    certificate: tuple[Path, Path],
) -> None:
    with running(certificate, max_open_connections=2) as front, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(Client(front)) for _ in range(2)]
        for client in idle:
            client.send(post("/", b"x"))
            assert client.answer().status == 200
        front.assert_serves()
        # The first client has not read anything since, so that its TLS connection has not ended.
        wait_until(lambda: len(front.connections) == 1, timeout=4)
        assert idle[0].is_closed()
        idle[1].send(post("/", b"x"))
        assert idle[1].answer().status == 200


def test_tls_handshakes_under_way_count_and_end(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "_HANDSHAKE_SECS", 1.0)
    with running(certificate, max_open_connections=4) as front, contextlib.ExitStack() as stack:
        address = ("127.0.0.1", front.port)

        def connect(count: int, content: bytes) -> list[socket.socket]:
            opened = [stack.enter_context(socket.create_connection(address)) for _ in range(count)]
            for each in opened:
                each.settimeout(5)
                each.sendall(content)
            return opened

        # Silent connections, and such that begin a handshake, all count.
        silent = [*connect(2, b""), *connect(2, b"\x16\x03\x01\x02\x00\x01")]
        wait_until(lambda: len(front.connections) == 4)
        with Client(front) as refused:
            assert refused.answer().status == 503
        # Including rejected ones there are at most 4 + 8, even with more clients.
        flood = connect(40, b"")
        wait_until(lambda: len(front.connections) <= 12)
        began = time.monotonic()
        assert [peer.recv(1) for peer in silent] == [b""] * 4
        assert time.monotonic() - began < 2
        for peer in flood:
            with contextlib.suppress(ConnectionResetError):
                assert peer.recv(1) == b""
        wait_until(lambda: not front.connections)
        front.assert_serves()
        # Each one is counted. How many of the flood got room for a handshake depends on timing.
        assert sum(front.aborted.values()) == len(silent) + len(flood)
        assert front.aborted[FAILED_HANDSHAKE] >= len(silent)
        assert front.aborted[NO_ROOM_FOR_HANDSHAKE] > 0
        # Bytes that are no handshake, from clients that leave.
        for peer in connect(3, post("/", b"plain")):
            peer.close()
        wait_until(lambda: not front.connections)
        front.assert_serves()
        assert sum(front.aborted.values()) == len(silent) + len(flood) + 3
        # A server that exits does not wait for a handshake.
        connect(1, b"")
        wait_until(lambda: len(front.connections) == 1)
        began = time.monotonic()
        front.stop()
        assert time.monotonic() - began < 0.9
