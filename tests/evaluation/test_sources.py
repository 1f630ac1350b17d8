"""Sources of rewards: one model behind each has the same rewards, and bad answers of servers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_aligner.config.evaluation import EvaluateConfig, SourceConfig
from nemo_aligner.config.load import load_config
from nemo_aligner.contract.messages import Conversation
from nemo_aligner.evaluation.run import evaluate
from nemo_aligner.evaluation.sources import open_server
from nemo_aligner.serving.client.pool import NoServerError
from nemo_aligner.utils.errors import AlignerError, ConfigError, ServingError
from nemo_aligner.utils.processes import describe_error
from tests.checkpoint.hf.exporting import export
from tests.evaluation.refusals import refusal
from tests.harness import tiny
from tests.harness.launching import free_port
from tests.serving.client.misbehaving import Misbehaving
from tests.serving.servers import SERVE, gateway, running

# One model as an archive, as an export, and behind three protocols.

ATTRIBUTES = ("helpfulness", "verbosity")
NO_MODEL = f"expect_fingerprint={'0' * 32}"
WEIGHTS = "source.attribute_weights={helpfulness: 1, verbosity: 1}"


def run(folder: Path, name: str, *settings: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Evaluate; return the lines of ``output_rewards``, and the content of ``output``."""
    rows, report = folder / f"{name}.jsonl", folder / f"{name}.json"
    outputs = (f"output_rewards={rows}", f"output={report}")
    evaluate(load_config(EvaluateConfig, [*settings, *outputs]))
    return [json.loads(line) for line in rows.open()], json.loads(report.read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An archive, its export, and files to measure them on."""
    from nemo_aligner.distributed.launch import launch
    from nemo_aligner.distributed.layout import initialize_layout

    folder = tmp_path_factory.mktemp("sources")
    tiny.write_reward_nemo(folder / "rm.nemo", seq_length=64, add_bos=False, add_eos=False)
    with launch():
        export(folder / "rm.nemo", folder / "hf", initialize_layout())
    tiny.write_pairs(folder / "pairs.jsonl", 24)
    tiny.write_ratings(folder / "rated.jsonl", 16, ATTRIBUTES)
    return folder


@pytest.fixture(scope="module")
def sources(folder: Path) -> Iterator[dict[str, list[str]]]:
    """Settings of every source except the archive."""
    pytest.importorskip("fastapi")
    for name in ("server", "gateway"):
        (folder / name).mkdir()
    serve = (SERVE, f"rm_model_file={folder / 'rm.nemo'}")
    with (
        running(
            folder / "server", *serve, "server.port=0", "model.micro_batch_tokens=256"
        ) as own_server,
        gateway(folder / "gateway", f"backends=[{own_server.url}]") as proxy,
    ):
        yield {
            "export": [f"hf_model={folder / 'hf'}"],
            "ours": [f"server={own_server.url}"],
            "vllm": [f"server={proxy.url}/classify", WEIGHTS],
            "openrlhf": [f"server={proxy.url}/get_reward", f"source.tokenizer={folder / 'hf'}"],
        }


def pair_rewards(rows: list[dict[str, Any]]) -> np.ndarray:
    return np.array([[row["rewards"][side] for side in ("chosen", "rejected")] for row in rows])


def test_every_source_has_the_same_rewards_and_verdicts(
    folder: Path, sources: dict[str, list[str]]
) -> None:
    """On pairs, on ratings, and on a benchmark with a robustness check."""
    sample = {"input": "a red dog", "output_1": "thank you", "output_2": "a cat", "label": 1}
    long = {**sample, "output_2": "a cat " * 100}
    (folder / "llmbar.json").write_text(json.dumps([sample, long]))
    pairs, rated = (f"data.path={folder / name}.jsonl" for name in ("pairs", "rated"))
    task = (f"data.path={folder / 'llmbar.json'}", "task=llmbar", "robustness_pairs=1")
    model = f"rm_model_file={folder / 'rm.nemo'}"

    archive, report = run(folder, "archive", model, pairs)
    assert report["counts"]["overlong"] > 0, "some should exceed seq_length"
    expected = pair_rewards(archive)
    for name, settings in sources.items():
        rows, content = run(folder, name, *settings, pairs)
        assert [row["record"] for row in rows] == [row["record"] for row in archive], name
        rewards = pair_rewards(rows)
        np.testing.assert_allclose(rewards, expected, atol=1e-4, err_msg=name)
        verdicts = [np.sign(both[:, 0] - both[:, 1]).tolist() for both in (rewards, expected)]
        assert verdicts[0] == verdicts[1], name
        key = "overlong" if name == "export" else "refused"
        assert content["counts"][key] == report["counts"]["overlong"], name
        # An export has the contract in its folder; the protocols of vLLM and OpenRLHF have none.
        assert (content["contract"] == report["contract"]) == (name in ("ours", "export"))

    archive, report = run(folder, "archive", model, rated)
    for name in ("export", "ours", "vllm"):
        rows, content = run(folder, name, *sources[name], rated)
        for row, other in zip(rows, archive, strict=True):
            assert row["rewards"] == pytest.approx(other["rewards"], abs=1e-4)
            assert row["labels"] == other["labels"]
        assert content["metrics"]["loss"] == pytest.approx(report["metrics"]["loss"], abs=1e-4)

    _, report = run(folder, "archive", model, *task)
    assert report["left_out"] == {"too long": 1}
    for name in ("ours", "vllm"):
        _, content = run(folder, name, *sources[name], *task)
        assert content["left_out"] == {"without a reward": 1}
        changes = zip(content["robustness"]["rows"], report["robustness"]["rows"], strict=True)
        for row, other in changes:
            assert row == pytest.approx(other, abs=1e-4)


def test_source_that_settings_do_not_fit_is_rejected(
    folder: Path, sources: dict[str, list[str]]
) -> None:
    wrong = {}
    for name, setting, kind, message in (
        ("vllm", "source.attribute_weights={a: 1}", ServingError, "got 2 numbers for a sample"),
        ("openrlhf", "source.tokenizer=null", ConfigError, "source.tokenizer: got none"),
        ("openrlhf", WEIGHTS, ConfigError, "/get_reward answers one number"),
        ("export", "source.attribute_weights={a: 1}", ConfigError, "helpfulness, verbosity"),
        ("vllm", "expect_contract=ab", ConfigError, "expect_contract: got ab, but "),
        ("ours", "expect_contract=ab", ConfigError, "wanted ab"),
        ("vllm", NO_MODEL, ConfigError, "expect_fingerprint: got 0000"),
        ("export", NO_MODEL, ConfigError, "expect_fingerprint: got 0000"),
        ("ours", NO_MODEL, ServingError, "wanted 0000"),
        ("ours", "precision=bf16", AlignerError, "precision: got 'bf16', wanted null"),
        ("ours", WEIGHTS, ConfigError, "source.attribute_weights: got "),
        ("export", "source.timeout_s=1", ConfigError, "source.timeout_s: got 1"),
        ("vllm", "source.token_variable=NO_SUCH", ConfigError, "NO_SUCH is not set: export it"),
    ):
        data = f"data.path={folder / 'pairs.jsonl'}"
        error = refusal(kind, run, folder, "wrong", *sources[name], data, setting)
        if message not in error:
            wrong[name, setting] = error
    assert not wrong, wrong


# A server of this process that answers as a test says.

PATHS = ("/classify", "/get_reward")
# Body and Authorization header of each request.
Requests = list[tuple[dict[str, Any], str | None]]


class ScriptedServer(ThreadingHTTPServer):
    """A server that answers a request with ``answer(body)``: status and body; keeps requests."""

    answer: Callable[[dict[str, Any]], tuple[int, Any]]
    received: Requests

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.received.append((body, self.headers.get("Authorization")))
        self.reply(*self.server.answer(body))

    def do_GET(self) -> None:
        self.reply(*self.server.answer({}))

    def reply(self, status: int, content: Any) -> None:
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        if 300 <= status < 400:
            self.send_header("Location", content)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *unused: object) -> None:
        """Do not log to the terminal."""


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer(("127.0.0.1", 0), Handler) as scripted:
        scripted.received = []
        thread = threading.Thread(target=scripted.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield scripted
        scripted.shutdown()
        thread.join()


@pytest.fixture
def own_server() -> Iterator[Misbehaving]:
    """A server of this package's protocol."""
    started = Misbehaving().come()
    yield started
    started.go()


def by_length(body: dict[str, Any]) -> tuple[int, Any]:
    """Answer as vLLM or OpenRLHF do; a text of more than five letters is rejected."""
    texts = body.get("query") or [body.get("input") or body["messages"][-1]["content"]]
    if any(len(text) > 5 for text in texts):
        return 400, {"error": {"message": "too long"}}
    rewards = [float(len(text)) for text in texts]
    return 200, {"data": [{"probs": rewards}], "rewards": rewards}


def query(url: str, texts: list[Any], **settings: Any) -> np.ndarray:
    with open_server(url, SourceConfig(**settings)) as source:
        return source.scorer.score_rows(texts).rewards


def test_server_rejects_one_text_and_scores_the_others(server: ScriptedServer) -> None:
    server.answer = by_length
    texts = [f"{'a' * (1 + number % 5)}" for number in range(40)]
    texts[17] = "a" * 6
    expected = [[np.nan if len(text) > 5 else len(text)] for text in texts]
    for path in PATHS:
        rewards = query(f"{server.url}{path}", texts)
        np.testing.assert_array_equal(rewards, expected, err_msg=path)
        assert query(f"{server.url}{path}", []).shape == (0, 1)


def test_vllm_is_sent_messages_and_a_token(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answer = by_length
    monkeypatch.setenv("A_TOKEN", "secret\n")
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "abc"}]
    rewards = query(f"{server.url}/classify/", [messages], token_variable="A_TOKEN")
    assert rewards.tolist() == [[3.0]]
    body = {"messages": messages, "use_activation": False}
    assert server.received == [(body, "Bearer secret")]
    # Beside the messages, vLLM ignores these.
    variables: dict[str, Any] = {"tools": [{"function": {"name": "f"}}], "documents": [{"a": "b"}]}
    query(f"{server.url}/classify", [Conversation(messages, **variables)])
    assert server.received[1:] == [({**body, "chat_template_kwargs": variables}, None)]


