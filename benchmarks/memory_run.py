"""Worker of memory.py: a training run that says what its process holds, step by step."""

from __future__ import annotations

import ctypes
import json
import resource
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_SAMPLES_A_SECOND = 10
_COUNTS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


def main() -> None:
    from nemo_aligner.config.load import load_config
    from nemo_aligner.config.training import TrainConfig
    from nemo_aligner.distributed.launch import launch
    from nemo_aligner.distributed.layout import initialize_layout
    from nemo_aligner.training.build import build_data, build_learner
    from nemo_aligner.training.resume import resume
    from nemo_aligner.training.run import open_checkpoints
    from nemo_aligner.training.signals import SignalHandler
    from nemo_aligner.training.trainer import SupervisedTrainer

    job = json.loads(sys.stdin.read())
    config = load_config(TrainConfig, job["settings"])
    memory = Memory()
    with launch() as world:
        layout = initialize_layout()
        memory.note("libraries")
        data = build_data(config)
        learner, pretrained, total_steps = build_learner(config, data, layout)
        memory.note("model and optimizer")
        checkpoints = open_checkpoints(config.exp_manager, data)
        start = resume(checkpoints, config, pretrained.config, learner)
        memory.note("the save's copy")
        if job["skip_products"]:
            for name in ("train_step", "validate"):
                setattr(learner, name, _without_products(getattr(learner, name)))
        trainer = SupervisedTrainer(
            learner, config, total_steps, start, checkpoints, memory, SignalHandler(), world.device
        )
        trainer.fit()
    print(json.dumps(memory.rows))


class Memory:
    """A logger of the run that looks at the process instead; figures in MiB."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._count = _counter()
        self._most = 0.0
        threading.Thread(target=self._sample, daemon=True).start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        seconds = metrics.get("timing/train_step")
        if "train/loss" in metrics:
            self.note(f"step {step}", seconds=seconds)

    def note(self, when: str, **more: Any) -> None:
        """Add a row: what is resident, and what malloc handed out, now and at most."""
        from nemo_aligner.distributed.cpu_products import resident_bytes

        in_use, resident = self._count(), resident_bytes() / 2**20
        highest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        figures = {
            "resident": resident,
            "in use": in_use,
            "at most": max(in_use, self._most),
            # The system's two counts differ by some pages.
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


def _counter() -> Callable[[], float]:
    """What tells how many MiB glibc's malloc has handed out, in all of its arenas."""

    class Counts(ctypes.Structure):
        _fields_ = [(name, ctypes.c_size_t) for name in _COUNTS.split()]

    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Counts

    def count() -> float:
        counts = mallinfo2()
        return (counts.uordblks + counts.hblkhd) / 2**20

    return count


class _NoProducts(TorchDispatchMode):
    """Matrix products give a constant, in as much memory as the product would take."""

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


def _without_products(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with _NoProducts():
            return function(*args)

    return run


if __name__ == "__main__":
    main()
