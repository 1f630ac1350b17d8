"""What servers of others may answer, by one of this process that answers as it is told."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from typing import Any

import numpy as np
import pytest

from nemo_aligner.config.evaluation import SourceConfig
from nemo_aligner.evaluation.sources import open_server
from nemo_aligner.utils.errors import ConfigError, ServingError
from tests.evaluation.refusals import refusal

PATHS = ("/classify", "/get_reward")
Asked = list[tuple[dict[str, Any], str | None]]


class Told(ThreadingHTTPServer):
    """Answers by ``answer``, body to status and body, and keeps what it was asked."""

    answer: Callable[[dict[str, Any]], tuple[int, Any]]
    asked: Asked

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Told

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((body, self.headers.get("Authorization")))
        self.reply(*self.server.answer(body))

    def do_GET(self) -> None:
        self.reply(*self.server.answer({}))

    def reply(self, status: int, content: Any) -> None:
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *unused: object) -> None:
        """Not to the terminal."""


@pytest.fixture
def server() -> Iterator[Told]:
    with Told(("127.0.0.1", 0), Handler) as told:
        told.asked = []
        thread = threading.Thread(target=told.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield told
        told.shutdown()
        thread.join()


def by_length(body: dict[str, Any]) -> tuple[int, Any]:
    """vLLM's or OpenRLHF's answer; a text of more than five letters is refused."""
    texts = body.get("query") or [body.get("input") or body["messages"][-1]["content"]]
    if any(len(text) > 5 for text in texts):
        return 400, {"error": {"message": "too long"}}
    rewards = [float(len(text)) for text in texts]
    return 200, {"data": [{"probs": rewards}], "rewards": rewards}


def ask(url: str, texts: list[Any], **settings: Any) -> np.ndarray:
    with open_server(url, SourceConfig(**settings)) as source:
        return source.scorer.score_rows(texts).rewards


def test_asked_server_refuses_one_text_and_rewards_the_others(server: Told) -> None:
    server.answer = by_length
    texts = [f"{'a' * (1 + number % 5)}" for number in range(40)]
    texts[17] = "a" * 6
    wanted = [[np.nan if len(text) > 5 else len(text)] for text in texts]
    for path in PATHS:
        rewards = ask(f"{server.url}{path}", texts)
        np.testing.assert_array_equal(rewards, wanted, err_msg=path)
        assert ask(f"{server.url}{path}", []).shape == (0, 1)


def test_vllm_is_sent_messages_and_a_token(server: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    server.answer = by_length
    monkeypatch.setenv("A_TOKEN", "secret\n")
    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "abc"}]
    rewards = ask(f"{server.url}/classify/", [said], token_variable="A_TOKEN")
    assert rewards.tolist() == [[3.0]]
    assert server.asked == [({"messages": said, "use_activation": False}, "Bearer secret")]


def test_asked_server_that_answers_otherwise_or_not_at_all_is_an_error(server: Told) -> None:
    wrong = {}
    for path, answer in product(
        PATHS,
        (
            (500, {"detail": "it failed"}),
            (404, "not found"),
            (200, "no JSON"),
            (200, {"data": [], "rewards": [1.0, 2.0, 3.0]}),
            (200, {"data": [{"probs": ["x"]}], "rewards": ["x"]}),
        ),
    ):
        server.answer = lambda body, answer=answer: answer
        said = refusal(ServingError, ask, f"{server.url}{path}", ["a"])
        if f"{server.url}{path}: " not in said:
            wrong[path, str(answer)] = said
    assert not wrong, wrong
    with pytest.raises(ServingError, match=r"127\.0\.0\.1:1/classify: no answer"):
        ask("http://127.0.0.1:1/classify", ["a"])
    with pytest.raises(ConfigError, match="ends in /classify"):
        ask(f"{server.url}/v1/rewards", ["a"])


def test_server_of_another_protocol_is_named_by_its_path(server: Told) -> None:
    """A URL without a path where vLLM answers, which says 404 in one of these ways."""
    for answer in (
        {"error": {"message": "Not Found", "type": "Not Found", "param": None, "code": 404}},
        {"detail": "Not Found"},
        "not found",
    ):
        server.answer = lambda body, answer=answer: (404, answer)
        said = refusal(ServingError, ask, server.url, ["a"])
        urls = (f"{server.url}/classify", f"{server.url}/get_reward")
        assert all(part in said for part in (*urls, "HTTP 404", "not a KServe server")), said
