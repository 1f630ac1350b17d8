"""Measure a run: MFU, memory and power of a GPU, and the time of each part of a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist

from nemo_aligner.config.common import Precision
from nemo_aligner.planning.memory import GIB
from nemo_aligner.planning.step_time import peak_flops
from nemo_aligner.training.side_outputs import attempt_output


@dataclass(frozen=True)
class Gauges:
    """Measures this rank's GPU.

    If a function fails during the run, as NVML may, a message is printed, and its metric is not
    measured any more.

    Attributes:
        peak: peak FLOP/s of all ranks' GPUs together, which are assumed to be of one kind; None if
            it is unknown.
        functions: the functions that read the GPU, by the names of their metrics.
    """

    peak: float | None = None
    functions: dict[str, Callable[[], float]] = field(default_factory=dict)

    @classmethod
    def of(cls, device: torch.device | str, precision: Precision) -> Gauges:
        """Find out which values can be measured on ``device``.

        ``precision`` selects the peak FLOP/s. Reading the power needs the package nvidia-ml-py.
        """
        device = torch.device(device)
        if not _is_gpu(device):
            return cls()
        peak = known_peak(device, precision)

        def memory_gb() -> float:
            """Read how much of the GPU's memory all processes use."""
            free, total = torch.cuda.mem_get_info(device)
            return (total - free) / 1e9

        def power_watts() -> float:
            """Read the power that the GPU draws."""
            return torch.cuda.power_draw(device) / 1e3

        functions: dict[str, Callable[[], float]] = {"gpu_memory_gb": memory_gb}
        if _is_readable(power_watts):
            functions["gpu_power_watts"] = power_watts
        return cls(None if peak is None else peak * dist.get_world_size(), functions)

    def read(self, flops: float | None, seconds: float) -> dict[str, float]:
        """Measure MFU, memory and power after a step.

        Args:
            flops: FLOPs of the step on all ranks; None if they were not counted.
            seconds: time that the step took.

        Returns:
            ``mfu``, ``gpu_memory_gb`` and ``gpu_power_watts``, without those that cannot be
            measured. MFU (model FLOPs utilization) does not count recomputation (Chowdhery et al.
            2022, appendix B).
        """
        values: dict[str, float] = {}
        if self.peak is not None and flops is not None:
            values["mfu"] = flops / seconds / self.peak

        def measure(name: str) -> None:
            values[name] = self.functions[name]()

        for name in list(self.functions):
            if not attempt_output(partial(measure, name), name, "measuring", "the run goes on"):
                del self.functions[name]
        return values


def describe_gpu_memory(device: torch.device | str) -> str | None:
    """Describe how much of a GPU's memory torch and other users hold; None if it is not a GPU."""
    device = torch.device(device)
    if not _is_gpu(device):
        return None
    free, total = torch.cuda.mem_get_info(device)
    reserved, peak = torch.cuda.memory_reserved(device), torch.cuda.max_memory_allocated(device)
    outside = total - free - reserved
    return (
        f"GPU memory: torch holds {reserved / GIB:.1f} GiB, in which tensors took at most "
        f"{peak / GIB:.1f} GiB; CUDA, its libraries, NCCL and other processes hold "
        f"{outside / GIB:.1f} GiB"
    )


def known_peak(device: torch.device | str, precision: Precision) -> float | None:
    """Return the peak FLOP/s of a device; None if it is a CPU or not in the table of peaks."""
    if not _is_gpu(torch.device(device)):
        return None
    return peak_flops(torch.cuda.get_device_name(device), precision)


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available()


def _is_readable(gauge: Callable[[], float]) -> bool:
    """True if ``gauge`` can be read on this machine.

    Reading fails if NVIDIA's library NVML is missing, or if this GPU does not support the value.
    """
    try:
        gauge()
    except Exception:
        # Catch every exception: pynvml's error classes cannot be named here, because it may not be
        # installed.
        return False
    return True


class Timers:
    """Sums up the seconds spent in each named part of a step, until ``take`` returns the sums."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time that the block takes to the part ``name``."""
        start = time.perf_counter()
        yield
        self.add_since(start, name)

    def add_since(self, start: float, name: str) -> None:
        """Add the time since ``start`` (by ``time.perf_counter()``) to the part ``name``."""
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Return the seconds of each part as ``timing/<name>``, and reset them to zero."""
        timings = {f"timing/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds.clear()
        return timings
