"""Compare our scoring speed with that of transformers or vLLM, on the same weights and tokens.

    python benchmarks/scoring.py --model SmolLM2-135M-Instruct.gguf --data pairs.jsonl
    python benchmarks/scoring.py --vllm-python vllm/bin/python --model ... --data ...

There are three kinds of work: both replies of pairs from ``--data``; single replies in the order of
the file; and a group of 16 replies of about 200 tokens to one prompt of 1,024, as GRPO sends them.
transformers gets padded batches of ``--batch`` sequences, sorted by length or in the order of the
file. Both sides run in fp32 on the CPU, in bf16 on a GPU. "real tokens" are those of the sequences,
without padding, and count as often as they are sent. Both sides take turns to score each work;
``ours is faster by`` is the median over the turns of the ratio of times. ``matmuls alone`` is the
speed of only the matmuls for the tokens that we compute (a shared prefix is computed once).
transformers runs in a separate process: if it dies, for example for lack of memory, a dash replaces
its figures. ``--rows``, ``--cuda-graphs`` and ``--attention-packages`` add scorers with other
settings, each with its own copy of the weights.

With ``--vllm-python`` the other side is vLLM in that environment, called without a server, with an
empty prefix cache in every turn.
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
from scoring_work import Matmuls, OurScorer, Work, add_work_options, make_works, our_scorer

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
        for name, settings in _named_settings(arguments).items():
            load = partial(our_scorer, nemo, precision, layout, freeze=True, settings=settings)
            scorers.add(name, load)
        ours = scorers.usual
        matmuls = None if gpu else Matmuls(ours.model)
        head = work / "head.npy"
        np.save(head, ours.head)
        job = {"hf": str(hf), "head": str(head)}
        peer = _Peer(peer_python, script, job, arguments.threads)
        rows: list[dict[str, Any]] = []
        about = {"machine": machine(), "model": str(arguments.model), "precision": precision.value}
        for scoring_work in make_works(arguments.data, arguments.pairs, ours):
            rows += _compare_work(
                scoring_work, scorers, matmuls, peer, arguments.batch, arguments.turns
            )
            print(f"\n{render(rows)}", flush=True)
            if peer.failure is not None:
                print(f"\n{peer.name}: {peer.failure}", flush=True)
            # Write the results after each kind of work, so that stopping this program loses little.
            failures = {"failure": peer.failure, "failures": scorers.failures}
            write_json(arguments.output, {**about, "rows": rows, **failures})
        peer.close()
    print("\n" + ", ".join(f"{key}: {value}" for key, value in about.items()))


def _named_settings(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Collect the settings of each of our scorers, by its name in the table.

    The scorer with the defaults comes first.
    """
    named: dict[str, dict[str, Any]] = {"": {}}
    if arguments.rows:
        named = {"defaults": {}}
    for rows in arguments.rows:
        if rows == 0:
            named["model.batch_invariant=false"] = {"batch_invariant": False}
        else:
            named[f"model.batch_invariant_rows={rows}"] = {"batch_invariant_rows": rows}
    if arguments.cuda_graphs:
        named["model.cuda_graphs=true"] = {"cuda_graphs": True}
    if arguments.attention_packages:
        from nemo_aligner.models.attention.flash_packages import available_packages

        for package in available_packages():
            named[f"model.attention_kernels={package.value}"] = {"attention_kernels": package}
    return named


