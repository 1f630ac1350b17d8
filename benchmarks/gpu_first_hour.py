"""Everything that only a GPU can show, one part after the other, within half an hour.

    bash scripts/gpu_first_hour.sh                          # one GPU; two show more
    bash scripts/gpu_first_hour.sh --device cpu             # rehearsed in miniature

Each part is a process of its own with a time limit: one that fails, or takes too long, leaves the
results of the others, and what it has found itself. ``--output`` gets ``first_hour.json`` and
``first_hour.md``, both anew after every part, a table per part, with what training/cost.py
predicts beside what was measured. A part that cannot run here says why. Weights are random, or
those of ``--model``; nothing is downloaded. Exit status: 1 if a part failed, 130 if stopped.

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
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
from common import (
    ROOT,
    choose_device,
    environment,
    how_it_ended,
    lacking,
    machine,
    processor,
    shown,
)

ASSUMED_TFLOPS = {"cuda": 989.0, "cpu": 0.1}
_SAID = 2000  # characters of what a failed part printed last
_POLL_S = 0.2
_RANKS = 2  # of the part that reduces gradients: GPUs, or processes of a CPU
# How much the comparisons do: for a GPU of 80 GiB, and in miniature.
_OPTIONS = {
    "training.py": {
        "cuda": "--steps=4 --warm-up=2 --global-batch=32 --turns=2 --trl-batch 8 "
        "--micro-batch-tokens=16384",
        "cpu": "--steps=1 --warm-up=1 --global-batch=4 --turns=1 --threads=1 --trl-batch 2",
    },
    "scoring.py": {
        "cuda": "--pairs=64 --batch=16 --turns=4",
        "cpu": "--pairs=2 --batch=4 --turns=1 --threads=1",
    },
    "invariance.py": {
        "cuda": "--pairs=16 --turns=3",
        "cpu": "--pairs=2 --turns=1 --threads=1",
    },
}
# Asked by a signal, and looked for only where nothing is left behind.
_STOP = threading.Event()
Row = dict[str, Any]
Result = dict[str, Any]


def main() -> int:
    arguments = _parse()
    hour = _hour(arguments)
    chosen = _with_needs(arguments.parts or [part.name for part in PARTS])
    report = _Report(arguments.output, _about(hour, arguments), chosen)
    end = time.monotonic() + 60 * arguments.minutes
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: _STOP.set())
    for part in chosen:
        if not _STOP.is_set():
            report.add(_run(part, hour, report.results, end, arguments.threads))
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

    def add(self, result: Result) -> None:
        self.results.append(result)
        self.write()

    def write(self) -> None:
        """Both files; each is whole at any time."""
        begun = len(self.results)
        to_come = [_result(part, "not run", "it was not come to") for part in self._parts[begun:]]
        content = {**self._about, "parts": [*self.results, *to_come]}
        _write(self._folder / "first_hour.json", json.dumps(content, indent=2) + "\n")
        _write(self.page, render_page(content))


def _write(path: Path, text: str) -> None:
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)


def _run(part: Part, hour: Hour, before: Sequence[Result], end: float, threads: int) -> Result:
    """What became of a part; an interruption ends it, and is its state."""
    why = _why_not(part, hour, before, end)
    if why is not None:
        print(f"{part.name}: not run: {why}", flush=True)
        return _result(part, "not run", why)
    limit = min(part.limit, end - time.monotonic())
    print(f"{part.name}: {part.about}, at most {limit:.0f} s", flush=True)
    start = time.monotonic()
    log = hour.work / f"{part.name}.log"
    hour.output(part.name).unlink(missing_ok=True)
    state, why = _wait(part.command(hour), log, limit, hour.device, threads)
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


def _why_not(part: Part, hour: Hour, before: Sequence[Result], end: float) -> str | None:
    states = {result["part"]: result["state"] for result in before}
    for need in part.needs:
        if states.get(need) != "done":
            return f"it needs the part {need}, which is {states.get(need)}"
    if time.monotonic() >= end:
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


# The parts: what each shows, its command, what it needs, where its rows are.
#
# A part is a process of its own, so that it fails alone. Its limit is in seconds; together they
# stay below half an hour.


@dataclass(frozen=True)
class Hour:
    """What all parts have in common; the pythons are those of the other sides.

    ``precision`` is that of points on random weights, ``tflops`` the peak that predictions assume.
    """

    device: str
    gpus: int
    precision: str
    work: Path
    model: Path | None
    data: Path | None
    tflops: float
    trl_python: str
    vllm_python: str

    def output(self, part: str) -> Path:
        """What a part has found, as it writes it."""
        return self.work / f"{part}.out"


@dataclass(frozen=True)
class Part:
    """One process. ``lacks`` says in a line why the part cannot run here; None is that it can."""

    name: str
    about: str
    limit: int
    command: Callable[[Hour], list[str]]
    read: Callable[[Path], tuple[list[Row], list[str]]]
    lacks: Callable[[Hour], str | None] = lambda hour: None
    needs: tuple[str, ...] = ()


def read_rows(output: Path) -> tuple[list[Row], list[str]]:
    """Rows, and no remarks."""
    return json.loads(output.read_text()), []


def read_benchmark(output: Path) -> tuple[list[Row], list[str]]:
    """The table of training.py or scoring.py, and how the other side failed."""
    content = json.loads(output.read_text())
    failures = [*content.get("failures", []), content.get("failure")]
    return content["rows"], [failure for failure in failures if failure]


def read_tests(output: Path) -> tuple[list[Row], list[str]]:
    """A row for each test of pytest's XML."""
    rows = []
    for case in ElementTree.parse(output).iter("testcase"):
        outcomes = [child for child in case if child.tag in ("failure", "error", "skipped")]
        said = outcomes[0].get("message", "") if outcomes else ""
        rows.append(
            {
                "test": case.get("name"),
                "outcome": outcomes[0].tag if outcomes else "passed",
                "seconds": float(case.get("time", 0)),
                "said": said.partition("\n")[0][:200],
            }
        )
    return rows, []


