"""Cost of a training step against sequence length, layers, pairs and ranks.

    python benchmarks/scaling.py                          # a small model; minutes on two CPU cores
    python benchmarks/scaling.py --config base.nemo --tables ranks --micro-batch-tokens 1024

Every row of a table is a separate run: a model with random weights is trained on pairs of random
tokens, in one process or in several that torchrun starts. Seconds are means over ``--steps`` steps
after an untimed one, on the slowest rank. They are split into parts: ``data`` waits for packs,
``reduce`` sums gradients over ranks, ``other`` is the rest (gathering rewards, and waiting for
adjacent pipeline stages). Saving a checkpoint interrupts training for ``save`` seconds; the
checkpoint is on disk ``written`` seconds after the save began.

Memory is that of the rank that holds most, next to the plan of nemo_aligner/planning: on a CPU all
tensors that live at once, on a GPU what the allocator handed out. ``resident`` is the growth of the
process on a CPU, which includes libraries loaded meanwhile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from common import (
    add_device_option,
    choose_device,
    machine,
    render,
    run_worker,
    start,
    write_json,
)

# torch and the package are imported inside functions: --help does not wait for them, and
# ``choose_device`` must be able to hide the GPU before torch looks for one.

MIB = 2**20
PARTS = ("data", "forward", "backward", "reduce", "optimizer", "other", "save", "written")
# Default size of the model and of a training step, by device. Each table of results varies one of
# these values, or the number of ranks.
SIZES = {
    "layers": {"cpu": 4, "cuda": 16},
    "hidden": {"cpu": 256, "cuda": 2048},
    "seq_length": {"cpu": 256, "cuda": 1024},
    "pairs": {"cpu": 8, "cuda": 32},
    "micro_batch_tokens": {"cpu": 2048, "cuda": 8192},
}


def main() -> None:
    arguments = _parse()
    device = choose_device(arguments.device)
    base = _base_job(arguments, device)
    max_ranks = arguments.ranks or _default_ranks(device)
    tables = {
        "sequence length": lambda: _length_jobs(base),
        "layers": lambda: _layer_jobs(base),
        "pairs": lambda: _pair_jobs(base),
        "ranks": lambda: _layout_jobs(base, max_ranks),
    }
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, jobs in tables.items():
        if arguments.tables and name.split()[0] not in arguments.tables:
            continue
        rows[name] = _measure_jobs(name, jobs, arguments.threads)
        for columns in (_time_columns, _memory_columns):
            table = [{name: row[name], **columns(row)} for row in rows[name]]
            print(f"\n{render(table)}", flush=True)
    about = {
        "machine": machine(),
        "device": device,
        "precision": base["precision"],
        "threads": arguments.threads,
    }
    print("\n" + ", ".join(f"{key}: {value}" for key, value in about.items()))
    write_json(arguments.output, {**about, "model": base["model"], "tables": rows})


def _default_ranks(device: str) -> int:
    """Return the largest number of ranks to measure: the number of GPUs, or 2 on a CPU."""
    import torch

    return torch.cuda.device_count() if device == "cuda" else 2


Jobs = Iterator[tuple[str, dict[str, Any]]]


def _length_jobs(base: dict[str, Any]) -> Jobs:
    """Make the jobs of the table of sequence lengths.

    All have the same number of tokens in a step, in fewer and longer sequences.
    """
    tokens = base["pairs"] * 2 * base["sequence_length"]
    for factor in (0.5, 1, 2, 4):
        length = int(base["sequence_length"] * factor)
        pairs = tokens // (2 * length)
        if pairs >= 1 and 2 * length <= base["micro_batch_tokens"]:
            yield str(length), {**base, "sequence_length": length, "pairs": pairs}


def _layer_jobs(base: dict[str, Any]) -> Jobs:
    layers = base["model"]["num_layers"]
    for count in filter(None, (layers // 2, layers, 2 * layers)):
        yield str(count), {**base, "model": {**base["model"], "num_layers": count}}


def _pair_jobs(base: dict[str, Any]) -> Jobs:
    for pairs in filter(None, (base["pairs"] // 2, 2 * base["pairs"], 4 * base["pairs"])):
        yield str(pairs), {**base, "pairs": pairs}


def _layout_jobs(base: dict[str, Any], max_ranks: int) -> Jobs:
    """Make the jobs of the table that compares kinds of parallelism and numbers of ranks.

    The first runs on one rank, the others on 2, 4, ... ``max_ranks`` ranks, with one kind of
    parallelism each.
    """
    from nemo_aligner.models.shapes.decoder import ModelShape
    from nemo_aligner.utils.errors import ConfigError

    shape = ModelShape.from_config(base["model"])
    yield "one rank", base
    ranks = 2
    while ranks <= max_ranks:
        for name, changes in (
            (f"DP={ranks}", {"dp": ranks}),
            (f"TP={ranks}", {"tp": ranks}),
            (f"TP={ranks}+SP", {"tp": ranks, "sequence_parallel": True}),
            (f"PP={ranks}", {"pp": ranks}),
            (f"CP={ranks}", {"cp": ranks}),
            (f"CP={ranks}+ring", {"cp": ranks, "ring": True}),
        ):
            job = {**base, **changes}
            try:
                shape.check_fits(job["tp"], job["pp"])
            except ConfigError as error:
                print(f"{name}: skipped: {error}", file=sys.stderr)
                continue
            yield name, job
        ranks *= 2


def _measure_jobs(name: str, jobs: Callable[[], Jobs], threads: int) -> list[dict[str, Any]]:
    from synthetic import compare_memory, shape_and_plan

    from nemo_aligner.planning.cost import step_flops
    from nemo_aligner.planning.memory import fullest_stage

    rows = []
    for label, job in jobs():
        print(f"{name}: {label}", file=sys.stderr, flush=True)
        shape, plan = shape_and_plan(job)
        measured = run_worker("synthetic.py", "point", job, threads, ranks=plan.num_ranks)
        expected = fullest_stage(shape, plan)
        rows.append(
            {
                name: label,
                "tokens": measured["tokens"],
                "flops": step_flops(shape, plan),
                "processes": plan.num_ranks,
                "seconds": measured["seconds"],
                "measured": measured["memory"],
                "expected": {**vars(expected), "total": expected.total},
                "memory": compare_memory(measured["memory"], expected, MIB),
            }
        )
    return rows


def _time_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Select the columns with the speed, and the seconds of a step and of its parts, from a row."""
    seconds = row["seconds"]
    return {
        "tokens/s": row["tokens"] / seconds["step"],
        "GFLOP/s a rank": row["flops"] / row["processes"] / seconds["step"] / 1e9,
        "s/step": seconds["step"],
        **{part: seconds[part] for part in PARTS},
    }


