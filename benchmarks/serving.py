"""Compare our reward server with vLLM's, on the same weights and token ids, with the same clients.

    python benchmarks/serving.py --model SmolLM2-135M-Instruct.gguf --data pairs.jsonl \\
        --vllm-python vllm/bin/python
    python benchmarks/serving.py --tiny

The servers are measured in turn. Both score one sequence a request with a random head on the CPU,
in fp32 or with ``--precision bf16`` in bf16; vLLM serves the folder that ``nemo-aligner export``
writes. First, the rewards of all servers are compared with those of our model in this process in
fp32. Then the speed is measured for each number of ``--clients``; every client sends its next
request once it has its answer. Kinds of work:

- ``uniform`` and ``lognormal``: distributions of lengths, 224 tokens on average, no shared prefix
- ``pairs``: both replies of pairs from ``--data``, one after the other
- ``shared``: replies of 100 tokens, one by one, to a prompt of 512 that the server has seen before

No turn repeats a sequence of an earlier turn. ``matmuls alone`` is the speed of only the matmuls
for the tokens that no earlier sequence shares as a prefix, one sequence at a time, with as many
threads. ``itself ms`` is the latency at one client minus the time of the forward pass. vLLM runs
without its prefix cache, in ``shared`` with it, and in ``pairs`` both ways. If vLLM is not given,
does not start or fails, dashes replace its figures and its last output is printed below the table.

With ``--tiny`` a tiny model shows the cost of the server itself (see serving_tiny.py).
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import (
    WorkerFailed,
    choose_device,
    machine,
    median_of_ratios,
    render,
    require,
    write_json,
)
from scoring_work import SMALLEST_BUDGET, Matmuls
from serving_model import export, prepare_reward_model
from serving_servers import (
    SEQ_LENGTH,
    Clients,
    Contestants,
    Load,
    Recipe,
    percentile,
    waiting_seconds,
)

OURS, UNCACHED = OUR_SERVERS = ("nemo_aligner", "nemo_aligner without cache")
VLLM_COLD, VLLM_WARM = "vLLM", "vLLM with prefix cache"
KINDS = ("uniform", "lognormal", "pairs", "shared")
CHECKED = 8
PROMPT, REPLY = 512, 100
_MEAN = 224
_SPREAD = 0.8  # standard deviation of the logarithm of a length
_LOWEST_ID = 100  # lower ids may be special tokens
_VLLM_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
# Largest difference from fp32, relative to the largest reward.
_MAX_DIFFERENCE = {"fp32": 1e-2, "bf16": 0.1}


def main() -> None:
    arguments = _parse()
    require("aiohttp", "psutil", "fastapi", "uvicorn")
    # On SIGTERM raise SystemExit: then the ``finally`` block below stops the servers.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    choose_device("cpu")
    work = Path(arguments.work or tempfile.mkdtemp(prefix="benchmark_"))
    work.mkdir(parents=True, exist_ok=True)
    if arguments.tiny:
        from serving_tiny import measure

        content = measure(arguments, work)
    else:
        content = _compare_servers(arguments, work)
    precision = arguments.precision
    about = {"machine": machine(), "model": str(arguments.model or "tiny"), "precision": precision}
    print("\n" + ", ".join(f"{key}: {value}" for key, value in about.items()))
    write_json(arguments.output, {**about, **content})


def _compare_servers(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    reward_model = prepare_reward_model(arguments.model, work)
    pairs, vocabulary = _open_pairs(arguments.data, reward_model)
    checked = pairs.take(CHECKED)
    rewards, matmuls = _score_in_process(reward_model, arguments, checked)
    clients = Clients()
    recipes = _make_recipes(arguments, reward_model, work)
    contestants = Contestants(recipes, work, clients, arguments.rest)
    if arguments.vllm_python is None:
        left_out = "skipped: no --vllm-python"
        contestants.failures.update({VLLM_COLD: left_out, VLLM_WARM: left_out})
    rows: list[dict[str, Any]] = []
    try:
        works = _make_works(arguments, pairs, Draw(vocabulary))
        names = list(dict.fromkeys(name for work_kind in works for name in work_kind.servers))
        differences = _measure_differences(contestants, names, checked, rewards, arguments)
        for work_kind in works:
            rows += _compare_work(work_kind, contestants, matmuls, arguments.turns, arguments.limit)
            print(f"\n{render(rows)}", flush=True)
    finally:
        contestants.close()
        clients.close()
    for name, failure in contestants.failures.items():
        print(f"\n{name}: {failure}", flush=True)
    return {"rows": rows, "differences": differences, "failures": contestants.failures}


def _open_pairs(data: Path, reward_model: Path) -> tuple[Pairs, int]:
    from nemo_aligner.checkpoint.nemo.reward_model import read_text_rules
    from nemo_aligner.distributed.launch import single_process

    with single_process():
        tokenizer, contract = read_text_rules(reward_model)
    assert contract is not None
    rule = contract
    return Pairs(data, lambda text: rule.encode(tokenizer, text).token_ids), tokenizer.vocab_size


def _score_in_process(
    reward_model: Path, arguments: argparse.Namespace, token_lists: list[list[int]]
) -> tuple[np.ndarray, Matmuls]:
    """Score N sequences in this process, to compare the servers with.

    Returns:
        Rewards ``[N]`` in fp32, and a timer of the matmuls in the servers' precision.
    """
    import torch

    from nemo_aligner.checkpoint.nemo.reward_model import load_reward_model
    from nemo_aligner.config.common import Precision
    from nemo_aligner.config.dtypes import torch_dtype
    from nemo_aligner.distributed.launch import launch
    from nemo_aligner.distributed.layout import destroy_layout, initialize_layout
    from nemo_aligner.serving.engine.scorer import RewardScorer

    torch.set_num_threads(arguments.threads)
    with launch():
        layout = initialize_layout()
        loaded = load_reward_model(reward_model, layout)
        model, rule = loaded.model.eval(), loaded.contract
        scorer = RewardScorer(model, rule, loaded.tokenizer, layout, SMALLEST_BUDGET)
        rewards = scorer.score_token_lists(token_lists)[:, 0]
        matmuls = Matmuls(model, torch_dtype(Precision(arguments.precision)))
        destroy_layout()
    return rewards, matmuls


def _make_recipes(arguments: argparse.Namespace, reward_model: Path, work: Path) -> list[Recipe]:
    settings = (f"precision={arguments.precision}", *arguments.server)
    ours = [Recipe(OURS, reward_model, arguments.threads, settings)]
    if arguments.compare_cache:
        uncached_settings = (*settings, "server.prefix_cache_tokens=0")
        ours.append(Recipe(UNCACHED, reward_model, arguments.threads, uncached_settings))
    if arguments.vllm_python is None:
        return ours
    folder = export(reward_model, work / "export")
    python, threads = arguments.vllm_python, arguments.threads
    dtype = ("--dtype", _VLLM_DTYPES[arguments.precision])
    cold = (*dtype, "--no-enable-prefix-caching")
    warm = (*dtype, "--enable-prefix-caching", "--enable-chunked-prefill")
    return [
        *ours,
        Recipe(VLLM_COLD, folder, threads, cold, python),
        Recipe(VLLM_WARM, folder, threads, warm, python),
    ]


def _make_works(arguments: argparse.Namespace, pairs: Pairs, draw: Draw) -> list[Work]:
    works = []
    for kind in arguments.kinds:
        for clients in [1] if kind == "shared" else arguments.clients:
            count = max(arguments.requests, 2 * clients)
            works.append(_make_work(kind, clients, count, pairs, draw, arguments.compare_cache))
    return works


def _make_work(
    kind: str, clients: int, count: int, pairs: Pairs, draw: Draw, compare_cache: bool
) -> Work:
    if kind == "pairs":
        both = (OURS, VLLM_COLD, VLLM_WARM)
        return Work(kind, clients, lambda turn: Requests(pairs.take(count), []), both)
    if kind == "shared":
        ours = (OURS, UNCACHED) if compare_cache else (OURS,)
        return Work(kind, 1, lambda turn: draw.shared(count, 1, turn), (*ours, VLLM_WARM))
    random = {"uniform": draw.uniform, "lognormal": draw.lognormal}[kind]
    return Work(kind, clients, lambda turn: random(count, clients, turn), (OURS, VLLM_COLD))


def _measure_differences(
    contestants: Contestants,
    names: Sequence[str],
    token_lists: list[list[int]],
    rewards: np.ndarray,
    arguments: argparse.Namespace,
) -> dict[str, float]:
    """Compare the rewards of each server with ``rewards``; this also warms the servers up.

    Returns:
        The largest difference, by the name of the server.
    """
    differences = {}
    for name in names:
        for clients in (1, len(token_lists)):
            load = contestants.ask(name, token_lists, clients, arguments.limit)
            if load is not None:
                differences[name] = float(np.abs(np.array(load.rewards)[:, 0] - rewards).max())
    largest = float(np.abs(rewards).max())
    listed = ", ".join(f"{name} {difference:.1e}" for name, difference in differences.items())
    print(f"largest difference from fp32, of rewards of up to {largest:.2f}: {listed}")
    if max(differences.values()) > _MAX_DIFFERENCE[arguments.precision] * largest:
        sys.exit("the rewards differ, so the servers do not compute the same thing")
    return differences


def _compare_work(
    work: Work, contestants: Contestants, matmuls: Matmuls, turns: int, limit: float
) -> list[dict[str, Any]]:
    loads: dict[str, list[Load]] = {name: [] for name in work.servers}
    drawn = []
    for turn in range(turns):
        requests = work.draw(turn)
        drawn.append(requests)
        for name in work.servers:
            if requests.seen:
                contestants.ask(name, requests.seen, 1, limit)
            load = contestants.ask(name, requests.token_lists, work.clients, limit)
            if load is not None:
                loads[name].append(load)
    matmul_speed = median(
        len(requests.token_lists) / sum(map(matmuls.seconds, requests.new_tokens))
        for requests in drawn
    )
    return make_rows(work, drawn, loads, matmul_speed)


def make_rows(
    work: Work,
    drawn: Sequence[Requests],
    loads: Mapping[str, Sequence[Load]],
    matmul_speed: float,
) -> list[dict[str, Any]]:
    """Make a row of the table for each server that gets this kind of work.

    A server that did not answer in every turn has dashes.

    Args:
        drawn: the requests of each turn.
        loads: results of each server, one for each turn.
        matmul_speed: speed of the matmuls alone.
    """
    ours = [load.seconds for load in loads[OURS]]
    rows = []
    for name in work.servers:
        answered = loads[name] if len(loads[name]) == len(drawn) else []
        seconds = [load.seconds for load in answered]
        ratio = median_of_ratios(ours, seconds) if seconds else None
        rows.append(
            {
                "work": work.name,
                "clients": work.clients,
                "server": name,
                **_speed_columns(drawn, answered),
                "itself ms": _own_milliseconds(answered)
                if work.clients == 1 and name in OUR_SERVERS
                else "",
                "matmuls alone": matmul_speed if name == OURS else "",
                "ours is faster by": "" if name == OURS else ratio,
            }
        )
    return rows


def _own_milliseconds(loads: Sequence[Load]) -> float | None:
    """Compute the mean latency without the forward pass, in milliseconds.

    This is the time that the server itself adds to a request; None without ``loads``.
    """
    if not loads:
        return None
    seconds = waiting_seconds(loads)
    computed = sum(load.computed or 0.0 for load in loads)
    return 1000 * (sum(seconds) - computed) / len(seconds)


def _speed_columns(drawn: Sequence[Requests], loads: Sequence[Load]) -> dict[str, Any]:
    if not loads:
        return dict.fromkeys(("rewards/s", "tokens/s", "p50 s", "p99 s"))
    both = list(zip(drawn, loads, strict=True))
    return {
        "rewards/s": median(len(requests.token_lists) / load.seconds for requests, load in both),
        "tokens/s": round(median(requests.tokens / load.seconds for requests, load in both)),
        "p50 s": percentile(loads, 50),
        "p99 s": percentile(loads, 99),
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="base model: a .gguf or a Hugging Face folder")
    parser.add_argument("--data", type=Path, help="file of pairs")
    parser.add_argument("--vllm-python", help="Python with vLLM; default: skip vLLM")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument(
        "--requests",
        type=int,
        default=64,
        help="requests per turn (default 64), at least 2 for each client",
    )
    parser.add_argument("--turns", type=int, default=2, help="turns of each server (default 2)")
    parser.add_argument(
        "--rest", type=float, default=3.0, help="pause before each turn in seconds (default 3)"
    )
    parser.add_argument(
        "--server", action="append", default=[], metavar="KEY=VALUE", help="setting of our server"
    )
    parser.add_argument(
        "--compare-cache",
        action="store_true",
        help='also measure our server without its prefix cache, in the work "shared"',
    )
    parser.add_argument("--precision", choices=[*_VLLM_DTYPES], default="fp32")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="measure the cost of the server itself, with a tiny model",
    )
    parser.add_argument(
        "--tiny-requests",
        type=int,
        default=2000,
        help="with --tiny: number of requests (default 2000)",
    )
    parser.add_argument(
        "--soak",
        type=int,
        default=0,
        metavar="N",
        help="with --tiny: N more requests",
    )
    parser.add_argument("--threads", type=int, default=2, help="threads of each side (default 2)")
    parser.add_argument(
        "--limit", type=float, default=900.0, help="time limit of a turn in seconds (default 900)"
    )
    parser.add_argument("--work", help="folder for the converted model; default: temporary")
    parser.add_argument("--output", type=Path, metavar="JSON")
    arguments = parser.parse_args()
    if not arguments.tiny and (arguments.model is None or arguments.data is None):
        parser.error("pass --model and --data, or --tiny")
    return arguments


# The sequences that are sent to the servers. The benchmark repeats each kind of work in several
# turns (rounds), and no turn repeats a sequence of an earlier turn.


@dataclass(frozen=True)
class Requests:
    """The sequences of one turn, a round of the benchmark in which every server gets the same ones.

    Attributes:
        token_lists: token ids of each timed request, in the order of sending.
        seen: token ids of requests that are sent before the timed ones and are not timed. They put
            a prompt that all timed requests share into the server's prefix cache; empty if the
            timed requests share no prompt.
    """

    token_lists: list[list[int]]
    seen: list[list[int]]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.token_lists))

    @property
    def new_tokens(self) -> list[int]:
        """Number of new tokens of each sequence.

        These are its tokens after the longest prefix that it shares with an earlier sequence.
        """
        counts = []
        for number, text in enumerate(self.token_lists):
            earlier = [*self.seen, *self.token_lists[:number]]
            shared = max((_common_prefix_length(text, other) for other in earlier), default=0)
            counts.append(max(1, len(text) - shared))
        return counts


def _common_prefix_length(text: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(text, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(text), len(other)))


@dataclass(frozen=True)
class Work:
    """One kind of work at one number of clients.

    Attributes:
        name: name of the work in the table.
        clients: number of clients that send at the same time.
        draw: makes the requests of a turn (a round of the benchmark), given its number.
        servers: names of the servers that get them.
    """

    name: str
    clients: int
    draw: Callable[[int], Requests]
    servers: tuple[str, ...]


class Pairs:
    """Hands out the replies of the pairs in a file, with their prompts, as token ids.

    Each pair is handed out once.
    """

    def __init__(self, data: Path, encode: Callable[[Any], list[int]]) -> None:
        self._data = data
        self._encode = encode
        self._records = self._read_pairs()

    def take(self, count: int) -> list[list[int]]:
        """Return the next ``count`` sequences.

        The two replies of a pair follow each other.
        """
        token_lists: list[list[int]] = []
        while len(token_lists) < count:
            record = next(self._records, None)
            if record is None:
                raise SystemExit(f"{self._data}: too few pairs; lower --requests or --turns")
            token_lists += [self._encode(text) for text in record.texts]
        return token_lists[:count]

    def _read_pairs(self) -> Iterator[Any]:
        from nemo_aligner.config.common import RecordKind
        from nemo_aligner.data.readers import ReaderConfig, read_records

        yield from read_records(self._data, ReaderConfig(RecordKind.comparison)).records


class Draw:
    """Draws random token ids for the requests of a turn (a round of the benchmark).

    Each method draws ``count`` timed requests. The random seed depends on the kind of work, on the
    number of clients (``clients``) and on the number of the turn (``turn``), so no turn repeats the
    sequences of another.
    """

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    def uniform(self, count: int, clients: int, turn: int) -> Requests:
        """Draw ``count`` sequences of 64 to 384 tokens, uniformly distributed: 224 on average.

        ``clients`` and ``turn`` only seed the random numbers.
        """
        rng = _make_random("uniform", clients, turn)
        lengths = rng.randint(64, 2 * _MEAN - 64 + 1, count).tolist()
        return Requests(self._ids(rng, lengths), [])

    def lognormal(self, count: int, clients: int, turn: int) -> Requests:
        """Draw ``count`` sequences of log-normal lengths: most are short, a few are very long.

        The distribution has a mean of 224 tokens, as in ``uniform``. ``clients`` and ``turn`` only
        seed the random numbers.
        """
        rng = _make_random("lognormal", clients, turn)
        median = np.log(_MEAN) - _SPREAD**2 / 2
        lengths = np.exp(rng.normal(median, _SPREAD, count)).clip(8, SEQ_LENGTH)
        return Requests(self._ids(rng, lengths.astype(int).tolist()), [])

    def shared(self, count: int, clients: int, turn: int) -> Requests:
        """Draw one prompt with ``count`` different replies, each a timed request.

        One more reply to the prompt is the only request in ``Requests.seen``, which is sent first:
        so the prompt is in the server's prefix cache when the timed requests arrive. ``clients``
        and ``turn`` only seed the random numbers.
        """
        rng = _make_random("shared", clients, turn)
        (prompt,) = self._ids(rng, [PROMPT])
        texts = [[*prompt, *reply] for reply in self._ids(rng, [REPLY] * (count + 1))]
        return Requests(texts[1:], texts[:1])

    def _ids(self, rng: np.random.RandomState, lengths: Sequence[int]) -> list[list[int]]:
        lowest = min(_LOWEST_ID, self._vocabulary // 2)
        return [rng.randint(lowest, self._vocabulary, length).tolist() for length in lengths]


def _make_random(kind: str, clients: int, turn: int) -> np.random.RandomState:
    return np.random.RandomState(zlib.crc32(f"{kind} {clients} {turn}".encode()))


if __name__ == "__main__":
    try:
        main()
    except WorkerFailed as error:
        sys.exit(f"nemo_aligner: {error}")
