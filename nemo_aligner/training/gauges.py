"""What a step says of the GPU that it ran on: its share of the peak, its memory, its power."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from nemo_aligner.config.common import Precision
from nemo_aligner.planning.peaks import peak_flops


@dataclass(frozen=True)
class Gauges:
    """The gauges of this rank's GPU; without one, or where it does not say, there is none.

    Attributes:
        peak: FLOP/s of all ranks' GPUs together, which are taken to be alike.
        used_bytes: of the GPU's memory, by whomever.
        watts: that the GPU draws now.
    """

    peak: float | None = None
    used_bytes: Callable[[], int] | None = None
    watts: Callable[[], float] | None = None

    @classmethod
    def of(cls, device: torch.device | str, precision: Precision) -> Gauges:
        """Those of a device; power needs the package nvidia-ml-py."""
        device = torch.device(device)
        if not _is_gpu(device):
            return cls()
        peak = known_peak(device, precision)

        def used_bytes() -> int:
            free, total = torch.cuda.mem_get_info(device)
            return total - free

        def watts() -> float:
            return torch.cuda.power_draw(device) / 1e3

        return cls(
            None if peak is None else peak * dist.get_world_size(),
            used_bytes,
            watts if _answers(watts) else None,
        )

    def read(self, flops: float | None, seconds: float) -> dict[str, float]:
        """``mfu`` of a step of so many ``flops``, ``gpu_memory_gb`` and ``gpu_power_watts``.

        Model FLOPs utilization (Chowdhery et al. 2022, appendix B): what is recomputed is no work.
        """
        found: dict[str, float] = {}
        if self.peak is not None and flops is not None:
            found["mfu"] = flops / seconds / self.peak
        if self.used_bytes is not None:
            found["gpu_memory_gb"] = self.used_bytes() / 1e9
        if self.watts is not None:
            found["gpu_power_watts"] = self.watts()
        return found


def known_peak(device: torch.device | str, precision: Precision) -> float | None:
    """FLOP/s of a device, where a share of them can be told."""
    if not _is_gpu(torch.device(device)):
        return None
    return peak_flops(torch.cuda.get_device_name(device), precision)


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available()


def _answers(gauge: Callable[[], float]) -> bool:
    """Whether it can be read: NVML may be missing, or not know this of the GPU."""
    try:
        gauge()
    except Exception:
        # Among them pynvml's own, whose classes are there only where it is; a run goes on without.
        return False
    return True
