"""Latency of scoring an agent's dialogue after each of its turns, with a reward for each turn.

    python benchmarks/agent.py --model SmolLM2-135M-Instruct.gguf --vllm-python vllm/bin/python

A dialogue grows by a tool's message and a reply. After each reply the whole dialogue is sent as
``messages`` to ``/pooling`` with ``token_classify``: through the gateway to our server with and
without its prefix cache, and to vLLM, which serves the folder that ``nemo-aligner export`` writes
and turns its own cache off for this task. One client sends the requests; the model has a random
head, and runs in fp32 on the CPU. Each dialogue is sent to all servers, one after the other; a time
in the table is the median over the dialogues.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import WorkerFailed, choose_device, machine, render, require, write_json
from serving_model import WORDS, export, prepare_reward_model
from serving_servers import Clients, Contestants, Load, Recipe, Server, start_gateway

OURS, UNCACHED, VLLM = "nemo_aligner", "nemo_aligner without cache", "vLLM"
TOOL_WORDS, REPLY_WORDS = 70, 40  # number of words of a tool's message, and of a reply
_REST_S = 1.0

Dialogue = list[dict[str, str]]


class WithGateway:
    """One of our servers and the gateway in front of it, which are stopped together."""

    def __init__(self, server: Server, gateway: Server) -> None:
        self._both = (gateway, server)

    def stop(self) -> None:
        for process in self._both:
            process.stop()


@dataclass(frozen=True)
class TurnRecipe(Recipe):
    """How to start a server, and how to request the reward of every reply in a dialogue from it.

    Our servers get a gateway in front, because only the gateway answers vLLM's protocol.
    """

    def start(self, log: Path) -> tuple[Any, str]:
        server, url = super().start(log)
        if not self.is_ours:
            return server, url
        folder = log.with_suffix("")
        folder.mkdir(exist_ok=True)
        gateway, url = start_gateway(url, folder)
        return WithGateway(server, gateway), url

    def request(self, messages: Any) -> dict[str, str]:
        body = {"model": "reward", "task": "token_classify", "use_activation": False}
        return {"path": "/pooling", "body": json.dumps({**body, "messages": messages})}


def main() -> None:
    arguments = _parse()
    require("aiohttp", "psutil", "fastapi", "uvicorn")
    # On SIGTERM raise SystemExit: then the ``finally`` block below stops the servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    choose_device("cpu")
    work = Path(arguments.work or tempfile.mkdtemp(prefix="benchmark_"))
    model = prepare_reward_model(arguments.model, work, reads="turns")
    clients = Clients()
    contestants = Contestants(_make_recipes(arguments, model, work), work, clients, _REST_S)
    loads: dict[str, list[Load]] = {OURS: [], UNCACHED: [], VLLM: []}
    rng = random.Random(0)
    try:
        for number in range(arguments.dialogues + 1):
            grown = make_dialogue(rng, arguments.turns)
            for name in loads:
                load = contestants.ask(name, grown, 1, arguments.limit)
                # The first dialogue only warms up the servers.
                if load is not None and number > 0:
                    loads[name].append(load)
    finally:
        contestants.close()
        clients.close()
    rows, difference = make_rows(loads, arguments.turns), largest_difference(loads)
    print(f"\n{render(rows)}\n\nlargest difference between servers' rewards: {difference:.1e}")
    for name, failure in contestants.failures.items():
        print(f"\n{name}: {failure}")
    about = {"machine": machine(), "model": str(arguments.model), "precision": "fp32"}
    print("\n" + ", ".join(f"{key}: {value}" for key, value in about.items()))
    write_json(arguments.output, {**about, "rows": rows, "difference": difference})


def make_dialogue(rng: random.Random, turns: int) -> list[Any]:
    """Make a random dialogue of ``turns`` messages of a tool, each with a reply.

    Returns:
        The dialogues that an agent sends: up to the first reply, up to the second reply, and so on.
    """
    words = WORDS.split()
    dialogue: Dialogue = []
    prefixes = []
    for _ in range(turns):
        for role, count in (("user", TOOL_WORDS), ("assistant", REPLY_WORDS)):
            dialogue.append({"role": role, "content": " ".join(rng.choices(words, k=count))})
        prefixes.append(list(dialogue))
    return prefixes


def make_rows(loads: dict[str, list[Load]], turns: int) -> list[dict[str, Any]]:
    """Build a row of the table for each turn: the median latency in seconds of each server.

    The row also has the latency of each other server divided by that of ours.
    """
    rows = []
    for turn in range(turns):
        seconds = {
            name: median(load.latencies[turn] or 0.0 for load in server_loads)
            for name, server_loads in loads.items()
            if server_loads
        }
        faster = {
            f"{name} / ours": server_seconds / seconds[OURS]
            for name, server_seconds in seconds.items()
            if name != OURS
        }
        rows.append({"turn": turn + 1, **{f"{k}, s": v for k, v in seconds.items()}, **faster})
    return rows


def largest_difference(loads: dict[str, list[Load]]) -> float:
    """Compute how far rewards of other servers are from those of ours.

    Returns:
        The largest difference in the reward of the last turn of a request, over all requests.
    """
    rewards = {
        name: np.array([load.rewards for load in server_rewards])
        for name, server_rewards in loads.items()
        if server_rewards
    }
    ours = rewards.pop(OURS)
    return max(
        (float(np.abs(ours - server_rewards).max()) for server_rewards in rewards.values()),
        default=0.0,
    )


def _make_recipes(arguments: argparse.Namespace, model: Path, work: Path) -> Sequence[Recipe]:
    threads = arguments.threads
    ours = [
        TurnRecipe(OURS, model, threads),
        TurnRecipe(UNCACHED, model, threads, ("server.prefix_cache_tokens=0",)),
    ]
    if arguments.vllm_python is None:
        return ours
    folder = export(model, work / "export")
    return [*ours, TurnRecipe(VLLM, folder, threads, (), arguments.vllm_python)]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        type=Path,
        required=True,
        help="the base model: a .gguf file or a Hugging Face folder",
    )
    parser.add_argument(
        "--vllm-python", help="Python of an environment with vLLM; default: skip vLLM"
    )
    parser.add_argument("--turns", type=int, default=8, help="turns of each dialogue (default 8)")
    parser.add_argument("--dialogues", type=int, default=5, help="number of dialogues (default 5)")
    parser.add_argument(
        "--threads", type=int, default=2, help="threads that each side computes with (default 2)"
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=900.0,
        help="time limit of a dialogue in seconds (default 900)",
    )
    parser.add_argument(
        "--work", help="folder that keeps the converted model; default: a temporary one"
    )
    parser.add_argument("--output", type=Path, metavar="JSON")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except WorkerFailed as error:
        sys.exit(f"nemo_aligner: {error}")
