"""Small HTTP servers in this process that answer like a reward server, or misbehave."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from nemo_aligner.contract.contract import ScoringContract
from nemo_aligner.serving.client import RewardClient
from nemo_aligner.utils.errors import ServingError
from tests.serving.fake_server import CONTRACT, total

Answer = tuple[int, Any]
REFUSED = "!"  # a text that begins with it is rejected


class Answering(BaseHTTPRequestHandler):
    """Answers JSON or bytes, and logs nothing."""

    protocol_version = "HTTP/1.1"

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers["Content-Length"]))

    def answer(self, status: int, content: Any, location: str | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        if location is not None:
            self.send_header("Location", location)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *unused: object) -> None:
        pass


def refuse(texts: list[str], numbered: bool = True) -> Answer | None:
    for row, text in enumerate(texts):
        if text.startswith(REFUSED):
            return 400, {"error": f"row {row}: no {text[1:]}" if numbered else f"no {text[1:]}"}
    return None


def troubled(troubles: Iterable[Answer | Die | None]) -> Callable[[list[str]], Answer | None]:
    """Build an ``answer`` that has these troubles, one per request, and then none."""
    left = iter(troubles)

    def answer(texts: list[str]) -> Answer | None:
        trouble = next(left, None)
        if isinstance(trouble, Die):
            raise trouble
        return trouble

    return answer


class Misbehaving:
    """``answer(texts)`` returns a status and JSON, or None for rewards, or raises Die."""

    def __init__(self, answer: Callable[[list[str]], Answer | None] = refuse) -> None:
        self.answer = answer
        self.asked: list[list[str]] = []
        # Without a contract, like a gateway that has only a judge; or old, like a server of NVIDIA.
        self.contract: ScoringContract | None = CONTRACT
        self.limit, self.is_old, self.port = 32, False, 0
        self.fingerprint: str | None = None  # None like a server of an earlier version
        self.not_ready: Answer | None = None
        self.moved: tuple[int, str] | None = None  # status and URL to which it redirects
        self.goes_on = threading.Event()  # while it is not set, there are no answers
        self.goes_on.set()
        self.prefix = ""  # path prefix of a proxy
        self.most_at_once = self._at_once = 0
        self._lock = threading.Lock()
        self._http: ThreadingHTTPServer | None = None
        self._open: list[socket.socket] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def come(self) -> Misbehaving:
        outer = self

        class Handler(Answering):
            def setup(self) -> None:
                super().setup()
                outer._open.append(self.request)

            def do_GET(self) -> None:
                outer.goes_on.wait(30)
                if outer.moved is not None:
                    return self.answer(outer.moved[0], b"", outer.moved[1] + self.path)
                if not self.path.startswith(f"{outer.prefix}/v2/models/"):
                    return self.answer(404, {"detail": "no such path"})
                self.answer(*(outer.not_ready or (200, {"max_batch_size": outer.limit})))

            def do_POST(self) -> None:
                body = self.body()
                if outer.moved is not None:
                    return self.answer(outer.moved[0], b"", outer.moved[1] + self.path)
                try:
                    answer = outer._post(self.path, body, self.headers)
                    outer.goes_on.wait(30)
                    self.answer(*answer)
                except Die as death:
                    self.wfile.write(death.last_words)
                    self.close_connection = True

        class Http(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128  # with 5, some of many new connections take a second

            def handle_error(self, *unused: object) -> None:
                pass

        self._http = Http(("127.0.0.1", self.port), Handler)
        self.port = self._http.server_address[1]
        loop = self._http.serve_forever
        threading.Thread(target=loop, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def go(self) -> None:
        """Stop listening and reset every connection, as if the process was killed."""
        self.goes_on.set()
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None
        for connection in self._open:
            try:
                linger = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                connection.shutdown(socket.SHUT_RDWR)
                connection.close()
            except OSError:
                pass
        self._open.clear()

    def _post(self, path: str, body: bytes, headers: Any) -> Answer:
        if "/contract/" in path:
            if self.is_old:
                return 404, {"error": "Request for unknown model: 'contract' is not found"}
            if self.contract is None:
                return 400, {"error": "no backend publishes a scoring contract"}
            text = json.dumps(self.contract.to_dict())
            outputs = [output("contract", "BYTES", [1], [text])]
            if self.fingerprint is not None:
                outputs.append(output("model_fingerprint", "BYTES", [1], [self.fingerprint]))
            return 200, {"outputs": outputs}
        texts = sentences(body, int(headers["Inference-Header-Content-Length"]))
        with self._lock:
            self.asked.append(texts)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            return self.answer(texts) or (200, self._rewards(texts))
        finally:
            with self._lock:
                self._at_once -= 1

    def _rewards(self, texts: list[str]) -> Any:
        pairs = [value for text in texts for value in (total(text), -total(text))]
        outputs = [output("rewards", "FP32", [len(texts), 2], pairs)]
        if not self.is_old and self.contract is not None:
            hashes = [self.contract.hash] * len(texts)
            outputs.append(output("contract_hash", "BYTES", [len(texts), 1], hashes))
        if self.fingerprint is not None:
            column = [self.fingerprint] * len(texts)
            outputs.append(output("model_fingerprint", "BYTES", [len(texts), 1], column))
        return {"outputs": outputs}


class Die(Exception):
    """Closes the connection, after the beginning of an answer or after nothing."""

    def __init__(self, last_words: bytes = b"") -> None:
        self.last_words = last_words


def output(name: str, datatype: str, shape: list[int], data: list[Any]) -> dict[str, Any]:
    return {"name": name, "datatype": datatype, "shape": shape, "data": data}


def sentences(body: bytes, length: int) -> list[str]:
    """Decode the texts of a request in KServe's binary form."""
    (asked,) = json.loads(body[:length])["inputs"]
    assert asked["datatype"] == "BYTES"
    texts, rest = [], body[length:]
    while rest:
        (size,) = struct.unpack("<I", rest[:4])
        texts.append(rest[4 : 4 + size].decode())
        rest = rest[4 + size :]
    assert len(texts) == asked["shape"][0]
    return texts


def eventually(condition: Callable[[], Any]) -> bool:
    """Wait up to 20 seconds until a condition holds, and tell whether it does."""
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(condition())


def seconds(work: Any, *given: Any) -> tuple[float, str]:
    """Return the seconds until a call failed, and the error."""
    start = time.monotonic()
    with pytest.raises(ServingError) as caught:
        work(*given)
    return time.monotonic() - start, str(caught.value)


def failure(urls: str | list[str], **settings: Any) -> tuple[float, str]:
    """Return the seconds until a client with these settings failed, and the error."""
    with RewardClient(urls, **settings) as client:
        return seconds(client.score, ["a"])
