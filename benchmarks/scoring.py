"""Scoring against transformers, or vLLM: the same weights and tokens, turn by turn.

    python benchmarks/scoring.py --model SmolLM2-135M-Instruct.gguf --data pairs.jsonl
    python benchmarks/scoring.py --vllm-python vllm/bin/python --model ... --data ...

Three kinds of work: both replies of pairs from ``--data``; single replies in the order in which
they come; and a group of 16 replies of about 200 tokens to one prompt of 1,024, as GRPO asks for
it. transformers gets padded batches of ``--batch`` texts, sorted by length or as they come. Both
run in fp32 on the CPU, in bf16 on a GPU. Real tokens are those of the texts, each time they are
asked for; ``ours is faster by`` is the median ratio of the times in a turn. ``products alone`` is
the speed of nothing but the matrix products of the tokens that we compute (what texts begin with in
common is computed once). transformers has a process of its own: where it dies, as on a machine
whose memory is too small for its batch, a dash stands instead of its figures. ``--rows`` and
``--cuda-graphs`` add scorers with other settings, each with weights of its own.

With ``--vllm-python`` the other side is vLLM in that environment, called without a server, and
every turn finds its prefix cache empty.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from common import (
    Worker,
    WorkerFailed,
    choose_device,
    machine,
    median_of_ratios,
    prepare_model,
    render,
    require,
    write_json,
)
from scoring_work import Ours, Products, Work, add_work_options, our_scorer, works_of

_DIFFERENCE, _FASTER = "largest |difference|", "ours is faster by"


def main() -> None:
    arguments = _parse()
    peer_python, script = arguments.transformers_python, "score_transformers.py"
    if arguments.vllm_python is not None:
        peer_python, script = arguments.vllm_python, "score_vllm.py"
    name = script.removeprefix("score_").removesuffix(".py")
    require(name, "torch", python=peer_python)
    device = choose_device(arguments.device)
    import torch

    from nemo_aligner.config.common import Precision
    from nemo_aligner.distributed.launch import launch
    from nemo_aligner.distributed.layout import initialize_layout

    torch.set_num_threads(arguments.threads)
    work = Path(arguments.work or tempfile.mkdtemp(prefix="benchmark_"))
    hf, nemo = prepare_model(arguments.model, work)
    gpu = device == "cuda"
    precision = Precision.bf16 if gpu else Precision.fp32
    with launch():
        layout = initialize_layout()
        scorers = _Scorers()
        for name, settings in _settings(arguments).items():
            load = partial(our_scorer, nemo, precision, layout, freeze=True, settings=settings)
            scorers.add(name, load)
        ours = scorers.usual
        products = None if gpu else Products(ours.model)
        head = work / "head.npy"
        np.save(head, ours.head)
        job = {"hf": str(hf), "head": str(head)}
        peer = _Peer(peer_python, script, job, arguments.threads)
        rows: list[dict[str, Any]] = []
        about = {"machine": machine(), "model": str(arguments.model), "precision": precision.value}
        for each in works_of(arguments.data, arguments.pairs, ours):
            rows += _compare(each, scorers, products, peer, arguments.batch, arguments.turns)
            print(f"\n{render(rows)}", flush=True)
            if peer.failure is not None:
                print(f"\n{peer.name}: {peer.failure}", flush=True)
            # Whoever stops this benchmark has what is measured so far.
            failures = {"failure": peer.failure, "failures": scorers.failures}
            write_json(arguments.output, {**about, "rows": rows, **failures})
        peer.close()
    print("\n" + ", ".join(f"{key}: {value}" for key, value in about.items()))


def _settings(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The settings of each of our scorers, by a name; the defaults come first."""
    named: dict[str, dict[str, Any]] = {"": {}}
    if arguments.rows:
        named = {"rows by default": {}}
    for rows in arguments.rows:
        if rows == 0:
            named["rows as they come"] = {"batch_invariant": False}
        else:
            named[f"{rows:,} rows"] = {"batch_invariant_rows": rows}
    if arguments.cuda_graphs:
        named["rows by default, CUDA graphs"] = {"cuda_graphs": True}
    return named


