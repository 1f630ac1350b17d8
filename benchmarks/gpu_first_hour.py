"""Run all measurements that need a GPU, one part after the other, within half an hour.

    bash scripts/gpu_first_hour.sh                          # one GPU; two show more
    bash scripts/gpu_first_hour.sh --device cpu             # a tiny rehearsal on the CPU

Each part is a separate process with a time limit. A part that fails or takes too long does not
affect the others, and the rows that it has written so far count. The folder ``--output`` gets three
files: ``first_hour.json`` and ``first_hour.md``, rewritten after every part, with a table per part
and the predictions of planning/ next to the measurements; and ``first_hour.log``, the output of all
parts. A part that cannot run on this machine reports the reason. Weights are random, or those of
``--model``; nothing is downloaded. Exit status: 1 if a part failed, 130 if stopped.

Predictions assume a GPU whose peak is ``--tflops`` (default 989: H100 and H200, dense bf16), and
the shares of it that matmuls and attention reached in measurements, as ``nemo-aligner plan`` does.
On a CPU they mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
from common import choose_device, environment, how_it_ended, machine, processor, write_whole
from first_hour_page import render_page
from first_hour_parts import PARTS, Hour, Part

ASSUMED_TFLOPS = {"cuda": 989.0, "cpu": 0.1}
_SHOWN_CHARACTERS = 2000  # characters that the report shows of the end of a failed part's output
_POLL_S = 0.2
_MIN_SECONDS = 1.0  # a part is not started if less time is left
# The limits of all parts up to "save" add up to this. With less time in all, every limit shrinks by
# the same factor, unless --parts names the parts; with more, the remaining parts run, too.
_MINUTES = 9.0
# Factor of all time limits. It is larger on a CPU, whose cores a rehearsal may share with other
# programs.
_PATIENCE = {"cuda": 1.0, "cpu": 4.0}
# Set by SIGINT and SIGTERM. It is checked only at points where a part can be ended without losing
# its results.
_STOP = threading.Event()
Result = dict[str, Any]


def main() -> int:
    arguments = _parse()
    hour = _build_hour(arguments)
    chosen = _with_needs(arguments.parts or [part.name for part in PARTS])
    report = _Report(arguments.output, _describe_machine(hour, arguments), chosen)
    end = time.monotonic() + 60 * arguments.minutes
    share = 1.0 if arguments.parts else min(1.0, arguments.minutes / _MINUTES)
    share *= _PATIENCE[hour.device]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: _STOP.set())
    for part in chosen:
        if not _STOP.is_set():
            limit = min(share * part.limit, end - time.monotonic())
            result = _run(part, hour, report.results, limit, arguments.threads)
            report.add(result, hour.log(part.name))
    report.write()
    print(f"\n{'stopped; what was found: ' if _STOP.is_set() else ''}{report.page}")
    if _STOP.is_set():
        return 130
    return int(any(result["state"] in ("failed", "out of time") for result in report.results))


def _build_hour(arguments: argparse.Namespace) -> Hour:
    device = arguments.device
    gpus, precision = _count_gpus() if device == "cuda" else (0, "fp32")
    arguments.output.mkdir(parents=True, exist_ok=True)
    work = Path(arguments.work or tempfile.mkdtemp(prefix="first_hour_"))
    work.mkdir(parents=True, exist_ok=True)
    return Hour(
        device=device,
        gpus=gpus,
        work=work,
        precision=precision,
        model=arguments.model,
        data=arguments.data,
        tflops=arguments.tflops or ASSUMED_TFLOPS[device],
        trl_python=arguments.trl_python,
        vllm_python=arguments.vllm_python,
    )


def _count_gpus() -> tuple[int, str]:
    """Return the number of GPUs, and the 16-bit precision that models train in on these GPUs."""
    choose_device("cuda")
    import torch

    from nemo_aligner.distributed.collectives import gpu_computes_bf16

    return torch.cuda.device_count(), "bf16" if gpu_computes_bf16() else "fp16"


def _with_needs(names: Sequence[str]) -> list[Part]:
    """Select the parts (measurements) with these names, and all parts that they need.

    The result is in the order of ``PARTS``, so that each part follows those that it needs.
    """
    needed = {need for part in PARTS if part.name in names for need in part.needs}
    return [part for part in PARTS if part.name in {*names, *needed}]


def _describe_machine(hour: Hour, arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "machine": machine() if hour.gpus else processor(),
        "device": hour.device,
        "GPUs": hour.gpus,
        "began": datetime.now().isoformat(timespec="seconds"),
        "minutes allowed": arguments.minutes,
        "peak assumed, TFLOP/s": hour.tflops,
        "files": str(hour.work),
    }


class _Report:
    """The report ``first_hour.json`` and ``.md``, rewritten after every part (measurement).

    A part that has not run yet has the state ``not run`` in the report.
    """

    def __init__(self, folder: Path, about: dict[str, Any], parts: Sequence[Part]) -> None:
        self._folder, self._about, self._parts = folder, about, parts
        self.page = folder / "first_hour.md"
        self.results: list[Result] = []

    def add(self, result: Result, log: Path) -> None:
        """Add the result of a part (measurement), and append its output to ``first_hour.log``."""
        self.results.append(result)
        self.write()
        with suppress(OSError), (self._folder / "first_hour.log").open("a") as logs:
            logs.write(f"\n==== {result['part']}\n\n{log.read_text(errors='replace')}")

    def write(self) -> None:
        """Write ``first_hour.json`` and ``first_hour.md``.

        Each is replaced by a rename, so that a reader never sees half a file.
        """
        begun = len(self.results)
        to_come = [
            _build_result(part, "not run", "not started yet") for part in self._parts[begun:]
        ]
        content = {**self._about, "parts": [*self.results, *to_come]}
        write_whole(self._folder / "first_hour.json", json.dumps(content, indent=2) + "\n")
        write_whole(self.page, render_page(content))


def _run(part: Part, hour: Hour, results: Sequence[Result], limit: float, threads: int) -> Result:
    """Run a part (measurement) for at most ``limit`` seconds, and return its result.

    If this process gets SIGINT or SIGTERM, it ends the part's process, too.
    """
    reason = _reason_not_to_run(part, hour, results, limit)
    if reason is not None:
        print(f"{part.name}: not run: {reason}", flush=True)
        return _build_result(part, "not run", reason)
    print(f"{part.name}: {part.about}, at most {limit:.0f} s", flush=True)
    start = time.monotonic()
    log = hour.log(part.name)
    hour.output(part.name).unlink(missing_ok=True)
    state, reason = _run_command(part.command(hour, limit), log, limit, hour.device, threads)
    seconds = time.monotonic() - start
    rows: list[dict[str, Any]] = []
    remarks: list[str] = []
    # A part that was stopped may have written no rows, or half a file.
    with suppress(OSError, ValueError, SyntaxError):
        rows, remarks = part.read(hour.output(part.name))
    if state == "done" and not rows:
        state, reason = "failed", "it ended without a result"
    elif state == "done" and remarks:
        state, reason = "failed", "the other side failed"
    elif state != "done":
        remarks = [*remarks, *_last_output(log)]
    reason_suffix = f": {reason}" if reason else ""
    print(f"{part.name}: {state} in {seconds:.0f} s{reason_suffix}", flush=True)
    return _build_result(part, state, reason, seconds=seconds, rows=rows, remarks=remarks)


def _reason_not_to_run(
    part: Part, hour: Hour, results: Sequence[Result], limit: float
) -> str | None:
    states = {result["part"]: result["state"] for result in results}
    for need in part.needs:
        if states.get(need) != "done":
            return f"it needs the part {need}, which is {states.get(need)}"
    if limit <= _MIN_SECONDS:
        return "no time is left"
    return part.lacks(hour)


def _build_result(part: Part, state: str, reason: str, **content: Any) -> Result:
    empty = {"seconds": 0.0, "rows": [], "remarks": []}
    about = {"part": part.name, "about": part.about, "limit": part.limit}
    return {**about, "state": state, "why": reason, **empty, **content}


def _run_command(
    command: Sequence[str], log: Path, limit: float, device: str, threads: int
) -> tuple[str, str]:
    """Run a command until it ends or has run for ``limit`` seconds.

    Its output is written to ``log``.

    Returns:
        The state of the part, such as ``done`` or ``out of time``, and the reason as a text.
    """
    offline = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            env={**environment(threads), **offline, **hidden},
        )
        outcome = _wait_for_end(process, limit)
        # Processes that a finished part left behind would disturb the next part.
        _end_process_tree(process)
    return outcome


def _wait_for_end(process: subprocess.Popen[bytes], limit: float) -> tuple[str, str]:
    """Wait until ``process`` ends, ``limit`` seconds have passed, or this process gets a signal.

    Returns:
        The state of the part, such as ``done`` or ``out of time``, and the reason as a text.
    """
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if _STOP.is_set():
            return "interrupted", "it was stopped from outside"
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(_POLL_S)
            return ("done", "") if code == 0 else ("failed", how_it_ended(code))
    return "out of time", f"it was stopped after {limit:.0f} s"


def _end_process_tree(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and all its descendants; torchrun gives each rank a session of its own."""
    family: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    process.wait()


