"""What the server costs beside the model, with a tiny one: the part ``--tiny`` of serving.py.

``overhead`` is how much longer a request at one client takes than the forward pass of the same
tokens, in this process and by the same scorer. ``mixed`` traffic is sentences, conversations and
tokens, of 1 to 8 rows, a third of the requests malformed; ``uniform`` is sentences of four rows.
Only rows with a reward count. Every good request must be answered, and every malformed one refused.
``--soak N`` sends N requests of mixed traffic more, and shows what the server's processes hold.
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
MOST_ROWS = 8
_WARM_UP = 50
_FORWARDS = 200
_DIFFERENT = 5000  # requests at most; more are the same again
_FAR_OUT = 10**9


@dataclass(frozen=True)
class Ask:
    """A request, how many rows it has, and whether it is to be refused."""

    request: dict[str, str]
    rows: int
    is_malformed: bool = False


def measure(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Print the tables; everything that was measured."""
    hf = work / "tiny"
    model = prepare_reward_model(hf if hf.is_dir() else write_tiny(hf), work)
    rng = random.Random(0)
    count = arguments.tiny_requests
    token_lists = [
        [rng.randrange(100, 250) for _ in range(LENGTH)] for _ in range(_WARM_UP + _least(count))
    ]
    alone = forward_seconds(model, token_lists[:_FORWARDS])
    recipe = Recipe("nemo_aligner", model, 1, tuple(arguments.server))
    server, url = recipe.start(work / "tiny.log")
    clients = Clients()

    def put(asks: Sequence[Ask], at_once: int, count: int) -> Load:
        requests = [ask.request for ask in asks]
        return check(asks, clients.put(url, requests, at_once, arguments.limit, count))

    try:
        tokens = [Ask(recipe.request(ids), 1) for ids in token_lists]
        put(tokens[:_WARM_UP], 1, _WARM_UP)
        content = {"latency": [_latency(put(tokens[_WARM_UP:], 1, count), alone)]}
        print(f"\n{render(content['latency'])}", flush=True)
        content["traffic"] = _traffic(put, count)
        print(f"\n{render(content['traffic'])}", flush=True)
        if arguments.soak:
            content["soak"] = _soak(put, server, arguments.soak)
            print(f"\n{render(content['soak'])}", flush=True)
    finally:
        clients.close()
        server.stop()
    return content


def forward_seconds(model: Path, token_lists: Sequence[list[int]]) -> float:
    """The median time of a forward pass of one text, in this process."""
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


def check(asks: Sequence[Ask], load: Load) -> Load:
    """The load, once it is sure that good requests have rewards, and others an error of their own.

    Raises:
        WorkerFailed: one was answered in another way.
    """
    for number, (status, rewards) in enumerate(zip(load.statuses, load.rewards, strict=True)):
        ask = asks[number % len(asks)]
        is_right = status in (400, 500) if ask.is_malformed else len(rewards or ()) == ask.rows
        if not is_right:
            wanted = "a refusal" if ask.is_malformed else f"{ask.rows} rewards"
            raise WorkerFailed(
                f"request {number}: got status {status}, wanted {wanted}: "
                f"{ask.request['body'][:200]}; {load.said[:1]}"
            )
    return load


def _latency(load: Load, alone: float) -> dict[str, Any]:
    p50 = percentile([load], 50) * 1000
    return {
        "one client": f"{len(load.waited)} requests",
        "p50 ms": p50,
        "p99 ms": percentile([load], 99) * 1000,
        "max ms": percentile([load], 100) * 1000,
        "forward ms": alone * 1000,
        "overhead ms": p50 - alone * 1000,
    }


