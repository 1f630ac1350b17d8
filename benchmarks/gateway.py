"""Latency that the gateway adds to a request, measured on the server of a tiny model.

    python benchmarks/gateway.py --requests 300 --turns 5

The same token ids, one sequence a request, are sent in turn to the server over KServe, and to the
gateway over ``/v1/rewards`` and vLLM's ``/classify``. With one client, the median latency of each
turn is compared with the server's in the same turn, and every reward must be bit-identical. With
``--clients`` clients the throughput in requests a second is measured.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import WorkerFailed, choose_device, machine, render, require, write_json
from serving_model import prepare_reward_model, write_tiny
from serving_servers import Clients, Load, Recipe, percentile, start_gateway

LENGTH = 32
LIMIT_S = 300.0
_WARM_UP = 50
_ATOL = 2e-5  # allowed difference between rewards of the same text in different batches
DIRECT = "server, KServe"

Request = dict[str, str]
Ask = Callable[[list[int]], Request]


def rewards_request(token_ids: Sequence[int]) -> Request:
    """A request in this package's protocol for the reward of one token sequence."""
    return {"path": "/v1/rewards", "body": json.dumps({"tokens": [token_ids]})}


def classify_request(token_ids: Sequence[int]) -> Request:
    """A request in vLLM's protocol for the reward of one token sequence."""
    body = {"model": "reward", "input": token_ids, "use_activation": False}
    return {"path": "/classify", "body": json.dumps(body)}


def main() -> None:
    arguments = _parse()
    require("aiohttp", "psutil", "fastapi", "uvicorn")
    # On SIGTERM raise SystemExit: then the ``finally`` block below stops the servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    choose_device("cpu")
    work = Path(arguments.work or tempfile.mkdtemp(prefix="benchmark_"))
    work.mkdir(parents=True, exist_ok=True)
    hf = work / "tiny"
    model = prepare_reward_model(hf if hf.is_dir() else write_tiny(hf), work)
    recipe = Recipe("nemo_aligner", model, 1)
    server, url = recipe.start(work / "server.log")
    try:
        gateway, gateway_url = start_gateway(url, work)
        try:
            routes = {
                DIRECT: (url, recipe.request),
                "gateway, /v1/rewards": (gateway_url, rewards_request),
                "gateway, /classify": (gateway_url, classify_request),
            }
            rows = _measure(routes, arguments)
        finally:
            gateway.stop()
    finally:
        server.stop()
    print(f"\n{render(rows)}", flush=True)
    if arguments.json:
        write_json(arguments.json, {"machine": machine(), "gateway": rows})


def _measure(
    routes: dict[str, tuple[str, Any]], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    rng = random.Random(0)
    clients = Clients()
    one_client: dict[str, list[Load]] = {name: [] for name in routes}
    many_clients: dict[str, list[Load]] = {name: [] for name in routes}

    def put(name: str, token_lists: Sequence[list[int]], at_once: int) -> Load:
        url, ask = routes[name]
        requests = [ask(token_ids) for token_ids in token_lists]
        return clients.put(url, requests, at_once, LIMIT_S, len(requests))

    try:
        for name in routes:
            put(name, _draw_texts(rng, _WARM_UP), 1)
        for _ in range(arguments.turns):
            # Send all texts once before timing: the first request of a text cannot use the cache.
            texts = _draw_texts(rng, arguments.requests)
            put(DIRECT, texts, arguments.clients)
            for loads, at_once, atol in (
                (one_client, 1, 0.0),
                (many_clients, arguments.clients, _ATOL),
            ):
                for name in routes:
                    loads[name].append(put(name, texts, at_once))
                _check_rewards([loads[name][-1] for name in routes], atol)
    finally:
        clients.close()
    return [_summarize_route(name, one_client, many_clients, arguments.clients) for name in routes]


def _draw_texts(rng: random.Random, count: int) -> list[list[int]]:
    return [[rng.randrange(100, 250) for _ in range(LENGTH)] for _ in range(count)]


def _check_rewards(loads: Sequence[Load], atol: float) -> None:
    """Compare the rewards that came through the gateway with the server's (``loads[0]``).

    Raises:
        WorkerFailed: a request has no reward, or one that differs by more than ``atol``.
    """
    first = _read_rewards(loads[0])
    for load in loads:
        apart = float(np.abs(_read_rewards(load) - first).max())
        if apart > atol:
            raise WorkerFailed(
                f"a reward through the gateway differs by {apart} from the server's; at most "
                f"{atol} is allowed"
            )


def _read_rewards(load: Load) -> np.ndarray:
    if load.rejected:
        raise WorkerFailed(f"{load.rejected} requests have no reward: {load.messages[:1]}")
    return np.array(load.rewards, dtype=np.float32)


def _summarize_route(
    name: str, one_client: dict[str, list[Load]], many_clients: dict[str, list[Load]], at_once: int
) -> dict[str, Any]:
    added = [
        percentile([load], 50) - percentile([direct], 50)
        for load, direct in zip(one_client[name], one_client[DIRECT], strict=True)
    ]
    return {
        "route": name,
        "p50 ms": percentile(one_client[name], 50) * 1000,
        "p99 ms": percentile(one_client[name], 99) * 1000,
        "added ms": median(added) * 1000,
        "most added ms": max(added) * 1000,
        f"requests/s, {at_once} clients": median(
            len(load.latencies) / load.seconds for load in many_clients[name]
        ),
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--requests", type=int, default=300, help="number of requests per turn (default 300)"
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--clients",
        type=int,
        default=32,
        help="concurrent clients in the throughput test (default 32)",
    )
    parser.add_argument("--work", help="folder for the model and logs (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="JSON file to write the measurements to")
    return parser.parse_args()


if __name__ == "__main__":
    main()
