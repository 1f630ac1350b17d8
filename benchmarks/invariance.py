"""Cost of batch invariance in speed, and the number of rewards that it makes bit-identical.

    python benchmarks/invariance.py --model SmolLM2-135M-Instruct.gguf --data pairs.jsonl

It runs the three kinds of work that scoring.py describes, in turn, in fp32 and bf16 (on a GPU only
bf16): without batch invariance, and with matmuls of a fixed number of rows. ``other bits`` counts
rewards that are not bit-identical to those in a batch of one. On a CPU a matmul may use other
numbers of rows where its results stay bit-identical; with ``--fixed`` it never does. On a GPU the
setting ``tried`` lets a matmul choose among several numbers of rows, in all of which a row has
bit-identical results. A trial on this GPU finds these numbers, and the benchmark prints them.
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
from scoring_work import OurScorer, Work, add_work_options, make_works, our_scorer

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
            for scoring_work in make_works(arguments.data, arguments.pairs, ours):
                rows += _compare_settings(
                    scoring_work, ours, precision.value, ROWS[device], arguments.turns
                )
                print(f"\n{render(rows)}", flush=True)
    about = {
        "machine": machine(),
        "model": str(arguments.model),
        "fixed": arguments.fixed,
        "trial": _describe_tried_sizes() if device == "cuda" else None,
    }
    print("\n" + ", ".join(f"{key}: {value}" for key, value in about.items()))
    write_json(arguments.output, {**about, "rows": rows})


def _take_no_other_rows() -> None:
    from nemo_aligner.cpu import matmuls

    matmuls.Trials.has_same_bits = lambda self, size, rows: size == rows  # type: ignore[method-assign]


# For each setting: the numbers of rows that a matmul may have, which a trial on this GPU has found
# (``chunk_sizes`` of gpu_matmuls.py). gpu_matmuls.py has one such table, so each setting puts its
# own there.
_TRIED_SIZES: dict[Setting, dict[Any, tuple[int, ...]]] = {}


def _set_rows(model: Any, setting: Setting) -> None:
    from nemo_aligner.config.model import ROWS_BY_DEVICE
    from nemo_aligner.distributed import gpu_matmuls
    from nemo_aligner.models.batch_invariance import make_batch_invariant

    gpu_matmuls._TRIED = _TRIED_SIZES.setdefault(setting, {})
    if setting == "tried":
        make_batch_invariant(model, ROWS_BY_DEVICE)
        return
    assert not isinstance(setting, str)
    sizes, gpu_matmuls._SIZES = gpu_matmuls._SIZES, ()
    make_batch_invariant(model, setting)
    gpu_matmuls._SIZES = sizes


def _describe_tried_sizes() -> dict[str, str]:
    """Describe how many rows a matmul may have on this GPU with the setting ``tried``.

    The scorer has tried several numbers of rows for each shape of a weight, and uses only numbers
    between which the results of a row are bit-identical.

    Returns:
        For each shape of a weight, "outputs x inputs", a text about these numbers.
    """
    return {
        f"{outputs} x {inputs}": f"{len(sizes)} sizes from {min(sizes)} to {max(sizes)} rows"
        for (outputs, inputs, *_), sizes in _TRIED_SIZES["tried"].items()
    }


def _compare_settings(
    work: Work, ours: OurScorer, precision: str, settings: Sequence[Setting], turns: int
) -> Iterator[dict[str, Any]]:
    from nemo_aligner.tools.invariance import count_changed, score_alone

    seconds: dict[Setting, list[float]] = {rows: [] for rows in settings}
    changed = {}
    for turn in range(turns + 1):
        for rows in settings:
            _set_rows(ours.model, rows)
            start = time.perf_counter()
            together = ours.score(work.token_lists)
            if turn:  # turn 0 is not timed: it compiles kernels and runs the trials
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
    parser.add_argument(
        "--fixed",
        action="store_true",
        help="on a CPU, always use matmuls of the same number of rows",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