def test_server_that_answers_otherwise_or_not_at_all_is_an_error(server: ScriptedServer) -> None:
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
        error = refusal(ServingError, query, f"{server.url}{path}", ["a"])
        if f"{server.url}{path}: " not in error:
            wrong[path, str(answer)] = error
    assert not wrong, wrong
    with pytest.raises(ServingError, match=r"127\.0\.0\.1:1/classify: no answer"):
        query("http://127.0.0.1:1/classify", ["a"])
    with pytest.raises(ConfigError, match="/classify"):
        query(f"{server.url}/v1/rewards", ["a"])


def test_server_that_redirects_is_named_with_its_right_url(server: ScriptedServer) -> None:
    """A followed redirect would turn the POST into a GET."""
    server.answer = lambda body: (301, "http://elsewhere/classify")
    for path in PATHS:
        error = refusal(ServingError, query, f"{server.url}{path}", ["a"])
        expected = "it redirects to http://elsewhere/classify; use that URL"
        assert error.endswith(f"{server.url}{path}: {expected}"), error
    assert len(server.received) == len(PATHS)


def test_time_limit_is_that_of_a_request_and_not_of_a_whole_file(
    own_server: Misbehaving,
) -> None:
    hold = threading.Event()
    own_server.answer = lambda texts: time.sleep(0.15)
    own_server.limit = 4
    texts = ["a"] * 576  # 9 requests for each of the 16 connections
    started_at = time.monotonic()
    assert query(own_server.url, texts, timeout_s=1.0).shape == (576, 2)
    assert time.monotonic() - started_at > 1.0
    own_server.answer = lambda texts: hold.wait(30) and None if texts[0] == "b" else None
    ask = partial(query, timeout_s=0.5)
    error = refusal(ServingError, ask, own_server.url, [*"aaaabbbb"])
    hold.set()
    assert "no answer to a request within 0.5 s (source.timeout_s)" in error
    assert error.endswith("; 4 of 8 rows were answered")


