"""Memory of a training process over many steps: resident, in use, and lost to gaps.

    python benchmarks/memory.py --model SmolLM2-135M-Instruct.gguf --data pairs.jsonl --steps 300

One process on the CPU trains all weights in fp32 and saves every 100 steps. "In use" is what malloc
has handed out: the peak since the previous line, sampled ten times a second, and the value between
steps. "Resident" is what the system counts. "Gaps" is the resident memory beyond the peak in use
and beyond libraries. With ``--skip-matmuls`` matmuls return constants, which makes a step four
times as fast: memory is the same except for buffers inside the matmul library.
"""

from __future__ import annotations

import argparse
import ctypes
import resource
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common import machine, prepare_model, render, run_worker, start, write_json

_SAMPLES_A_SECOND = 10
_MALLINFO_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
_SHOWN_STEPS = (1, 3, 10, 30)


def main() -> None:
    arguments = _parse()
    work = Path(arguments.work or tempfile.mkdtemp(prefix="benchmark_"))
    _, nemo = prepare_model(arguments.model, work)
    with tempfile.TemporaryDirectory(dir=work) as folder:
        job = {
            "settings": _make_settings(arguments, nemo, Path(folder)),
            "skip_matmuls": arguments.skip_matmuls,
        }
        rows: Any = run_worker("memory.py", "run", job, threads=1)
    print(render(table(rows, arguments.save_interval)))
    about = {"machine": machine(), "model": str(arguments.model)}
    print("\n" + ", ".join(f"{key}: {value}" for key, value in about.items()))
    write_json(arguments.output, {**about, "rows": rows})


def _make_settings(arguments: argparse.Namespace, nemo: Path, folder: Path) -> list[str]:
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
        # With --skip-matmuls gradients are meaningless, and a larger rate could end the run.
        "model.optim.lr=1e-7",
        "trainer.precision=fp32",
    ]


def table(rows: Sequence[dict[str, Any]], save_interval: int) -> list[dict[str, Any]]:
    """Select the rows to show, and convert them from MiB to GiB.

    "in use at most" is the peak since the row shown before. "gaps" is the resident memory beyond
    libraries and the highest peak so far.
    """
    # Code and data of libraries, which malloc does not count: what is resident in the first row but
    # not in use.
    libraries = rows[0]["resident"] - rows[0]["in use"]
    shown, peak_in_use, highest = [], 0.0, 0.0
    for index, row in enumerate(rows):
        peak_in_use, highest = max(peak_in_use, row["at most"]), max(highest, row["at most"])
        if not _is_shown(row["when"], save_interval, last=index == len(rows) - 1):
            continue
        gaps = max(0.0, row["resident"] - libraries - highest)
        columns = {
            "resident": row["resident"],
            "peak": row["peak"],
            "in use at most": peak_in_use,
            "in use then": row["in use"],
            "gaps": gaps,
        }
        shown.append(
            {"GiB": row["when"], **{key: f"{mib / 2**10:.2f}" for key, mib in columns.items()}}
        )
        peak_in_use = 0.0
    return shown


def _is_shown(when: str, save_interval: int, last: bool) -> bool:
    if last or not when.startswith("step "):
        return True
    step = int(when.removeprefix("step "))
    # Show the step of a save and the third step after it, when the checkpoint is almost written.
    return step in _SHOWN_STEPS or (step > save_interval and step % save_interval in (0, 3))


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
    parser.add_argument("--data", type=Path, required=True, help="file of pairs")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--save-interval", type=int, default=100, help="steps between checkpoints (default 100)"
    )
    parser.add_argument(
        "--global-batch", type=int, default=2, help="pairs per training step (default 2)"
    )
    parser.add_argument("--micro-batch-tokens", type=int, default=1280)
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument(
        "--skip-matmuls", action="store_true", help="replace matmuls by constants, to save time"
    )
    parser.add_argument(
        "--work", help="folder that keeps the converted model; default: a temporary one"
    )
    parser.add_argument("--output", type=Path, metavar="JSON")
    return parser.parse_args()


