"""The cost of the server without the model, measured with a tiny model: ``serving.py --tiny``.

``overhead`` is the latency of a request at one client minus the time of a forward pass of the same
tokens in this process by the same scorer. ``mixed`` traffic consists of sentences, conversations
and tokens with 1 to 8 rows, a third of the requests malformed; ``uniform`` traffic of sentences
with four rows. Only rows with a reward count. Every valid request must be answered, and every
malformed one rejected. ``--soak N`` sends N more requests of mixed traffic and shows the memory of
the server's processes.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from common import WorkerFailed, render
from serving_model import WORDS, prepare_reward_model, write_tiny
from serving_servers import Clients, Load, Recipe, Server, kserve_request, percentile, tensor

LENGTH = 32
BUSY_CLIENTS = 64
MAX_ROWS = 8
_WARM_UP = 50
_FORWARDS = 200
_MAX_DISTINCT_REQUESTS = 5000  # if more requests are sent, these are repeated
_UNKNOWN_TOKEN_ID = 10**9


@dataclass(frozen=True)
class TestRequest:
    """A request to a server, and what the answer must be.

    Attributes:
        request: its path and body.
        rows: number of rewards that the answer must have.
        is_malformed: True if the server must reject it.
    """

    request: dict[str, str]
    rows: int
    is_malformed: bool = False


def measure(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Measure and print the tables; return all figures."""
    hf = work / "tiny"
    model = prepare_reward_model(hf if hf.is_dir() else write_tiny(hf), work)
    rng = random.Random(0)
    count = arguments.tiny_requests
    token_lists = [
        [rng.randrange(100, 250) for _ in range(LENGTH)]
        for _ in range(_WARM_UP + _limit_count(count))
    ]
    forward = forward_seconds(model, token_lists[:_FORWARDS])
    recipe = Recipe("nemo_aligner", model, 1, tuple(arguments.server))
    server, url = recipe.start(work / "tiny.log")
    clients = Clients()

    def put(asks: Sequence[TestRequest], at_once: int, count: int) -> Load:
        requests = [ask.request for ask in asks]
        return check(asks, clients.put(url, requests, at_once, arguments.limit, count))

    try:
        tokens = [TestRequest(recipe.request(ids), 1) for ids in token_lists]
        put(tokens[:_WARM_UP], 1, _WARM_UP)
        content = {"latency": [_summarize_latency(put(tokens[_WARM_UP:], 1, count), forward)]}
        print(f"\n{render(content['latency'])}", flush=True)
        content["traffic"] = _measure_traffic(put, count)
        print(f"\n{render(content['traffic'])}", flush=True)
        if arguments.soak:
            content["soak"] = _measure_soak(put, server, arguments.soak)
            print(f"\n{render(content['soak'])}", flush=True)
    finally:
        clients.close()
        server.stop()
    return content


def forward_seconds(model: Path, token_lists: Sequence[list[int]]) -> float:
    """Median seconds of a forward pass of one sequence in this process."""
    import torch

    from nemo_aligner.distributed.launch import launch
    from nemo_aligner.distributed.layout import destroy_layout, initialize_layout
    from nemo_aligner.serving.engine.scorer import load_scorer

    torch.set_num_threads(1)
    with launch():
        scorer = load_scorer(model, initialize_layout())
        seconds = []
        for token_ids in [*token_lists[:_WARM_UP], *token_lists]:
            start = time.perf_counter()
            scorer.score_token_lists([token_ids])
            seconds.append(time.perf_counter() - start)
        destroy_layout()
    return median(seconds[_WARM_UP:])


def check(asks: Sequence[TestRequest], load: Load) -> Load:
    """Check that each valid request got rewards, and each malformed one an error.

    ``load`` has the answers to ``asks``, and is returned.

    Raises:
        WorkerFailed: a request got another answer.
    """
    for number, (status, rewards) in enumerate(zip(load.statuses, load.rewards, strict=True)):
        ask = asks[number % len(asks)]
        is_right = status in (400, 500) if ask.is_malformed else len(rewards or ()) == ask.rows
        if not is_right:
            expected = "an error status" if ask.is_malformed else f"{ask.rows} rewards"
            raise WorkerFailed(
                f"request {number}: got status {status}, wanted {expected}: "
                f"{ask.request['body'][:200]}; {load.messages[:1]}"
            )
    return load


def _summarize_latency(load: Load, forward: float) -> dict[str, Any]:
    p50 = percentile([load], 50) * 1000
    return {
        "one client": f"{len(load.latencies)} requests",
        "p50 ms": p50,
        "p99 ms": percentile([load], 99) * 1000,
        "max ms": percentile([load], 100) * 1000,
        "forward ms": forward * 1000,
        "overhead ms": p50 - forward * 1000,
    }


