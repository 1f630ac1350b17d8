"""What a training run's process holds: resident, in use, and lost to gaps, over many steps.

    python benchmarks/memory.py --model SmolLM2-135M-Instruct.gguf --data pairs.jsonl --steps 300

On the CPU, one process, all weights in fp32, a save every 100 steps as by default. "In use" is what
malloc has handed out: at most, as seen ten times a second since the line before, and between steps.
Resident is what the system counts; what it has beyond the most that was in use, and beyond what
libraries take, is gaps. With ``--skip-products`` matrix products give constants, and a step takes a
fourth of the time: what is held is the same, but for buffers of the library that computes them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import machine, prepare_model, render, run_worker, write_json

_SHOWN_STEPS = (1, 3, 10, 30)


def main() -> None:
    arguments = _parse()
    work = Path(arguments.work or tempfile.mkdtemp(prefix="benchmark_"))
    _, nemo = prepare_model(arguments.model, work)
    with tempfile.TemporaryDirectory(dir=work) as folder:
        job = {
            "settings": _settings(arguments, nemo, Path(folder)),
            "skip_products": arguments.skip_products,
        }
        found: Any = run_worker(sys.executable, "memory_run.py", job, threads=1)
    print(render(table(found, arguments.save_interval)))
    about = {"machine": machine(), "model": str(arguments.model)}
    print("\n" + ", ".join(f"{key}: {value}" for key, value in about.items()))
    write_json(arguments.output, {**about, "rows": found})


def _settings(arguments: argparse.Namespace, nemo: Path, folder: Path) -> list[str]:
    return [
        f"pretrained_checkpoint.restore_from_path={nemo}",
        f"model.data.data_prefix.train=[{arguments.data}]",
        f"exp_manager.explicit_log_dir={folder}",
        f"model.global_batch_size={arguments.global_batch}",
        f"model.micro_batch_tokens={arguments.micro_batch_tokens}",
        f"model.data.seq_length={arguments.seq_length}",
        f"trainer.rm.max_steps={arguments.steps}",
        f"trainer.rm.save_interval={arguments.save_interval}",
        "trainer.rm.val_check_interval=null",
        # Constants instead of products are not to end the run.
        "model.optim.lr=1e-7",
        "trainer.precision=fp32",
    ]


def table(rows: Sequence[dict[str, Any]], save_interval: int) -> list[dict[str, Any]]:
    """Some lines of the run, in GiB, with what was in use at most up to each since the one before.

    Gaps are what is resident beyond the most that was in use at once so far, libraries apart.
    """
    # Code and data of the libraries, which malloc knows nothing of.
    libraries = rows[0]["resident"] - rows[0]["in use"]
    shown, most, highest = [], 0.0, 0.0
    for index, row in enumerate(rows):
        most, highest = max(most, row["at most"]), max(highest, row["at most"])
        if not _is_shown(row["when"], save_interval, last=index == len(rows) - 1):
            continue
        gaps = max(0.0, row["resident"] - libraries - highest)
        columns = {
            "resident": row["resident"],
            "peak": row["peak"],
            "in use at most": most,
            "in use then": row["in use"],
            "gaps": gaps,
        }
        shown.append(
            {"GiB": row["when"], **{key: f"{mib / 2**10:.2f}" for key, mib in columns.items()}}
        )
        most = 0.0
    return shown


def _is_shown(when: str, save_interval: int, last: bool) -> bool:
    if last or not when.startswith("step "):
        return True
    step = int(when.removeprefix("step "))
    # The third step after a save began has it written, or nearly so.
    return step in _SHOWN_STEPS or (step > save_interval and step % save_interval in (0, 3))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a .gguf, or a folder")
    parser.add_argument("--data", type=Path, required=True, help="pairs")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save-interval", type=int, default=100, help="in steps (default 100)")
    parser.add_argument("--global-batch", type=int, default=2, help="pairs a step (default 2)")
    parser.add_argument("--micro-batch-tokens", type=int, default=1280)
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--skip-products", action="store_true", help="of matrices, to be quick")
    parser.add_argument("--work", help="a folder to keep the converted model in")
    parser.add_argument("--output", type=Path, metavar="JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
