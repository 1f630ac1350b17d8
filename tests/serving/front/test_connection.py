"""Limits of a connection: attacks on them, and requests that must pass."""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from nemo_aligner.config.gateway import GatewayConfig
from nemo_aligner.config.serving import ServerConfig
from nemo_aligner.serving.front.limits import (
    ANSWER_NOT_READ,
    CLIENT_LEFT,
    ConnectionLimits,
)
from nemo_aligner.utils.errors import ConfigError
from tests.serving.front.running import (
    LARGE,
    LAST_CHUNK,
    LIMITS,
    Client,
    Front,
    chunk,
    chunked_head,
    get,
    post,
    resident_bytes,
    running,
    wait_until,
)

MEGABYTE = 2**20
ONE_MEGABYTE = b"x" * MEGABYTE
ONE_BYTE_CHUNKS = chunk(b"x") * 10_000


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running() as front:
        yield front


def assert_refused(
    front: Front, status: int, words: str, *pieces: bytes, is_early: bool = True
) -> None:
    """Assert that a request gets this error as its only answer, and then the end."""
    calls = len(front.application.calls)
    count = front.refused.get(status, 0)
    with Client(front) as client:
        client.send(*pieces)
        answer = client.answer()
        assert client.remainder() == b""
    assert (answer.status, answer.headers["connection"]) == (status, "close")
    error = answer.json()["error"]
    assert words in error
    assert (error[-1], error.count(". ")) == (".", 1)
    assert front.refused[status] == count + 1
    if is_early:
        assert len(front.application.calls) == calls
    front.assert_serves()


def test_limits_name_the_section_of_their_settings() -> None:
    limits = ConnectionLimits.of(GatewayConfig(max_chunks=7))
    assert limits.too_many_chunks().text.endswith("or raise gateway.max_chunks.")
    assert ConnectionLimits.of(ServerConfig()).max_header_bytes == 65536
    with pytest.raises(ConfigError, match="max_connection_secs: got -1, wanted 0 or more"):
        ServerConfig(max_connection_secs=-1)


# Sizes.