def _work(part: str) -> Callable[[Hour], list[str]]:
    """The command of a part of first_hour_work.py."""

    def command(hour: Hour) -> list[str]:
        job = {
            "device": hour.device,
            "precision": hour.precision,
            "tflops": hour.tflops,
            "work": str(hour.work),
            "model": None if hour.model is None else str(hour.model),
            "data": None if hour.data is None else str(hour.data),
        }
        script = str(ROOT / "benchmarks/first_hour_work.py")
        return [sys.executable, script, part, json.dumps(job), str(hour.output(part))]

    return command


def _on_ranks(part: str) -> Callable[[Hour], list[str]]:
    def command(hour: Hour) -> list[str]:
        python, *rest = _work(part)(hour)
        ranks = f"--nproc-per-node={_RANKS}"
        return [python, "-m", "torch.distributed.run", "--standalone", ranks, *rest]

    return command


def _tests(hour: Hour) -> list[str]:
    where = [str(ROOT / "tests/models/test_gpu.py"), f"--junitxml={hour.output('tests')}"]
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *where]


def _comparison(part: str, script: str) -> Callable[[Hour], list[str]]:
    """The command of a benchmark of its own, on the files of the part ``model``."""

    def command(hour: Hour) -> list[str]:
        files = [f"--model={hour.work / 'hf'}", f"--data={hour.work / 'pairs.jsonl'}"]
        where = [f"--work={hour.work}", f"--output={hour.output(part)}", f"--device={hour.device}"]
        trl, vllm = f"--trl-python={hour.trl_python}", f"--vllm-python={hour.vllm_python}"
        peer = {"training": [trl], "vllm": [vllm]}.get(part, [])
        few = _OPTIONS[script][hour.device].split()
        return [sys.executable, str(ROOT / "benchmarks" / script), *files, *where, *peer, *few]

    return command


def _lacks(python: str, *modules: str) -> str | None:
    try:
        missing = lacking(*modules, python=python)
    except OSError as error:
        return f"{python}: cannot be run: {error.strerror}"
    return f"{python} lacks {', '.join(missing)}" if missing else None


