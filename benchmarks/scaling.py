"""What a training step costs, against sequence length, layers, pairs and ranks.

    python benchmarks/scaling.py                          # a small model; minutes on two CPU cores
    python benchmarks/scaling.py --config base.nemo --tables ranks --micro-batch-tokens 1024

Every point is a synthetic model with random weights, on pairs of random tokens, in processes of its
own: torchrun starts several. Seconds are means over ``--steps`` after one that is not timed, of the
slowest rank, by part: ``data`` waits for packs, ``reduce`` sums gradients over ranks, ``other``
gathers rewards and waits for the adjacent pipeline stages. A checkpoint holds training up for
``save`` and is ``written`` that long after it began. Memory is that of the fullest rank beside what
nemo_aligner/planning/cost.py says: all tensors that live at once on the CPU, what the allocator
handed out on a GPU; ``resident`` is by how much the CPU's process grew, libraries that it loads
meanwhile included.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import (
    WorkerFailed,
    add_device_option,
    choose_device,
    machine,
    render,
    run_ranks,
    write_json,
)

MIB = 2**20
PARTS = ("data", "forward", "backward", "reduce", "optimizer", "other", "save", "written")
PLANNED = ("tp", "pp", "dp", "sequence_parallel", "recompute_layers", "freeze_layers")


@dataclass(frozen=True)
class Size:
    """The point that all tables have in common, by device."""

    layers: int
    hidden: int
    seq_length: int
    pairs: int
    micro_batch_tokens: int


SIZES = {"cpu": Size(4, 256, 256, 8, 2048), "cuda": Size(16, 2048, 1024, 32, 8192)}


def main() -> None:
    arguments = _parse()
    device = choose_device(arguments.device)
    base = _base_job(arguments, device)
    most = arguments.ranks or _default_ranks(device)
    tables = {
        "sequence length": lambda: _lengths(base),
        "layers": lambda: _layers(base),
        "pairs": lambda: _pairs(base),
        "ranks": lambda: _layouts(base, most),
    }
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, jobs in tables.items():
        if arguments.tables and name.split()[0] not in arguments.tables:
            continue
        rows[name] = _measure(name, jobs, arguments.threads)
        print(f"\n{_times(rows[name])}\n\n{_memories(rows[name])}", flush=True)
    about = {
        "machine": machine(),
        "device": device,
        "precision": base["precision"],
        "threads": arguments.threads,
        "model": base["model"],
    }
    print("\n" + ", ".join(f"{key}: {value}" for key, value in about.items() if key != "model"))
    write_json(arguments.output, {**about, "tables": rows})


def _default_ranks(device: str) -> int:
    """As many as there are GPUs; on a CPU two."""
    import torch

    return torch.cuda.device_count() if device == "cuda" else 2


Jobs = Iterator[tuple[str, dict[str, Any]]]


def _lengths(base: dict[str, Any]) -> Jobs:
    """The same tokens in a step, in fewer and longer sequences."""
    tokens = base["pairs"] * 2 * base["sequence_length"]
    for factor in (0.5, 1, 2, 4):
        length = int(base["sequence_length"] * factor)
        pairs = tokens // (2 * length)
        if pairs >= 1 and 2 * length <= base["micro_batch_tokens"]:
            yield str(length), {**base, "sequence_length": length, "pairs": pairs}


def _layers(base: dict[str, Any]) -> Jobs:
    layers = base["model"]["num_layers"]
    for count in (layers // 2, layers, 2 * layers):
        if count >= 1:
            yield str(count), {**base, "model": {**base["model"], "num_layers": count}}


def _pairs(base: dict[str, Any]) -> Jobs:
    for factor in (0.5, 2, 4):
        pairs = int(base["pairs"] * factor)
        if pairs >= 1:
            yield str(pairs), {**base, "pairs": pairs}


def _layouts(base: dict[str, Any], most: int) -> Jobs:
    """One rank, then every layout of twice as many, up to ``most``, that splits one way only."""
    from nemo_aligner.models.shape import ModelShape
    from nemo_aligner.utils.errors import ConfigError

    shape = ModelShape.from_config(base["model"])
    yield "one rank", base
    ranks = 2
    while ranks <= most:
        for name, changes in (
            (f"DP={ranks}", {"dp": ranks}),
            (f"TP={ranks}", {"tp": ranks}),
            (f"TP={ranks}+SP", {"tp": ranks, "sequence_parallel": True}),
            (f"PP={ranks}", {"pp": ranks}),
        ):
            job = {**base, **changes}
            try:
                shape.check_fits(job["tp"], job["pp"])
            except ConfigError as error:
                print(f"{name}: left out: {error}", file=sys.stderr)
                continue
            yield name, job
        ranks *= 2


def _measure(name: str, jobs: Callable[[], Jobs], threads: int) -> list[dict[str, Any]]:
    from nemo_aligner.models.shape import ModelShape
    from nemo_aligner.planning.cost import step_flops
    from nemo_aligner.planning.memory import fullest_stage

    rows = []
    for label, job in jobs():
        print(f"{name}: {label}", file=sys.stderr, flush=True)
        plan, shape = plan_of(job), ModelShape.from_config(job["model"])
        found = run_ranks("scaling_point.py", job, threads, plan.num_ranks)
        expected = fullest_stage(shape, plan)
        rows.append(
            {
                name: label,
                "tokens": found["tokens"],
                "flops": step_flops(shape, plan),
                "processes": plan.num_ranks,
                "seconds": found["seconds"],
                "measured": found["memory"],
                "expected": {**vars(expected), "total": expected.total},
            }
        )
    return rows


def plan_of(job: Mapping[str, Any]) -> Any:
    """The job in the cost model's terms."""
    import torch

    from nemo_aligner.config.common import Precision
    from nemo_aligner.config.model import Recompute
    from nemo_aligner.planning.cost import Plan, even_packs

    mine = -(-job["pairs"] // job["dp"])
    budget = job["micro_batch_tokens"]
    packs = even_packs(mine, job["sequence_length"], budget, job["prefix"])
    if not torch.cuda.is_available():
        packs = replace(packs, kept_keys=1.0)  # a CPU's attention copies no keys
    return Plan(
        packs,
        precision=Precision(job["precision"]),
        recompute=Recompute(job["recompute"]),
        cpu_offload=job.get("cpu_offload", False),
        **{key: job[key] for key in PLANNED},
    )


def _times(rows: list[dict[str, Any]]) -> str:
    """Seconds of a step and of its parts."""
    first = next(iter(rows[0]))
    return render(
        [
            {
                first: row[first],
                "tokens/s": row["tokens"] / row["seconds"]["step"],
                "GFLOP/s a rank": row["flops"] / row["processes"] / row["seconds"]["step"] / 1e9,
                "s/step": row["seconds"]["step"],
                **{part: row["seconds"][part] for part in PARTS},
            }
            for row in rows
        ]
    )


def _memories(rows: list[dict[str, Any]]) -> str:
    """MiB of the fullest rank, as measured and as expected."""
    first = next(iter(rows[0]))
    return render(
        [
            {
                first: row[first],
                **{
                    part: row["measured"][part] / MIB
                    for part in ("weights", "gradients", "optimizer", "step")
                },
                "MiB in all": row["measured"]["total"] / MIB,
                "expected": row["expected"]["total"] / MIB,
                "expected/measured": row["expected"]["total"] / row["measured"]["total"],
                "resident": row["measured"]["resident"] / MIB,
            }
            for row in rows
        ]
    )


def _base_job(arguments: argparse.Namespace, device: str) -> dict[str, Any]:
    size = SIZES[device]
    return {
        "model": _model(arguments, size),
        "tp": 1,
        "pp": 1,
        "dp": 1,
        "sequence_parallel": False,
        "precision": "bf16" if device == "cuda" else "fp32",
        "recompute": arguments.recompute,
        "recompute_layers": arguments.recompute_layers,
        "freeze_layers": arguments.freeze_layers,
        "sequence_length": arguments.seq_length or size.seq_length,
        "prefix": 0,
        "pairs": arguments.pairs or size.pairs,
        "micro_batch_tokens": arguments.micro_batch_tokens or size.micro_batch_tokens,
        "steps": arguments.steps,
        "save": True,
    }


def _model(arguments: argparse.Namespace, size: Size) -> dict[str, Any]:
    """A model_config: the given one, or a Llama of the size asked for."""
    if arguments.config is not None:
        from nemo_aligner.checkpoint.nemo.open import open_nemo

        with open_nemo(arguments.config, with_weights=False) as folder:
            return folder.config
    return synthetic_model(arguments.layers or size.layers, arguments.hidden or size.hidden)


def synthetic_model(layers: int, hidden: int, vocabulary: int = 32000) -> dict[str, Any]:
    """The model_config of a Llama; ``hidden`` is a multiple of 128."""
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": 3 * hidden,
        "num_attention_heads": hidden // 64,
        "num_query_groups": max(2, hidden // 256),
        "kv_channels": 64,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32768,
    }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, help="a .nemo whose shape to take")
    parser.add_argument("--layers", type=int, help="default 4 on a CPU, 16 on a GPU")
    parser.add_argument("--hidden", type=int, help="a multiple of 128 (default 256, or 2048)")
    parser.add_argument("--seq-length", type=int, help="default 256, or 1024")
    parser.add_argument("--pairs", type=int, help="a step (default 8, or 32)")
    parser.add_argument("--micro-batch-tokens", type=int, help="default 2048, or 8192")
    parser.add_argument("--recompute", choices=["none", "selective", "full"], default="none")
    parser.add_argument("--recompute-layers", type=int, help="of a stage, with full; default all")
    parser.add_argument("--freeze-layers", type=int, default=0)
    parser.add_argument(
        "--tables", nargs="+", choices=["sequence", "layers", "pairs", "ranks"], help="default all"
    )
    parser.add_argument("--ranks", type=int, help="most of them (default: GPUs, or 2 on a CPU)")
    parser.add_argument("--steps", type=int, default=3, help="that are timed (default 3)")
    parser.add_argument("--threads", type=int, default=1, help="of a rank (default 1)")
    add_device_option(parser)
    parser.add_argument("--output", type=Path, metavar="JSON")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        main()
    except WorkerFailed as error:
        sys.exit(f"nemo_aligner: {error}")
