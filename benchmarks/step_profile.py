"""Where the time of a training step goes on a GPU: kernels by class, and the gaps between them.

gpu_first_hour.py runs this measurement. The rows come from the trace of one step
that torch's profiler exports; its categories (``kernel``, ``gpu_memcpy``, ``cuda_runtime``) are the
same in all versions of torch. Without a GPU, operators of the CPU take the place of kernels, which
only tests this code.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]
Event = Mapping[str, Any]

# Strings in kernel names, by class. A kernel belongs to the first class that has a string which
# occurs in its lower-case name.
CLASSES: dict[str, tuple[str, ...]] = {
    # This class must come first: torch.compile names a kernel after all operators that it fuses.
    # The remaining names are those of Liger and of models/pointwise/triton_kernels.py.
    "fused pointwise": (
        *("triton", "_norm_forward", "_norm_backward", "rms_norm_", "_silu_forward"),
        *("_silu_backward", "swiglu_", "_rope", "_rotate"),
    ),
    "attention": ("flash", "fmha", "attention", "attn"),
    "optimizer": ("adam", "multi_tensor", "l2norm", "lpnorm"),
    # nvjet: cuBLAS for Hopper, in CUDA 12.8 and later.
    "matmul": ("gemm", "nvjet", "cutlass", "xmma", "gemv", "splitk", "aten::mm", "addmm", "cublas"),
    "copies": ("memcpy", "memset", "copy_", "_copy", "catarray", "fillfunctor", "aten::to"),
    "lookups": ("embedding", "index", "gather", "scatter", "sort", "scan"),
    "pointwise": (
        *("elementwise", "pointwise", "reduce", "norm", "silu"),
        *("aten::mul", "aten::add", "aten::mean", "aten::rsqrt"),
    ),
}
_DEVICE_CATEGORIES = {"cuda": ("kernel", "gpu_memcpy", "gpu_memset"), "cpu": ("cpu_op",)}
_SHOWN_KERNELS = 15
_NAME_LENGTH = 90


@dataclass(frozen=True)
class StepTrace:
    """The trace of one training step.

    Attributes:
        events: events of torch's profiler.
        device: ``cuda`` or ``cpu``.
        layers, micro_batches: how many the step had, to compute times for each.
    """

    events: Sequence[Event]
    device: str
    layers: int
    micro_batches: int

    def rows(self, usual_ms: float) -> Iterator[Row]:
        """Yield the rows of a table that shows where the time of the step goes.

        ``usual_ms`` is the time of a step without the profiler, in milliseconds.
        """
        categories = _DEVICE_CATEGORIES[self.device]
        work = [event for event in self.events if event.get("cat") in categories]
        if not work:
            yield _make_row("the trace", note="it has no kernels: CUPTI may not be permitted here")
            return
        begin = min(event["ts"] for event in work)
        span = max(event["ts"] + event["dur"] for event in work) - begin
        busy = busy_time((event["ts"], event["ts"] + event["dur"]) for event in work)
        yield _make_row("the step, profiled", span / 1e3, note="from its first kernel to its last")
        yield self._share("kernels", work, busy, usual_ms)
        idle = max(0.0, usual_ms - busy / 1e3)
        gap = f"{1e3 * idle / len(work):.2f} us a kernel, of the step without the profiler"
        yield _make_row("no kernel runs", idle, share=idle / usual_ms, note=gap)
        yield from self._host_rows()
        classes: dict[str, list[Event]] = {name: [] for name in (*CLASSES, "others")}
        for event in work:
            classes[kernel_class(event["name"])].append(event)
        for name, events in classes.items():
            yield self._share(name, events, _total_duration(events), usual_ms)
        names: dict[str, list[Event]] = defaultdict(list)
        for event in work:
            names[event["name"]].append(event)
        longest = sorted(names.items(), key=lambda item: -_total_duration(item[1]))[:_SHOWN_KERNELS]
        for name, events in longest:
            row = self._share(_shorten_name(name), events, _total_duration(events), usual_ms)
            yield {**row, "note": kernel_class(name)}

    def _host_rows(self) -> Iterator[Row]:
        """Yield rows with the host's time for launching kernels and for waiting on the device.

        There are none on a CPU.
        """
        host = [e for e in self.events if e.get("cat") in ("cuda_runtime", "cuda_driver")]
        launches = [event for event in host if "launch" in event["name"].lower()]
        waits = [event for event in host if "synchronize" in event["name"].lower()]
        for what, events in (("host: launches", launches), ("host: waits", waits)):
            if events:
                mean = f"{len(events)} calls of {_total_duration(events) / len(events):.1f} us"
                yield _make_row(what, _total_duration(events) / 1e3, note=mean)

    def _share(self, what: str, events: Sequence[Event], time_us: float, usual_ms: float) -> Row:
        per_layer = len(events) / (self.layers * self.micro_batches)
        return _make_row(what, time_us / 1e3, per_layer=per_layer, share=time_us / 1e3 / usual_ms)


def _make_row(
    what: str,
    milliseconds: float | None = None,
    *,
    per_layer: float | None = None,
    share: float | None = None,
    note: str = "",
) -> Row:
    return {
        "what": what,
        "kernels a layer": per_layer,
        "ms": milliseconds,
        "share of a step": share,
        "note": note,
    }


def kernel_class(name: str) -> str:
    """The class of a kernel, by its name: one of ``CLASSES``, else ``others``."""
    lowered = name.lower()
    for label, parts in CLASSES.items():
        if any(part in lowered for part in parts):
            return label
    return "others"


def busy_time(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of the intervals ``(begin, end)``."""
    total, latest = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, latest))
        latest = max(latest, end)
    return total


def _total_duration(events: Sequence[Event]) -> float:
    return float(sum(event["dur"] for event in events))


def _shorten_name(name: str) -> str:
    """A kernel's name without common namespaces, shortened to ``_NAME_LENGTH``."""
    for part in ("void ", "at::native::", "(anonymous namespace)::", "unrolled_", "c10::"):
        name = name.replace(part, "")
    return name if len(name) <= _NAME_LENGTH else f"{name[: _NAME_LENGTH - 3]}..."


def trace(step: Callable[[], object]) -> list[Event]:
    """Profile ``step``; return its events: kernels and launches of a GPU, or CPU operators.

    On a GPU operators are not recorded: recording them makes the host several times slower, so that
    the GPU would wait for the host where it usually does not.
    """
    gpu = torch.cuda.is_available()
    activity = torch.profiler.ProfilerActivity
    activities = [activity.CUDA if gpu else activity.CPU]
    if gpu:
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        if gpu:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        content = json.loads(path.read_text(errors="replace"))
    return [event for event in content["traceEvents"] if event.get("ph") == "X"]