def _measure_traffic(
    put: Callable[[Sequence[TestRequest], int, int], Load], count: int
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, asks in (("uniform", uniform_requests(count)), ("mixed", mixed_requests(count, 0))):
        load = put(asks, BUSY_CLIENTS, count)
        scored = sum(len(rewards) for rewards in load.rewards if rewards is not None)
        rows.append(
            {
                "traffic": name,
                "clients": BUSY_CLIENTS,
                "requests/s": count / load.seconds,
                "rows/s": scored / load.seconds,
                "p50 ms": percentile([load], 50) * 1000,
                "p99 ms": percentile([load], 99) * 1000,
                "of uniform rows/s": "",
            }
        )
    rows[1]["of uniform rows/s"] = rows[1]["rows/s"] / rows[0]["rows/s"]
    return rows


def _measure_soak(
    put: Callable[[Sequence[TestRequest], int, int], Load], server: Server, count: int
) -> list[dict[str, Any]]:
    first = max(1, count // 10)
    rows = []
    sent = 0
    for part in (first, count - first):
        if part > 0:
            put(mixed_requests(part, sent), BUSY_CLIENTS, part)
        sent += part
        rows.append({"soak": f"after {sent} requests", "resident MiB": server.resident_mib()})
    return rows


def uniform_requests(count: int) -> list[TestRequest]:
    """Make requests with four sentences each; all sentences have the same number of words."""
    rng = random.Random(1)
    return [
        _sentences_request([_draw_words(rng, 12) for _ in range(4)])
        for _ in range(_limit_count(count))
    ]


def mixed_requests(count: int, seed: int) -> list[TestRequest]:
    """Make requests of all kinds and sizes, in an order that ``seed`` determines.

    Every third request is malformed, in a different way each time.
    """
    rng = random.Random(seed + 2)
    asks = []
    for number in range(_limit_count(count)):
        if number % 3 == 2:
            asks.append(_MALFORMED[number // 3 % len(_MALFORMED)](rng))
        else:
            asks.append(rng.choice([_random_sentences, _random_conversations, _random_tokens])(rng))
    return asks


def _limit_count(count: int) -> int:
    return min(count, _MAX_DISTINCT_REQUESTS)


def _draw_words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS.split(), k=count))


def _draw_any_words(rng: random.Random) -> str:
    return _draw_words(rng, rng.randint(1, 24))


def _random_sentences(rng: random.Random) -> TestRequest:
    return _sentences_request([_draw_any_words(rng) for _ in range(rng.randint(1, MAX_ROWS))])


def _random_conversations(rng: random.Random) -> TestRequest:
    rows = [
        [{"role": role, "content": _draw_any_words(rng)} for role in ("user", "assistant")]
        for _ in range(rng.randint(1, MAX_ROWS))
    ]
    return _conversations_request([json.dumps(row) for row in rows])


def _random_tokens(rng: random.Random) -> TestRequest:
    rows = rng.randint(1, MAX_ROWS)
    lengths = [rng.randint(1, 48) for _ in range(rows)]
    width = max(lengths)
    ids = [[rng.randrange(100, 250) for _ in range(width)] for _ in range(rows)]
    return _tokens_request(ids, lengths)


def _sentences_request(texts: Sequence[str], is_malformed: bool = False) -> TestRequest:
    inputs = [tensor("sentences", "BYTES", [[text] for text in texts])]
    return TestRequest(kserve_request(inputs), len(texts), is_malformed)


def _conversations_request(texts: Sequence[str], is_malformed: bool = False) -> TestRequest:
    inputs = [tensor("conversations", "BYTES", [[text] for text in texts])]
    return TestRequest(kserve_request(inputs), len(texts), is_malformed)


def _tokens_request(
    rows: Sequence[Sequence[int]], lengths: Sequence[int], is_malformed: bool = False
) -> TestRequest:
    inputs = [
        tensor("tokens", "INT64", rows),
        tensor("sequence_lengths", "INT64", [[length] for length in lengths]),
    ]
    return TestRequest(kserve_request(inputs), len(rows), is_malformed)


def _without_lengths_request(rng: random.Random) -> TestRequest:
    return TestRequest(kserve_request([tensor("tokens", "INT64", [[101, 102]])]), 1, True)


def _float_tokens_request(rng: random.Random) -> TestRequest:
    inputs = [
        tensor("tokens", "FP32", [[101.0, 102.0]]),
        tensor("sequence_lengths", "INT64", [[2]]),
    ]
    return TestRequest(kserve_request(inputs), 1, True)


def _broken_json_request(rng: random.Random) -> TestRequest:
    return TestRequest({**_random_sentences(rng).request, "body": '{"inputs": ['}, 1, True)


_MALFORMED: list[Callable[[random.Random], TestRequest]] = [
    lambda rng: _sentences_request([_draw_any_words(rng), ""], True),
    lambda rng: _conversations_request([_draw_any_words(rng)], True),
    lambda rng: _conversations_request([json.dumps([{"role": "user"}])], True),
    lambda rng: _tokens_request([[101, _UNKNOWN_TOKEN_ID]], [2], True),
    lambda rng: _tokens_request([[101, 102]], [3], True),
    lambda rng: _tokens_request([[101, 102]], [0], True),
    _without_lengths_request,
    _float_tokens_request,
    _broken_json_request,
]