class _Scorers:
    """Our scorers by the names of their settings; a scorer that fails is dropped."""

    def __init__(self) -> None:
        self.named: dict[str, OurScorer] = {}
        self.failures: list[str] = []

    @property
    def usual(self) -> OurScorer:
        """The scorer with the default settings. If it has failed, the benchmark ends."""
        return next(iter(self.named.values()))

    def add(self, name: str, load: Callable[[], OurScorer]) -> None:
        with self._dropping(name):
            self.named[name] = load()

    def warm_up(self, work: Work) -> None:
        """Score ``work`` twice with each scorer, untimed, if there are several scorers.

        The first run compiles kernels, and the second one captures CUDA graphs.
        """
        if len(self.named) > 1:
            for name, ours in list(self.named.items()):
                with self._dropping(name):
                    # A graph is captured when a size occurs for the second time.
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
    """The other side (transformers or vLLM), which scores in a separate process.

    If the process has ended, ``failure`` describes how.
    """

    def __init__(self, python: str, script: str, job: Mapping[str, Any], threads: int) -> None:
        self.name = "vLLM" if script == "score_vllm.py" else "transformers"
        self.has_batches = self.name == "transformers"
        self._worker = Worker(python, script, job, threads)
        self.failure: str | None = None

    def score(self, work: Work, batch: int) -> tuple[float, np.ndarray] | None:
        """Let the other side score the N sequences of ``work`` once.

        ``batch`` is the batch size of transformers; vLLM ignores it.

        Returns:
            Seconds and rewards ``[N]``; None once the process has failed.
        """
        if self.failure is not None:
            return None
        request = {"token_lists": work.token_lists, "is_sorted": work.is_sorted, "batch": batch}
        try:
            answer = self._worker.ask(request)
        except WorkerFailed as error:
            self.failure = str(error)
            return None
        return answer["seconds"], np.array(answer["rewards"], dtype=np.float32)

    def fastest_batch(self, work: Work, sizes: Sequence[int]) -> int:
        """Try all batch sizes, and return the fastest.

        If there is only one size, it is returned without a run.
        """
        if len(sizes) == 1:
            return sizes[0]
        seconds: dict[int, float] = {}
        # Each size twice, because the first run allocates memory and compiles kernels.
        for size in (*sizes, *sizes):
            scored = self.score(work, size)
            if scored is not None:
                seconds[size] = scored[0]
        return min(seconds, key=lambda size: seconds[size]) if seconds else sizes[0]

    def close(self) -> None:
        self._worker.close()


def _compare_work(
    work: Work,
    scorers: _Scorers,
    matmuls: Matmuls | None,
    peer: _Peer,
    batches: Sequence[int],
    turns: int,
) -> list[dict[str, Any]]:
    batch = peer.fastest_batch(work, batches)
    scorers.warm_up(work)
    our_seconds: dict[str, list[float]] = {name: [] for name in scorers.named}
    their_seconds: list[float] = []
    difference = 0.0
    computed_before = scorers.usual.computed()
    named = list(scorers.named.items())
    for turn in range(turns):
        rewards = {}
        # Rotate the order, because the first scorer runs right after the other side has used the
        # GPU.
        first = turn % len(named)
        for name, ours in named[first:] + named[:first]:
            start = time.perf_counter()
            rewards[name] = ours.score(work.token_lists)
            our_seconds[name].append(time.perf_counter() - start)
        peer_scored = peer.score(work, batch)
        if peer_scored is not None:
            their_seconds.append(peer_scored[0])
            largest = max(
                float(np.abs(our_rewards - peer_scored[1]).max())
                for our_rewards in rewards.values()
            )
            difference = max(difference, largest)
    is_whole = len(their_seconds) == turns
    matmul_speed = None
    if matmuls is not None:
        matmul_speed = len(work.token_lists) / matmuls.seconds(
            (scorers.usual.computed() - computed_before) // turns
        )
    rows = []
    for name, seconds in our_seconds.items():
        ratio = median_of_ratios(seconds, their_seconds) if is_whole else None
        speed = _speed_columns(work, "nemo_aligner", name, seconds)
        rows.append({**speed, "matmuls alone": matmul_speed, _DIFFERENCE: "", _FASTER: ratio})
    batched = f"batch {batch}" if peer.has_batches else ""
    theirs = _speed_columns(work, peer.name, batched, their_seconds if is_whole else [])
    largest_difference = difference if is_whole else None
    return [
        *rows,
        {**theirs, "matmuls alone": "", _DIFFERENCE: largest_difference, _FASTER: ""},
    ]


def _speed_columns(work: Work, scorer: str, settings: str, seconds: list[float]) -> dict[str, Any]:
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
        help="batch size of transformers; of several, the fastest is used (default 8)",
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
        "--attention-packages",
        action="store_true",
        help="also score with each installed package that model.attention_kernels can name",
    )
    parser.add_argument(
        "--transformers-python",
        default=sys.executable,
        help="Python of an environment with transformers; default: this one",
    )
    parser.add_argument(
        "--vllm-python",
        help="Python of an environment with vLLM; compare with vLLM instead of transformers",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
