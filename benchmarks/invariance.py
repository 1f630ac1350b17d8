"""What batch invariance costs, and what it brings: rewards/s, and rewards of other bits.

    python benchmarks/invariance.py --model SmolLM2-135M-Instruct.gguf --data pairs.jsonl

The three kinds of work of scoring.py, in fp32 and bf16 (in bf16 alone on a GPU), with products as
they come, and of fixed numbers of rows; turn by turn. ``other bits`` counts the rewards that are
not bit for bit those of the text alone. On a CPU other numbers of rows are taken, too, where they
give the same bits; with ``--fixed`` they are not. A GPU has the numbers that its trial took as one
setting, ``tried``, and products of one number of rows as others; what the trial found is printed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from common import choose_device, machine, prepare_model, render, write_json
from scoring_work import Ours, Work, add_work_options, our_scorer, works_of

ROWS: dict[str, tuple[int | str | None, ...]] = {
    "cpu": (None, 64, 128, 256, 512),
    "cuda": (None, "tried", 256, 1024),
}
Setting = int | str | None


def main() -> None:
    arguments = _parse()
    device = choose_device(arguments.device)
    import torch

    from nemo_aligner.config.common import Precision
    from nemo_aligner.distributed.launch import launch
    from nemo_aligner.distributed.layout import initialize_layout

    torch.set_num_threads(arguments.threads)
    if arguments.fixed:
        _take_no_other_rows()
    work = Path(arguments.work or tempfile.mkdtemp(prefix="benchmark_"))
    _, nemo = prepare_model(arguments.model, work)
    rows: list[dict[str, Any]] = []
    with launch():
        layout = initialize_layout()
        for precision in (Precision.fp32, Precision.bf16)[device == "cuda" :]:
            ours = our_scorer(nemo, precision, layout)
            for each in works_of(arguments.data, arguments.pairs, ours):
                rows += _compare(each, ours, precision.value, ROWS[device], arguments.turns)
                print(f"\n{render(rows)}", flush=True)
    about = {
        "machine": machine(),
        "model": str(arguments.model),
        "fixed": arguments.fixed,
        "trial": _tried_sizes() if device == "cuda" else None,
    }
    print("\n" + ", ".join(f"{key}: {value}" for key, value in about.items()))
    write_json(arguments.output, {**about, "rows": rows})


def _take_no_other_rows() -> None:
    from nemo_aligner.cpu import products

    products._has_same_bits = lambda size, weight, bias, rows: size == rows


# Of each setting what a GPU's trials found.
_TRIED: dict[Setting, dict[Any, tuple[int, ...]]] = {}


def _set_rows(model: Any, setting: Setting) -> None:
    from nemo_aligner.config.model import ROWS_BY_DEVICE
    from nemo_aligner.distributed import gpu_products
    from nemo_aligner.models.batch_invariance import make_batch_invariant

    gpu_products._TRIED = _TRIED.setdefault(setting, {})
    if setting == "tried":
        make_batch_invariant(model, ROWS_BY_DEVICE)
        return
    assert not isinstance(setting, str)
    sizes, gpu_products._SIZES = gpu_products._SIZES, ()
    make_batch_invariant(model, setting)
    gpu_products._SIZES = sizes


def _tried_sizes() -> dict[str, str]:
    """By the shape of a weight, in which numbers of rows it is multiplied."""
    return {
        f"{outputs} x {inputs}": f"{len(sizes)} sizes from {min(sizes)} to {max(sizes)} rows"
        for (outputs, inputs, *_), sizes in _TRIED["tried"].items()
    }


def _compare(
    work: Work, ours: Ours, precision: str, settings: Sequence[Setting], turns: int
) -> Iterator[dict[str, Any]]:
    from nemo_aligner.tools.invariance import count_changed, score_alone

    seconds: dict[Setting, list[float]] = {rows: [] for rows in settings}
    changed = {}
    for turn in range(turns + 1):
        for rows in settings:
            _set_rows(ours.model, rows)
            start = time.perf_counter()
            together = ours.score(work.token_lists)
            if turn:  # the first one makes kernels, and tries them
                seconds[rows].append(time.perf_counter() - start)
                continue
            changed[rows] = count_changed(together, score_alone(ours.score, work.token_lists))
    usual = seconds[None]
    for rows in settings:
        ratios = [ours / theirs for ours, theirs in zip(seconds[rows], usual, strict=True)]
        yield {
            "precision": precision,
            "work": work.name.partition(",")[0],
            "rows of a product": rows or "as they come",
            "rewards/s": len(work.token_lists) / median(seconds[rows]),
            "time": median(ratios),
            "rewards": len(work.token_lists),
            "other bits": changed[rows],
        }


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_work_options(parser)
    parser.add_argument("--fixed", action="store_true", help="no other numbers of rows on a CPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