def _last_output(log: Path) -> list[str]:
    text = log.read_text(errors="replace").strip()
    return [text[-_SHOWN_CHARACTERS:]] if text else []


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("first_hour"),
        help="folder for the report (default: first_hour)",
    )
    parser.add_argument(
        "--parts", nargs="+", choices=names, help="parts to run; default: all, in this order"
    )
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="time limit of all parts together (default 30)"
    )
    parser.add_argument(
        "--model",
        type=Path,
        help="checkpoint: a .gguf or .nemo file, or a Hugging Face folder; default: random weights",
    )
    parser.add_argument("--data", type=Path, help="file of pairs; default: pairs of random words")
    parser.add_argument(
        "--tflops", type=float, help="the GPU's dense 16-bit peak in TFLOP/s (default 989)"
    )
    parser.add_argument(
        "--trl-python",
        default=sys.executable,
        help="Python of an environment with TRL; default: this one",
    )
    parser.add_argument(
        "--vllm-python",
        default=sys.executable,
        help="Python of an environment with vLLM; default: this one",
    )
    parser.add_argument(
        "--threads", type=int, default=4, help="CPU threads of each part (default 4)"
    )
    parser.add_argument(
        "--work", type=Path, help="folder for models and logs; default: a temporary one"
    )
    arguments = parser.parse_args()
    for name in ("model", "data"):
        path = getattr(arguments, name)
        if path is not None and not path.exists():
            parser.error(f"--{name}: there is no {path}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