def test_server_of_another_protocol_is_named_by_its_path(server: ScriptedServer) -> None:
    """vLLM answers a URL without a path with 404, in one of these forms."""
    for answer in (
        {"error": {"message": "Not Found", "type": "Not Found", "param": None, "code": 404}},
        {"detail": "Not Found"},
        "not found",
    ):
        server.answer = lambda body, answer=answer: (404, answer)
        error = refusal(ServingError, query, server.url, ["a"])
        urls = (f"{server.url}/classify", f"{server.url}/get_reward")
        assert all(part in error for part in (*urls, "HTTP 404", "not a KServe server")), error


def test_server_of_a_url_that_cannot_be_read_is_rejected() -> None:
    config = load_config(EvaluateConfig, ["server=http://[::1", "data.path=pairs.jsonl"])
    error = refusal(ConfigError, evaluate, config)
    assert error.startswith("server: got http://[::1; wanted http://HOST:PORT"), error


def test_server_that_is_not_there_is_advised_on_as_a_setting_of_evaluate() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    config = load_config(EvaluateConfig, [f"server={url}", "data.path=pairs.jsonl"])
    with pytest.raises(ServingError) as caught:
        evaluate(config)
    message = describe_error(caught.value)
    assert message.startswith(f"ServingError: server: {url}")
    assert message.endswith(f". Start the server, or correct the address in server={url}.")
    assert "wait_s" not in message
    assert describe_error(NoServerError("trouble", "advice")) == "ServingError: trouble; advice"
