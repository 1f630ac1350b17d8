"""Everything that only a GPU can show, one part after the other, within half an hour.

    bash scripts/gpu_first_hour.sh                          # one GPU; two show more
    bash scripts/gpu_first_hour.sh --device cpu             # rehearsed in miniature

Each part is a process of its own with a time limit: one that fails, or takes too long, leaves the
results of the others, and what it has found itself. ``--output`` gets ``first_hour.json`` and
``first_hour.md``, both anew after every part, a table per part, with what planning/cost.py
predicts next to what was measured, and ``first_hour.log``, which has all that the parts printed. A
part that cannot run here says why. Weights are random, or those of ``--model``; nothing is
downloaded. Exit status: 1 if a part failed, 130 if stopped.

A prediction rests on the peak of ``--tflops`` (989 by default: H100 and H200, dense bf16), of which
40% are reached, as ``nemo-aligner plan`` assumes; on a CPU it means nothing.
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
_SAID = 2000  # characters of what a failed part printed last
_POLL_S = 0.2
_LEAST = 1.0  # second: in less no part does anything
# In this time all parts up to "save" may take as long as their limits allow. In less time all
# limits shrink alike, unless the parts are chosen; in more, the other parts follow.
_MINUTES = 9.0
# Times the limits: other programs may use the few cores that a rehearsal runs on.
_PATIENCE = {"cuda": 1.0, "cpu": 4.0}
# Asked by a signal, and looked for only where nothing is left behind.
_STOP = threading.Event()
Result = dict[str, Any]


def main() -> int:
    arguments = _parse()
    hour = _hour(arguments)
    chosen = _with_needs(arguments.parts or [part.name for part in PARTS])
    report = _Report(arguments.output, _about(hour, arguments), chosen)
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


def _hour(arguments: argparse.Namespace) -> Hour:
    device = arguments.device
    gpus, precision = _gpus() if device == "cuda" else (0, "fp32")
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


def _gpus() -> tuple[int, str]:
    """How many there are, and the 16 bits that they train in."""
    choose_device("cuda")
    import torch

    from nemo_aligner.distributed.collectives import lacks_bf16

    return torch.cuda.device_count(), "fp16" if lacks_bf16() else "bf16"


def _with_needs(names: Sequence[str]) -> list[Part]:
    """The parts of these names and those that they need, in their order."""
    needed = {need for part in PARTS if part.name in names for need in part.needs}
    return [part for part in PARTS if part.name in {*names, *needed}]


def _about(hour: Hour, arguments: argparse.Namespace) -> dict[str, Any]:
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
    """What was found so far, written anew after every part; parts to come are ``not run``."""

    def __init__(self, folder: Path, about: dict[str, Any], parts: Sequence[Part]) -> None:
        self._folder, self._about, self._parts = folder, about, parts
        self.page = folder / "first_hour.md"
        self.results: list[Result] = []

    def add(self, result: Result, log: Path) -> None:
        """Add what became of a part, and what it printed, which all parts write to one file."""
        self.results.append(result)
        self.write()
        with suppress(OSError), (self._folder / "first_hour.log").open("a") as logs:
            logs.write(f"\n==== {result['part']}\n\n{log.read_text(errors='replace')}")

    def write(self) -> None:
        """Both files; each is whole at any time."""
        begun = len(self.results)
        to_come = [_result(part, "not run", "it was not come to") for part in self._parts[begun:]]
        content = {**self._about, "parts": [*self.results, *to_come]}
        write_whole(self._folder / "first_hour.json", json.dumps(content, indent=2) + "\n")
        write_whole(self.page, render_page(content))


def _run(part: Part, hour: Hour, before: Sequence[Result], limit: float, threads: int) -> Result:
    """What became of a part, which gets ``limit`` seconds; an interruption ends it."""
    why = _why_not(part, hour, before, limit)
    if why is not None:
        print(f"{part.name}: not run: {why}", flush=True)
        return _result(part, "not run", why)
    print(f"{part.name}: {part.about}, at most {limit:.0f} s", flush=True)
    start = time.monotonic()
    log = hour.log(part.name)
    hour.output(part.name).unlink(missing_ok=True)
    state, why = _wait(part.command(hour, limit), log, limit, hour.device, threads)
    seconds = time.monotonic() - start
    rows: list[dict[str, Any]] = []
    remarks: list[str] = []
    with suppress(OSError, ValueError, SyntaxError):  # of a part that has written nothing, or half
        rows, remarks = part.read(hour.output(part.name))
    if state == "done" and not rows:
        state, why = "failed", "it ended without a result"
    elif state == "done" and remarks:
        state, why = "failed", "the other side failed"
    elif state != "done":
        remarks = [*remarks, *_last_said(log)]
    reason = f": {why}" if why else ""
    print(f"{part.name}: {state} in {seconds:.0f} s{reason}", flush=True)
    return _result(part, state, why, seconds=seconds, rows=rows, remarks=remarks)


def _why_not(part: Part, hour: Hour, before: Sequence[Result], limit: float) -> str | None:
    states = {result["part"]: result["state"] for result in before}
    for need in part.needs:
        if states.get(need) != "done":
            return f"it needs the part {need}, which is {states.get(need)}"
    if limit <= _LEAST:
        return "no time is left"
    return part.lacks(hour)


def _result(part: Part, state: str, why: str, **found: Any) -> Result:
    empty = {"seconds": 0.0, "rows": [], "remarks": []}
    about = {"part": part.name, "about": part.about, "limit": part.limit}
    return {**about, "state": state, "why": why, **empty, **found}


def _wait(
    command: Sequence[str], log: Path, limit: float, device: str, threads: int
) -> tuple[str, str]:
    """Run a command to its end or to the limit: the state, and why."""
    offline = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    with log.open("wb") as said:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
            env={**environment(threads), **offline, **hidden},
        )
        found = _follow(process, limit)
        # What a part that ended has left behind would be in the way of the next, too.
        _end(process)
    return found


def _follow(process: subprocess.Popen[bytes], limit: float) -> tuple[str, str]:
    """Wait for the process's end, the time's, or a stop that is asked for: the state, and why."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if _STOP.is_set():
            return "interrupted", "it was stopped from outside"
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(_POLL_S)
            return ("done", "") if code == 0 else ("failed", how_it_ended(code))
    return "out of time", f"it was stopped after {limit:.0f} s"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process with all that it started: torchrun's ranks have sessions of their own."""
    family: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for each in family:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