def _traffic(put: Callable[[Sequence[Ask], int, int], Load], count: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, asks in (("uniform", uniform(count)), ("mixed", mixed(count, 0))):
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


def _soak(
    put: Callable[[Sequence[Ask], int, int], Load], server: Server, count: int
) -> list[dict[str, Any]]:
    first = max(1, count // 10)
    found = []
    sent = 0
    for part in (first, count - first):
        if part > 0:
            put(mixed(part, sent), BUSY_CLIENTS, part)
        sent += part
        found.append({"soak": f"after {sent} requests", "resident MiB": server.resident_mib()})
    return found


def uniform(count: int) -> list[Ask]:
    """Sentences of equal length, four in each request."""
    rng = random.Random(1)
    return [_sentences([_words(rng, 12) for _ in range(4)]) for _ in range(_least(count))]


def mixed(count: int, seed: int) -> list[Ask]:
    """Of all kinds and sizes; every third is malformed, each kind of that in its turn."""
    rng = random.Random(seed + 2)
    asks = []
    for number in range(_least(count)):
        if number % 3 == 2:
            asks.append(_MALFORMED[number // 3 % len(_MALFORMED)](rng))
        else:
            asks.append(rng.choice([_any_sentences, _any_conversations, _any_tokens])(rng))
    return asks


def _least(count: int) -> int:
    return min(count, _DIFFERENT)


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS.split(), k=count))


def _any_words(rng: random.Random) -> str:
    return _words(rng, rng.randint(1, 24))


def _any_sentences(rng: random.Random) -> Ask:
    return _sentences([_any_words(rng) for _ in range(rng.randint(1, MOST_ROWS))])


def _any_conversations(rng: random.Random) -> Ask:
    rows = [
        [{"role": role, "content": _any_words(rng)} for role in ("user", "assistant")]
        for _ in range(rng.randint(1, MOST_ROWS))
    ]
    return _conversations([json.dumps(row) for row in rows])


def _any_tokens(rng: random.Random) -> Ask:
    rows = rng.randint(1, MOST_ROWS)
    lengths = [rng.randint(1, 48) for _ in range(rows)]
    width = max(lengths)
    ids = [[rng.randrange(100, 250) for _ in range(width)] for _ in range(rows)]
    return _tokens(ids, lengths)


def _sentences(texts: Sequence[str], is_malformed: bool = False) -> Ask:
    inputs = [tensor("sentences", "BYTES", [[text] for text in texts])]
    return Ask(kserve_request(inputs), len(texts), is_malformed)


def _conversations(texts: Sequence[str], is_malformed: bool = False) -> Ask:
    inputs = [tensor("conversations", "BYTES", [[text] for text in texts])]
    return Ask(kserve_request(inputs), len(texts), is_malformed)


def _tokens(
    rows: Sequence[Sequence[int]], lengths: Sequence[int], is_malformed: bool = False
) -> Ask:
    inputs = [
        tensor("tokens", "INT64", rows),
        tensor("sequence_lengths", "INT64", [[length] for length in lengths]),
    ]
    return Ask(kserve_request(inputs), len(rows), is_malformed)


def _without_lengths(rng: random.Random) -> Ask:
    return Ask(kserve_request([tensor("tokens", "INT64", [[101, 102]])]), 1, True)


def _as_floats(rng: random.Random) -> Ask:
    inputs = [
        tensor("tokens", "FP32", [[101.0, 102.0]]),
        tensor("sequence_lengths", "INT64", [[2]]),
    ]
    return Ask(kserve_request(inputs), 1, True)


def _no_json(rng: random.Random) -> Ask:
    return Ask({**_any_sentences(rng).request, "body": '{"inputs": ['}, 1, True)


_MALFORMED: list[Callable[[random.Random], Ask]] = [
    lambda rng: _sentences([_any_words(rng), ""], True),
    lambda rng: _conversations([_any_words(rng)], True),
    lambda rng: _conversations([json.dumps([{"role": "user"}])], True),
    lambda rng: _tokens([[101, _FAR_OUT]], [2], True),
    lambda rng: _tokens([[101, 102]], [3], True),
    lambda rng: _tokens([[101, 102]], [0], True),
    _without_lengths,
    _as_floats,
    _no_json,
]