class _Scorers:
    """Our scorers by the names of their settings; one that fails is dropped, and others go on."""

    def __init__(self) -> None:
        self.named: dict[str, Ours] = {}
        self.failures: list[str] = []

    @property
    def usual(self) -> Ours:
        """The first one, without which there is nothing to compare."""
        return next(iter(self.named.values()))

    def add(self, name: str, load: Callable[[], Ours]) -> None:
        with self._dropping(name):
            self.named[name] = load()

    def warm_up(self, work: Work) -> None:
        """Let each wait for memory and kernels, and capture its graphs; a single one need not."""
        if len(self.named) > 1:
            for name, ours in list(self.named.items()):
                with self._dropping(name):
                    # A graph is captured where a size comes a second time.
                    ours.score(work.token_lists)
                    ours.score(work.token_lists)

    @contextmanager
    def _dropping(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception:
            if name in ("", *list(self.named)[:1]):
                raise
            traceback.print_exc()
            self.named.pop(name, None)
            self.failures.append(f"{name}: {traceback.format_exc()[-1500:]}")


class _Peer:
    """The other side in a process of its own, until that fails; ``failure`` says how it did."""

    def __init__(self, python: str, script: str, job: Mapping[str, Any], threads: int) -> None:
        self.name = "vLLM" if script == "score_vllm.py" else "transformers"
        self.has_batches = self.name == "transformers"
        self._worker = Worker(python, script, job, threads)
        self.failure: str | None = None

    def score(self, work: Work, batch: int) -> tuple[float, np.ndarray] | None:
        """Seconds and rewards, in batches of this size if it has any; None after a failure."""
        if self.failure is not None:
            return None
        asked = {"token_lists": work.token_lists, "is_sorted": work.is_sorted, "batch": batch}
        try:
            found = self._worker.ask(asked)
        except WorkerFailed as error:
            self.failure = str(error)
            return None
        return found["seconds"], np.array(found["rewards"], dtype=np.float32)

    def fastest_batch(self, work: Work, sizes: Sequence[int]) -> int:
        """The size of a batch that takes least time; nothing is run for a single one."""
        if len(sizes) == 1:
            return sizes[0]
        seconds: dict[int, float] = {}
        # Twice, because the first run waits for memory and kernels.
        for size in (*sizes, *sizes):
            found = self.score(work, size)
            if found is not None:
                seconds[size] = found[0]
        return min(seconds, key=lambda size: seconds[size]) if seconds else sizes[0]

    def close(self) -> None:
        self._worker.close()


def _compare(
    work: Work,
    scorers: _Scorers,
    products: Products | None,
    peer: _Peer,
    batches: Sequence[int],
    turns: int,
) -> list[dict[str, Any]]:
    batch = peer.fastest_batch(work, batches)
    scorers.warm_up(work)
    our_seconds: dict[str, list[float]] = {name: [] for name in scorers.named}
    their_seconds: list[float] = []
    difference = 0.0
    before = scorers.usual.computed()
    named = list(scorers.named.items())
    for turn in range(turns):
        rewards = {}
        # Another one is first in each turn, right after the other side has used the GPU.
        first = turn % len(named)
        for name, ours in named[first:] + named[:first]:
            start = time.perf_counter()
            rewards[name] = ours.score(work.token_lists)
            our_seconds[name].append(time.perf_counter() - start)
        found = peer.score(work, batch)
        if found is not None:
            their_seconds.append(found[0])
            largest = max(float(np.abs(each - found[1]).max()) for each in rewards.values())
            difference = max(difference, largest)
    is_whole = len(their_seconds) == turns
    alone = None
    if products is not None:
        alone = len(work.token_lists) / products.seconds(
            (scorers.usual.computed() - before) // turns
        )
    rows = []
    for name, seconds in our_seconds.items():
        ratio = median_of_ratios(seconds, their_seconds) if is_whole else None
        speed = _speed(work, "nemo_aligner", name, seconds)
        rows.append({**speed, "products alone": alone, _DIFFERENCE: "", _FASTER: ratio})
    batched = f"batch {batch}" if peer.has_batches else ""
    theirs = _speed(work, peer.name, batched, their_seconds if is_whole else [])
    largest_difference = difference if is_whole else None
    return [
        *rows,
        {**theirs, "products alone": "", _DIFFERENCE: largest_difference, _FASTER: ""},
    ]


def _speed(work: Work, scorer: str, settings: str, seconds: list[float]) -> dict[str, Any]:
    tokens = sum(map(len, work.token_lists))
    return {
        "work": work.name,
        "scorer": scorer,
        "settings": settings,
        "rewards/s": len(work.token_lists) / median(seconds) if seconds else None,
        "real tokens/s": tokens / median(seconds) if seconds else None,
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_work_options(parser)
    parser.add_argument(
        "--batch",
        type=int,
        nargs="+",
        default=[8],
        help="of transformers; of several the fastest is taken (default 8)",
    )
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[],
        help="also score with these values of model.batch_invariant_rows; 0: not batch invariant",
    )
    parser.add_argument("--cuda-graphs", action="store_true", help="also score with CUDA graphs")
    parser.add_argument(
        "--transformers-python", default=sys.executable, help="with transformers; default: this one"
    )
    parser.add_argument("--vllm-python", help="with vLLM: compare with it instead")
    return parser.parse_args()


if __name__ == "__main__":
    main()