def _last_said(log: Path) -> list[str]:
    text = log.read_text(errors="replace").strip()
    return [text[-_SAID:]] if text else []


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--output", type=Path, default=Path("first_hour"), help="a folder")
    parser.add_argument("--parts", nargs="+", choices=names, help="default: all, in this order")
    parser.add_argument("--minutes", type=float, default=30.0, help="in all (default 30)")
    parser.add_argument(
        "--model", type=Path, help="a .gguf, .nemo or folder; default: random weights"
    )
    parser.add_argument("--data", type=Path, help="pairs; default: random words")
    parser.add_argument(
        "--tflops", type=float, help="the GPU's peak, dense, in 16 bits (default 989)"
    )
    parser.add_argument("--trl-python", default=sys.executable, help="with TRL; default: this one")
    parser.add_argument(
        "--vllm-python", default=sys.executable, help="with vLLM; default: this one"
    )
    parser.add_argument("--threads", type=int, default=4, help="of the CPU, for a part (default 4)")
    parser.add_argument(
        "--work", type=Path, help="a folder for models and logs; default: temporary"
    )
    arguments = parser.parse_args()
    for name in ("model", "data"):
        path = getattr(arguments, name)
        if path is not None and not path.exists():
            parser.error(f"--{name}: there is no {path}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