def _lacks_gpu(hour: Hour) -> str | None:
    if hour.device != "cuda":
        return "it needs a GPU: every test of it would be skipped"
    return _lacks(sys.executable, "pytest")


def _lacks_two(hour: Hour) -> str | None:
    """NCCL needs two GPUs; on a CPU the same goes over gloo."""
    if hour.device == "cuda" and hour.gpus < _RANKS:
        return f"NCCL needs two GPUs, and this machine has {hour.gpus}"
    return None


PARTS = (
    Part("machine", "what is here, and its rates", 60, _work("machine"), read_rows),
    Part("profile", "where the time of a step goes", 60, _work("profile"), read_rows),
    Part("tests", "tests/models/test_gpu.py", 240, _tests, read_tests, _lacks_gpu),
    Part("model", "the model and pairs of the comparisons", 120, _work("model"), read_rows),
    Part(
        "training",
        "training against TRL's RewardTrainer",
        240,
        _comparison("training", "training.py"),
        read_benchmark,
        lambda hour: _lacks(hour.trl_python, "trl", "datasets", "accelerate"),
        ("model",),
    ),
    Part(
        "scoring",
        "scoring against transformers",
        120,
        _comparison("scoring", "scoring.py"),
        read_benchmark,
        needs=("model",),
    ),
    Part(
        "vllm",
        "scoring against vLLM",
        180,
        _comparison("vllm", "scoring.py"),
        read_benchmark,
        lambda hour: _lacks(hour.vllm_python, "vllm"),
        ("model",),
    ),
    Part(
        "invariance",
        "rewards in other company: bits that change, and what it costs that none does",
        60,
        _comparison("invariance", "invariance.py"),
        read_benchmark,
        needs=("model",),
    ),
    Part("mfu", "a step by sequence length and hidden size", 240, _work("mfu"), read_rows),
    Part("memory", "memory against the planner, in GiB", 150, _work("memory"), read_rows),
    Part("offload", "Adam's moments in host memory", 120, _work("offload"), read_rows),
    Part("save", "how long a save holds training up", 90, _work("save"), read_rows),
    Part(
        "overlap",
        "gradients reduced while others are computed",
        90,
        _on_ranks("overlap"),
        read_rows,
        _lacks_two,
    ),
    Part(
        "context",
        "texts that ranks share, and experts",
        90,
        _on_ranks("context"),
        read_rows,
        _lacks_two,
    ),
)


# The page: Markdown, a table for each part.


def render_page(content: Mapping[str, Any]) -> str:
    """Everything of ``first_hour.json`` that a person reads."""
    facts = [f"- {key}: {value}" for key, value in content.items() if key != "parts"]
    states = [
        {
            "part": part["part"],
            "what it shows": part["about"],
            "state": part["state"],
            "seconds": round(part["seconds"]),
            "why": part["why"],
        }
        for part in content["parts"]
    ]
    pieces = ["# The first hour", "\n".join(facts), table(states)]
    for part in content["parts"]:
        pieces += _section(part)
    return "\n\n".join(pieces) + "\n"


def _section(part: Mapping[str, Any]) -> list[str]:
    pieces = [f"## {part['part']}: {part['about']}"]
    if part["state"] != "done":
        pieces.append(f"{part['state']}: {part['why']}")
    if part["rows"]:
        pieces.append(table(part["rows"]))
    return [*pieces, *(f"```\n{remark}\n```" for remark in part["remarks"])]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table; a column without any content is left out."""
    every = dict.fromkeys(name for row in rows for name in row)
    names = [name for name in every if any(row.get(name) not in (None, "") for row in rows)]
    numbers = {
        name for name in names if any(isinstance(row.get(name), int | float) for row in rows)
    }
    rule = ["---:" if name in numbers else "---" for name in names]
    body = [[shown(row.get(name)) for name in names] for row in rows]
    lines = [
        [cell.replace("|", "\\|").replace("\n", "<br>") for cell in line]
        for line in [names, rule, *body]
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
