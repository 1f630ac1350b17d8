"""Scoring against transformers, or vLLM: the same weights and tokens, turn by turn.

    python benchmarks/scoring.py --model SmolLM2-135M-Instruct.gguf --data pairs.jsonl
    python benchmarks/scoring.py --vllm-python vllm/bin/python --model ... --data ...

Three kinds of work: both replies of pairs from ``--data``; single replies in the order in which
they come; and a group of 16 replies of about 200 tokens to one prompt of 1,024, as GRPO asks for
it. transformers gets padded batches of ``--batch`` texts, sorted by length or as they come. Both
run in fp32 on the CPU, in bf16 on a GPU. Real tokens are those of the texts, each time they are
asked for. ``products alone`` is the speed of nothing but the matrix products of the tokens that we
compute (what texts begin with in common is computed once). transformers has a process of its own:
where it dies, as on a machine whose memory is too small for its batch, a dash stands instead of its
figures.

With ``--vllm-python`` the other side is vLLM in that environment, called without a server, and
every turn finds its prefix cache empty.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
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
        ours = our_scorer(nemo, precision, initialize_layout(), freeze=True)
        products = None if gpu else Products(ours.model)
        head = work / "head.npy"
        np.save(head, ours.head)
        job = {"hf": str(hf), "head": str(head), "batch": arguments.batch}
        peer = _Peer(peer_python, script, job, arguments.threads)
        rows = []
        for each in works_of(arguments.data, arguments.pairs, ours):
            rows += _compare(each, ours, products, peer, arguments.turns)
            print(f"\n{render(rows)}", flush=True)
            if peer.failure is not None:
                print(f"\n{peer.name}: {peer.failure}", flush=True)
        peer.close()
    about = {"machine": machine(), "model": str(arguments.model), "precision": precision.value}
    print("\n" + ", ".join(f"{key}: {value}" for key, value in about.items()))
    write_json(arguments.output, {**about, "rows": rows, "failure": peer.failure})


class _Peer:
    """The other side in a process of its own, until that fails; ``failure`` says how it did."""

    def __init__(self, python: str, script: str, job: Mapping[str, Any], threads: int) -> None:
        self.name = "vLLM" if script == "score_vllm.py" else "transformers"
        self._worker = Worker(python, script, job, threads)
        self.failure: str | None = None

    def score(self, work: Work) -> tuple[float, np.ndarray] | None:
        """Seconds and rewards, None after a failure."""
        if self.failure is not None:
            return None
        asked = {"token_lists": work.token_lists, "is_sorted": work.is_sorted}
        try:
            found = self._worker.ask(asked)
        except WorkerFailed as error:
            self.failure = str(error)
            return None
        return found["seconds"], np.array(found["rewards"], dtype=np.float32)

    def close(self) -> None:
        self._worker.close()


def _compare(
    work: Work, ours: Ours, products: Products | None, peer: _Peer, turns: int
) -> list[dict[str, Any]]:
    our_seconds: list[float] = []
    their_seconds: list[float] = []
    difference = 0.0
    before = ours.computed()
    for _ in range(turns):
        start = time.perf_counter()
        rewards = ours.score(work.token_lists)
        our_seconds.append(time.perf_counter() - start)
        found = peer.score(work)
        if found is not None:
            their_seconds.append(found[0])
            difference = max(difference, float(np.abs(rewards - found[1]).max()))
    is_whole = len(their_seconds) == turns
    compared = {
        "largest |difference|": difference if is_whole else None,
        "ours is faster by": median_of_ratios(our_seconds, their_seconds) if is_whole else None,
    }
    alone = None
    if products is not None:
        alone = len(work.token_lists) / products.seconds((ours.computed() - before) // turns)
    return [
        {
            **_speed(work, "nemo_aligner", our_seconds),
            "products alone": alone,
            **dict.fromkeys(compared, ""),
        },
        {
            **_speed(work, peer.name, their_seconds if is_whole else []),
            "products alone": "",
            **compared,
        },
    ]


def _speed(work: Work, scorer: str, seconds: list[float]) -> dict[str, Any]:
    tokens = sum(map(len, work.token_lists))
    return {
        "work": work.name,
        "scorer": scorer,
        "rewards/s": len(work.token_lists) / median(seconds) if seconds else None,
        "real tokens/s": tokens / median(seconds) if seconds else None,
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_work_options(parser)
    parser.add_argument("--batch", type=int, default=8, help="of transformers (default 8)")
    parser.add_argument(
        "--transformers-python", default=sys.executable, help="with transformers; default: this one"
    )
    parser.add_argument("--vllm-python", help="with vLLM: compare with it instead")
    return parser.parse_args()


if __name__ == "__main__":
    main()