@pytest.mark.parametrize(
    "head",
    [
        get("/" + "x" * LIMITS.max_header_bytes),
        get("/", "A: " + "x" * LIMITS.max_header_bytes),
        get("/", *["A: b"] * (LIMITS.max_header_bytes // 6)),
        b"\r\n\r\n" * (LIMITS.max_header_bytes // 4 + 1),
        b"GET / HTTP/1.1\r\nA: " + b"x" * MEGABYTE,
    ],
    ids=["url", "header", "headers", "empty lines", "1 MB without an end"],
)
def test_large_heads_are_refused(front: Front, head: bytes) -> None:
    assert_refused(front, 431, "or raise server.max_header_bytes.", head)


def test_the_largest_head_passes(front: Front) -> None:
    padding = LIMITS.max_header_bytes - len(get("/", "A: "))
    assert front.request(get("/", "A: " + "x" * padding)).status == 200
    assert_refused(front, 431, "than 8192 bytes", get("/", "A: " + "x" * (padding + 1)))


def test_a_long_body_is_refused_by_its_length(front: Front) -> None:
    body = b"x" * 300_000
    head = post("/", b"").replace(b"Length: 0", b"Length: 300000000")
    before = resident_bytes()
    # The client sends everything before it reads the answer, and still gets it.
    assert_refused(front, 413, "has 300000000 bytes and the limit is 1048576", head, *[body] * 20)
    with Client(front) as client:
        client.socket.settimeout(3)
        assert client.send(head, *[body] * 1000) < 300_000_000
    assert resident_bytes() - before < 8 * MEGABYTE
    front.assert_serves()


def test_a_long_body_is_refused_as_it_comes_in_chunks(front: Front) -> None:
    before = resident_bytes()
    pieces = [chunk(b"x" * 100_000)] * 200
    words = "or raise server.max_request_bytes."
    assert_refused(front, 413, words, chunked_head("/"), *pieces, is_early=False)
    assert resident_bytes() - before < 8 * MEGABYTE


def test_600_000_chunks_of_one_byte_cost_little(front: Front) -> None:
    before = resident_bytes()
    start = time.thread_time()
    words = "has more than 1000 chunks"
    pieces = [ONE_BYTE_CHUNKS] * 60
    assert_refused(front, 413, words, chunked_head("/"), *pieces, is_early=False)
    assert time.thread_time() - start < 1
    assert resident_bytes() - before < 8 * MEGABYTE


@pytest.mark.parametrize(
    ("status", "words", "body"),
    [
        (431, "chunk extensions and trailers", chunk(b"x", b";a=" + b"b" * 30) * 900),
        (431, "chunk extensions and trailers", b"5;a=" + b"b" * MEGABYTE),
        (431, "chunk extensions and trailers", b"0" * MEGABYTE),
        (431, "chunk extensions and trailers", b"0\r\n" + b"A: b\r\n" * 200_000),
        (413, "or empty lines", chunk(b"\r\n\r\n" * 100_000)),
    ],
    ids=["extensions", "extension", "zeros", "trailers", "empty lines"],
)
def test_floods_between_chunks_are_refused(
    front: Front, status: int, words: str, body: bytes
) -> None:
    before = resident_bytes()
    pieces = [body[i : i + 1000] for i in range(0, len(body), 1000)]
    assert_refused(front, status, words, chunked_head("/"), *pieces, is_early=False)
    assert resident_bytes() - before < 8 * MEGABYTE


def test_the_largest_bodies_pass(front: Front) -> None:
    body = b"x" * LIMITS.max_request_bytes
    assert front.request(post("/", body)).json()["bytes"] == MEGABYTE
    pieces = [chunk(body[:1000])] * 999 + [chunk(body[999_000:])]
    assert front.request(chunked_head("/"), *pieces, LAST_CHUNK).json()["bytes"] == MEGABYTE
    of_gym = "/ng-rollout/a/aggregate_metrics?b"
    assert front.request(post(of_gym, body * 12)).json()["bytes"] == 12 * MEGABYTE
    assert_refused(front, 413, f"is {12 * MEGABYTE}.", post(of_gym, body * 12 + b"x"))
    one_more = [*[chunk(b"x")] * 1001, LAST_CHUNK]
    words = "has more than 1000 chunks"
    assert_refused(front, 413, words, chunked_head("/"), *one_more, is_early=False)


def test_chunks_are_joined_however_they_are_cut(front: Front) -> None:
    data = b"a\r\n\r\nb0\r\n\r\n\r\n"
    extension = b';a="b"'
    request = chunked_head("/cut") + chunk(data, extension) + chunk(data)
    request += b"0\r\nAuthorization: Bearer x\r\nLast: 1\r\n\r\n" + get("/next")
    for size in (1, 2, 3, 5, len(request)):
        with Client(front) as client:
            client.send(*[request[i : i + size] for i in range(0, len(request), size)])
            shown = client.answer().json()
            assert shown["body"].encode() == data * 2
            # Trailers do not become headers.
            assert shown["headers"] == ["host", "transfer-encoding"]
            assert client.answer().json()["path"] == "/next"


# Ambiguous and invalid requests.


@pytest.mark.parametrize(
    "head",
    [
        "Content-Length: 2\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 2",
        "Content-Length: 2\r\nContent-Length: 3",
        "Content-Length: 2, 2",
        "Content-Length: +2",
        "Content-Length: 2_0",
        "Content-Length: 99999999999999999999999",
        "Transfer-Encoding: gzip, chunked",
        "Transfer-Encoding: chunked, identity",
        "Transfer-Encoding: xchunked",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding : chunked",
        "Transfer-Encoding:\r\n chunked",
        "A: b\nTransfer-Encoding: chunked",
        "A: b\rTransfer-Encoding: chunked",
        "A: b\r\n\rTransfer-Encoding: chunked",
        "A: b\x00",
        "A: b\n",
        "Host: other",
        "Authorization: Bearer a\r\nAuthorization: Bearer b",
    ],
)
def test_ambiguous_requests_are_refused(front: Front, head: str) -> None:
    request = f"POST /smuggled HTTP/1.1\r\nHost: front\r\n{head}\r\n\r\n".encode()
    assert_refused(front, 400, "not valid HTTP/1.1", request + LAST_CHUNK + get("/smuggled"))


@pytest.mark.parametrize(
    "request_",
    [
        b"GET / HTTP/1.1\nHost: front\n\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/2.0\r\n\r\n",
        b"GET / HTTP/1.2\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT front:80 HTTP/1.1\r\n\r\n",
        b"GET front:80 HTTP/1.1\r\n\r\n",
        b"GET /\xc3\xa9 HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n" + LAST_CHUNK,
    ],
)
def test_other_protocols_are_refused(front: Front, request_: bytes) -> None:
    assert_refused(front, 400, "Fix the client", request_)


@pytest.mark.parametrize("end", [b"2\nab\r\n", b"2\r\nab\n0\r\n\r\n", b"x\r\n", b"2\r\nabc\r\n"])
def test_broken_chunks_are_refused(front: Front, end: bytes) -> None:
    request = chunked_head("/") + chunk(b"ab") + end
    assert_refused(front, 400, "not valid HTTP/1.1", request, is_early=False)


def test_http_1_0_is_answered_and_closed(front: Front) -> None:
    with Client(front) as client:
        client.send(b"POST /old HTTP/1.0\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\nab")
        shown = client.answer().json()
        assert (shown["version"], shown["body"]) == ("1.0", "ab")
        assert client.is_closed()


def test_targets_may_be_absolute(front: Front) -> None:
    with Client(front) as client:
        client.send(get("http://front:1/a%20b?c=d"), get("http://front"), get("//a"))
        targets = [client.answer().json() for _ in range(3)]
    shown = [(target["path"], target["query"]) for target in targets]
    assert shown == [("/a b", "c=d"), ("/", ""), ("//a", "")]


def test_continue_is_sent_to_the_requests_that_are_read(front: Front) -> None:
    expect = "Expect: 100-continue"
    with Client(front) as client:
        client.send(post("/read", b"ab", expect)[:-2])
        assert client.answer().status == 100
        client.send(b"ab")
        assert client.answer().json()["body"] == "ab"
    with Client(front) as client:
        client.send(post("/early", b"ab", expect)[:-2])
        answer = client.answer()
        assert (answer.status, answer.headers["connection"]) == (401, "close")
        assert client.is_closed()
    long = post("/", b"", expect).replace(b"Length: 0", b"Length: 2000000")
    assert_refused(front, 413, "has 2000000 bytes", long)


@pytest.mark.parametrize(
    "request_",
    [
        get("/up", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"),
        post("/up", b"abc", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c"),
        chunked_head("/up", "Connection: Upgrade", "Upgrade: h2c") + chunk(b"abc") + LAST_CHUNK,
    ],
    ids=["websocket", "h2c", "h2c in chunks"],
)
def test_upgrades_are_answered_as_plain_http(front: Front, request_: bytes) -> None:
    with Client(front) as client:
        client.send(request_ + request_ + get("/after"))
        for _ in range(2):
            answer = client.answer()
            assert answer.status == 200
            assert answer.json()["body"] == ("" if request_.startswith(b"GET") else "abc")
        assert client.answer().json()["path"] == "/after"


# Answers before the end of a request.


def test_an_early_answer_of_the_application_is_the_last(front: Front) -> None:
    before = resident_bytes()
    with Client(front) as client:
        client.send(post("/early", b"x" * MEGABYTE))
        answer = client.answer()
        assert (answer.status, answer.headers["connection"]) == (401, "close")
        assert client.remainder() == b""
    with Client(front) as client:
        client.send(chunked_head("/early"), *[chunk(b"x" * 2**16)] * 160)
        assert client.answer().status == 401
        assert client.remainder() == b""
    # After a complete request, the connection stays open.
    with Client(front) as client:
        client.send(post("/early", b"x"), get("/next"))
        answers = [client.answer(), client.answer()]
        assert [answer.status for answer in answers] == [401, 200]
        assert "connection" not in answers[0].headers
    assert resident_bytes() - before < 8 * MEGABYTE
    front.assert_serves()


def test_a_client_that_never_stops_sending_is_cut_off(front: Front) -> None:
    with Client(front) as client:
        client.send(chunked_head("/early"))
        assert client.answer().status == 401
        start = time.monotonic()
        while time.monotonic() - start < 5 and client.send(b"x"):
            time.sleep(0.05)
    assert 0.5 < time.monotonic() - start < 3
    wait_until(lambda: not front.connections)


@pytest.mark.parametrize("path", ["/raise", "/nothing"])
def test_a_failing_application_is_an_error_of_the_server(front: Front, path: str) -> None:
    answer = front.request(get(path))
    assert (answer.status, answer.headers["connection"]) == (500, "close")
    assert answer.json()["error"].startswith("The server failed on this request.")
    front.assert_serves()


# Timeouts.


def test_1_000_slow_clients_get_a_408() -> None:
    head = post("/", b"")[:-4].replace(b"Length: 0", b"Length: 9")
    with running(receive_timeout_secs=0.8) as front, contextlib.ExitStack() as stack:
        front.assert_serves()
        before = resident_bytes()
        clients = [stack.enter_context(Client(front)) for _ in range(1000)]
        for number, client in enumerate(clients):
            # Some requests end in the request line, some in a header, some in the body.
            client.send((b"POST /", head, head + b"\r\n\r\n1234")[number % 3])
        for _ in range(3):
            time.sleep(0.2)
            for client in clients:
                client.send(b"5")
            front.assert_serves()
        assert resident_bytes() - before < 48 * MEGABYTE
        answers = [client.answer() for client in clients]
        assert {answer.status for answer in answers} == {408}
        assert "within 0.8 seconds" in answers[0].json()["error"]
        assert front.refused == {408: 1000}
        assert all(client.remainder() == b"" for client in clients)
        front.assert_serves()
        wait_until(lambda: not front.connections)


def test_idle_connections_are_closed() -> None:
    with running(keep_alive_secs=0.4) as front, Client(front) as fresh, Client(front) as used:
        used.send(get("/"))
        assert used.answer().status == 200
        start = time.monotonic()
        assert used.is_closed()
        assert fresh.is_closed()
        assert 0.2 < time.monotonic() - start < 2
        assert front.refused == {}
        front.assert_serves()


def test_a_connection_in_use_outlives_both_times() -> None:
    with running(keep_alive_secs=0.4, receive_timeout_secs=0.4) as front, Client(front) as client:
        for _ in range(8):
            client.send(get("/"))
            assert client.answer().status == 200
            time.sleep(0.1)


def test_an_old_connection_ends_with_its_next_answer() -> None:
    with running(max_connection_secs=0.5) as front, contextlib.ExitStack() as stack:
        idle, waiting, pipelined = (stack.enter_context(Client(front)) for _ in range(3))
        for client in (idle, waiting, pipelined):
            client.send(get("/young"))
            assert "connection" not in client.answer().headers
        waiting.send(get("/pause"))
        pipelined.send(get("/pause"), get("/second"), get("/third"))
        # The age counts when the answer begins.
        assert waiting.answer().headers["connection"] == "close"
        assert waiting.is_closed()
        # All pipelined requests are answered.
        answers = [pipelined.answer() for _ in range(3)]
        assert [answer.json()["path"] for answer in answers] == ["/pause", "/second", "/third"]
        assert ["connection" in answer.headers for answer in answers] == [False, False, True]
        assert pipelined.is_closed()
        # An idle connection stays open, because its client may be sending a request.
        idle.send(get("/old"))
        assert idle.answer().headers["connection"] == "close"
        assert idle.is_closed()
        assert front.aborted == {}


def test_lifetimes_of_connections_differ_by_up_to_a_fifth() -> None:
    lifetimes = [LIMITS.draw_lifetime() for _ in range(200)]
    assert 48 <= min(lifetimes) < 55 < 65 < max(lifetimes) <= 72
    assert replace(LIMITS, max_connection_secs=0).draw_lifetime() == math.inf


def test_a_client_that_takes_no_answer_is_cut_off() -> None:
    with running(receive_timeout_secs=0.6) as front, Client(front) as client:
        client.send(get("/large") * 20)
        # A client that reads the answer slowly is not cut off.
        with Client(front) as slow:
            slow.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            slow.send(get("/large") * 2)
            for _ in range(16):
                assert len(slow.file.read(LARGE // 8)) == LARGE // 8
                time.sleep(0.1)
        wait_until(lambda: not front.connections)
        assert front.aborted == {ANSWER_NOT_READ: 1}
        assert front.application.calls.count("/large") == 4
        front.assert_serves()


def test_long_computations_are_not_cut_off() -> None:
    with running(keep_alive_secs=0.5, receive_timeout_secs=0.5) as front, Client(front) as client:
        client.send(get("/large"), get("/pause"))
        # The second request is read while the first answer has not been read yet.
        wait_until(lambda: "/pause" in front.application.calls)
        assert len(client.answer().body) == LARGE
        assert client.answer().json()["path"] == "/pause"


def test_a_body_that_the_application_does_not_read_stays_in_its_socket(front: Front) -> None:
    with Client(front) as client:
        sender = threading.Thread(
            target=client.send, args=(get("/first") + post("/pause", ONE_MEGABYTE),)
        )
        sender.start()
        wait_until(lambda: "/pause" in front.application.calls)
        time.sleep(0.1)
        (connection,) = front.connections
        assert len(connection.cycle.body) < MEGABYTE // 2
        assert client.answer().json()["path"] == "/first"
        assert client.answer().json()["bytes"] == MEGABYTE
        sender.join()


def test_half_closed_connections_are_closed(front: Front) -> None:
    wait_until(lambda: not front.connections)
    num_before = front.aborted.get(CLIENT_LEFT, 0)
    for request in (b"", b"POST / HT", post("/", b"abc")[:-1], get("/wait/half-closed")):
        with Client(front) as client:
            client.send(request)
            client.socket.shutdown(socket.SHUT_WR)
            assert client.is_closed()
    wait_until(lambda: not front.connections)
    # All except the one that has sent nothing have left inside a request.
    assert front.aborted == {CLIENT_LEFT: num_before + 3}
    front.assert_serves()


def test_vanished_peers_are_probed(front: Front) -> None:
    with Client(front) as client:
        client.send(get("/"))
        assert client.answer().status == 200
        (connection,) = front.connections
        peer = connection.transport.get_extra_info("socket")
        assert peer.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60


# Limits of the number of connections and requests.


def test_connections_above_the_limit_get_a_503() -> None:
    with running(max_open_connections=4) as front:
        with contextlib.ExitStack() as stack:
            # None is idle: three requests are computed, and one is not complete.
            clients = [stack.enter_context(Client(front)) for _ in range(4)]
            clients[0].send(get("/")[:-1])
            for client in clients[1:]:
                client.send(get("/wait"))
            wait_until(lambda: len(front.application.calls) == 3)
            with Client(front) as client:
                client.send(get("/"))
                answer = client.answer()
                assert (answer.status, answer.headers["retry-after"]) == (503, "1")
                assert "has 4 open connections" in answer.json()["error"]
                assert client.is_closed()
            # Connections that get this answer are limited, too.
            crowd = [stack.enter_context(Client(front)) for _ in range(100)]
            wait_until(lambda: front.refused == {503: 1 + len(crowd)})
            wait_until(lambda: len(front.connections) <= 4 + 8, timeout=0.5)
            clients[0].send(get("/")[-1:])
            assert clients[0].answer().status == 200
        wait_until(lambda: not front.connections)
        front.assert_serves()


def test_at_the_limit_the_longest_idle_connection_makes_room() -> None:
    with running(max_open_connections=4) as front, contextlib.ExitStack() as stack:
        *idle, busy = [stack.enter_context(Client(front)) for _ in range(4)]
        for client in [*idle, idle[0]]:
            client.send(get("/"))
            assert client.answer().status == 200
        busy.send(get("/wait"))
        wait_until(lambda: "/wait" in front.application.calls)
        # A health check is answered. Idle the longest is the second client.
        check = stack.enter_context(Client(front))
        check.send(get("/health"))
        assert check.answer().status == 200
        assert idle[1].is_closed()
        for client in (idle[2], idle[0], check):
            client.send(get("/"))
            assert client.answer().status == 200
        # Clients that only connect make room for each other, and their number is limited.
        for _ in range(100):
            stack.enter_context(Client(front))
        wait_until(lambda: len(front.connections) <= 4)
        assert front.application.cancelled == []
        front.assert_serves()


def test_10_000_pipelined_requests_are_answered_in_order(front: Front) -> None:
    count = 10_000
    requests = b"".join(get(f"/{number}") for number in range(count))
    before = resident_bytes()
    with Client(front) as client:
        sender = threading.Thread(target=client.send, args=(requests,))
        sender.start()
        for number in range(count):
            answer = client.answer()
            assert b'"path": "/%d"' % number in answer.body
            # A request sees no context variable of an earlier one.
            assert b'"visitor": "nobody"' in answer.body
        sender.join()
    assert resident_bytes() - before < 16 * MEGABYTE
    front.assert_serves()


def test_pipelined_requests_of_a_client_that_never_reads_stay_in_its_socket(front: Front) -> None:
    before = resident_bytes()
    with Client(front) as client:
        client.socket.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.send(*[get("/unread") * 10_000] * 1000)
        front.assert_serves()
        assert resident_bytes() - before < 16 * MEGABYTE
    wait_until(lambda: not front.connections)


def test_requests_may_be_cut_anywhere(front: Front) -> None:
    request = post("/cut", b"abc")
    for end in range(len(request)):
        with Client(front) as client:
            client.send(request[:end])
    for end in range(1, len(request)):
        with Client(front) as client:
            client.send(request[:end])
            client.send(request[end:])
            assert client.answer().json()["body"] == "abc"
    wait_until(lambda: not front.connections)
    front.assert_serves()


# Clients that leave, and a server that exits.


@pytest.mark.parametrize("is_reset", [False, True])
def test_requests_of_clients_that_leave_are_cancelled(
    front: Front, is_reset: bool, caplog: pytest.LogCaptureFixture
) -> None:
    name, num_before = f"/wait/{is_reset}", front.aborted.get(CLIENT_LEFT, 0)
    with Client(front) as client:
        client.send(post(name, b"abc"), get("/wait/pipelined"))
        wait_until(lambda: name in front.application.calls)
        if is_reset:
            linger = struct.pack("ii", 1, 0)
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    wait_until(lambda: front.application.cancelled[-1:] == [name], timeout=1)
    wait_until(lambda: not front.server.server_state.tasks)
    assert "/wait/pipelined" not in front.application.calls
    assert front.aborted[CLIENT_LEFT] == num_before + 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    front.assert_serves()


def test_requests_in_flight_when_the_server_exits_get_a_503() -> None:
    with running() as front, Client(front) as waiting, Client(front) as idle, Client(front) as half:
        waiting.send(get("/wait/exit"))
        half.send(b"GET / HT")
        wait_until(lambda: len(front.application.calls) == 1 and len(front.connections) == 3)
        front.stop()
        answer = waiting.answer()
        assert (answer.status, answer.headers["connection"]) == (503, "close")
        assert front.application.cancelled == ["/wait/exit"]
        assert idle.is_closed()
        assert half.is_closed()