def _memory_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """Compute the columns of memory in MiB, for the rank that holds most.

    They are the measured memory, the memory that nemo_aligner/planning predicts, what a step adds,
    and the growth of the process (``resident``).
    """
    measured = row["measured"]
    step, resident = measured["step"] / MIB, measured["resident"] / MIB
    return {**row["memory"], "step": step, "resident": resident}


def _base_job(arguments: argparse.Namespace, device: str) -> dict[str, Any]:
    from synthetic import make_point, synthetic_model

    size = {key: getattr(arguments, key) or usual[device] for key, usual in SIZES.items()}
    if arguments.config is not None:
        from nemo_aligner.checkpoint.nemo.archive import open_nemo

        with open_nemo(arguments.config, with_weights=False) as folder:
            model = folder.config
    else:
        model = synthetic_model(size["layers"], size["hidden"])
    return make_point(
        model,
        "bf16" if device == "cuda" else "fp32",
        recompute=arguments.recompute,
        recompute_layers=arguments.recompute_layers,
        freeze_layers=arguments.freeze_layers,
        sequence_length=size["seq_length"],
        pairs=size["pairs"],
        micro_batch_tokens=size["micro_batch_tokens"],
        steps=arguments.steps,
        save=True,
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, help=".nemo file whose model shape is used")
    parser.add_argument(
        "--layers", type=int, help="number of layers (default 4 on a CPU, 16 on a GPU)"
    )
    parser.add_argument(
        "--hidden",
        type=int,
        help="hidden size, a multiple of 128 (default 256 on a CPU, 2048 on a GPU)",
    )
    parser.add_argument(
        "--seq-length", type=int, help="tokens of a sequence (default 256 on a CPU, 1024 on a GPU)"
    )
    parser.add_argument(
        "--pairs", type=int, help="pairs per step (default 8 on a CPU, 32 on a GPU)"
    )
    parser.add_argument(
        "--micro-batch-tokens",
        type=int,
        help="most tokens of a micro-batch (default 2048 on a CPU, 8192 on a GPU)",
    )
    parser.add_argument("--recompute", choices=["none", "selective", "full"], default="none")
    parser.add_argument(
        "--recompute-layers",
        type=int,
        help="with --recompute full: layers per pipeline stage; default: all",
    )
    parser.add_argument("--freeze-layers", type=int, default=0)
    parser.add_argument(
        "--tables",
        nargs="+",
        choices=["sequence", "layers", "pairs", "ranks"],
        help="tables to measure; default: all",
    )
    parser.add_argument(
        "--ranks", type=int, help="largest number of ranks (default: number of GPUs, or 2 on a CPU)"
    )
    parser.add_argument("--steps", type=int, default=3, help="timed steps (default 3)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each rank (default 1)")
    add_device_option(parser)
    parser.add_argument("--output", type=Path, metavar="JSON")
    return parser.parse_args()


if __name__ == "__main__":
    start(main)