# The worker: a training run that reports its process's memory.


def run(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Train with the job's settings; return a row of memory figures for each step."""
    from nemo_aligner.config.load import load_config
    from nemo_aligner.config.training import TrainConfig
    from nemo_aligner.distributed.launch import launch
    from nemo_aligner.distributed.layout import initialize_layout
    from nemo_aligner.training.build import build_learner
    from nemo_aligner.training.prepare import open_run_folder, prepare_run
    from nemo_aligner.training.resume import resume
    from nemo_aligner.training.signals import SignalHandler
    from nemo_aligner.training.trainer import SupervisedTrainer

    config = load_config(TrainConfig, job["settings"])
    memory = Memory()
    with launch():
        layout = initialize_layout()
        memory.note("libraries")
        prepared = prepare_run(config, layout)
        config, total_steps = prepared.config, prepared.total_steps
        learner, _ = build_learner(prepared)
        memory.note("model and optimizer")
        folder = open_run_folder(prepared)
        state, checkpoints = resume(folder, config, learner), folder.checkpoints
        memory.note("the save's copy")
        if job["skip_matmuls"]:
            for name in ("train_step", "validate"):
                setattr(learner, name, _replace_matmuls(getattr(learner, name)))
        trainer = SupervisedTrainer(
            learner, config, total_steps, state, checkpoints, memory, SignalHandler()
        )
        trainer.fit()
    return memory.rows


class Memory:
    """A logger for ``SupervisedTrainer`` that records the process's memory instead of metrics.

    All figures are in MiB.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._count = _make_malloc_counter()
        self._most = 0.0
        threading.Thread(target=self._sample, daemon=True).start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        seconds = metrics.get("timing/train_step")
        if "train/loss" in metrics:
            self.note(f"step {step}", seconds=seconds)

    def note(self, when: str, **more: Any) -> None:
        """Add a row with the memory of this process at the moment ``when``.

        It has the resident memory, the memory that malloc has handed out, and the peak since the
        previous row. ``more`` are further columns.
        """
        from nemo_aligner.cpu.matmuls import resident_bytes

        in_use, resident = self._count(), resident_bytes() / 2**20
        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        figures = {
            "resident": resident,
            "in use": in_use,
            "at most": max(in_use, self._most),
            # The two values come from different counters of the system, so ``highest`` can be below
            # ``resident`` by some pages.
            "peak": max(resident, highest),
        }
        self._most = 0.0
        self.rows.append({"when": when, **figures, **more})
        shown = ", ".join(f"{name} {mib:.0f}" for name, mib in figures.items())
        print(f"{when}: {shown} MiB", file=sys.stderr, flush=True)

    def _sample(self) -> None:
        pause = threading.Event()
        while not pause.wait(1 / _SAMPLES_A_SECOND):
            self._most = max(self._most, self._count())


def _make_malloc_counter() -> Callable[[], float]:
    """Return a function that reads how many MiB glibc's malloc has handed out, in all arenas."""

    class Counts(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO_FIELDS.split()]

    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Counts

    def count() -> float:
        counts = mallinfo2()
        return (counts.uordblks + counts.hblkhd) / 2**20

    return count


def _replace_matmuls(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``function`` so that all matmuls in it return constants in tensors of the right size.

    Steps take less time, and memory stays the same.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class NoProducts(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
        ) -> Any:
            aten = torch.ops.aten
            if func is aten.mm.default:
                return args[0].new_full((args[0].size(0), args[1].size(1)), 0.01)
            if func is aten.addmm.default:
                return args[1].new_full((args[1].size(0), args[2].size(1)), 0.01)
            if func is aten.addmm_.default:
                return args[0]
            return func(*args, **(kwargs or {}))

    def run(*args: Any) -> Any:
        with NoProducts():
            return function(*args)

    return run


if __name__ == "__main__":
    start(main, run=run)
