"""The parts of the first hour on a GPU: what they show, their commands, where their rows are.

See gpu_first_hour.py, which runs them in this order.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ROOT, lacking
from step_settings import fastest_so_far

Row = dict[str, Any]
_ONE_WIDTH = "without a GPU one width is enough"
_RANKS = 2  # of the part that reduces gradients: GPUs, or processes of a CPU
# How much the comparisons do: for a GPU of 80 GiB, and in miniature.
_OPTIONS = {
    "training": {
        "cuda": "--steps=4 --warm-up=4 --global-batch=32 --turns=1 --trl-batch 8 "
        "--trl-tuned 16 32 8",
        "cpu": "--steps=1 --warm-up=1 --global-batch=4 --turns=1 --threads=1 --trl-batch 2",
    },
    "scoring": {
        "cuda": "--pairs=128 --batch 16 32 64 --turns=3 --rows 0 256 --cuda-graphs",
        "cpu": "--pairs=2 --batch 4 --turns=1 --threads=1 --rows 0",
    },
    "vllm": {
        "cuda": "--pairs=128 --turns=3",
        "cpu": "--pairs=2 --turns=1 --threads=1",
    },
    "invariance": {
        "cuda": "--pairs=16 --turns=3",
        "cpu": "--pairs=2 --turns=1 --threads=1",
    },
}


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

    def log(self, part: str) -> Path:
        """What a part prints."""
        return self.work / f"{part}.log"


Command = Callable[[Hour, float], list[str]]


@dataclass(frozen=True)
class Part:
    """One process.

    Attributes:
        limit: seconds after which it is stopped.
        command: makes the process's command, for the seconds that it may take this time.
        read: reads its rows, and remarks on what failed.
        lacks: says in a line why the part cannot run here; None is that it can.
        needs: parts that have to be done before.
    """

    name: str
    about: str
    limit: int
    command: Command
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


def _work(part: str) -> Command:
    """The command of a part of first_hour_work.py."""

    def command(hour: Hour, seconds: float) -> list[str]:
        job = {
            "device": hour.device,
            "precision": hour.precision,
            "tflops": hour.tflops,
            "seconds": seconds,
            "work": str(hour.work),
            "model": None if hour.model is None else str(hour.model),
            "data": None if hour.data is None else str(hour.data),
        }
        script = str(ROOT / "benchmarks/first_hour_work.py")
        return [sys.executable, script, part, json.dumps(job), str(hour.output(part))]

    return command


def _on_ranks(part: str) -> Command:
    def command(hour: Hour, seconds: float) -> list[str]:
        python, *rest = _work(part)(hour, seconds)
        ranks = f"--nproc-per-node={_RANKS}"
        return [python, "-m", "torch.distributed.run", "--standalone", ranks, *rest]

    return command


def _tests(hour: Hour, seconds: float) -> list[str]:
    script, tests = ROOT / "benchmarks/first_hour_tests.py", ROOT / "tests/models/test_gpu.py"
    return [sys.executable, str(script), str(tests), str(hour.output("tests"))]


def _comparison(part: str, script: str) -> Command:
    """The command of a benchmark of its own, on the files of the part ``model``."""

    def command(hour: Hour, seconds: float) -> list[str]:
        files = [f"--model={hour.work / 'hf'}", f"--data={hour.work / 'pairs.jsonl'}"]
        where = [f"--work={hour.work}", f"--output={hour.output(part)}", f"--device={hour.device}"]
        trl, vllm = f"--trl-python={hour.trl_python}", f"--vllm-python={hour.vllm_python}"
        peer = {"training": [trl, *_our_settings(hour)], "vllm": [vllm]}.get(part, [])
        few = _OPTIONS[part][hour.device].split()
        return [sys.executable, str(ROOT / "benchmarks" / script), *files, *where, *peer, *few]

    return command


def _our_settings(hour: Hour) -> list[str]:
    """Train by the settings that were fastest at the width of the model that is compared on."""
    best = fastest_so_far(hour.output("width-2048"))
    if best is None or hour.model is not None:
        return []
    return ["--ours", *(f"model.{name}={json.dumps(v)}" for name, v in vars(best).items())]


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


def _width(hidden: int, seconds: int) -> Part:
    return Part(
        f"width-{hidden}",
        f"a step at a width of {hidden:,}, by kernels, graphs and micro-batch",
        seconds,
        _work(f"width-{hidden}"),
        read_rows,
        lambda hour: None if hour.device == "cuda" or hidden == 1024 else _ONE_WIDTH,
    )


# The most valuable first, so that running out of time loses the least. Up to "save" the limits sum
# up to the nine minutes of gpu_first_hour.py.
PARTS = (
    # The first one also compiles for the others.
    _width(1024, 90),
    _width(2048, 75),
    _width(4096, 75),
    Part("model", "the model and pairs of the comparisons", 60, _work("model"), read_rows),
    Part(
        "scoring",
        "scoring against transformers, by rows of a matmul and CUDA graphs",
        85,
        _comparison("scoring", "scoring.py"),
        read_benchmark,
        needs=("model",),
    ),
    Part("memory", "memory against the planner, in GiB", 30, _work("memory"), read_rows),
    Part(
        "training",
        "training against TRL's RewardTrainer",
        75,
        _comparison("training", "training.py"),
        read_benchmark,
        lambda hour: _lacks(hour.trl_python, "trl", "datasets", "accelerate"),
        ("model",),
    ),
    Part("offload", "Adam's moments in host memory", 25, _work("offload"), read_rows),
    Part("save", "how long a save holds training up", 25, _work("save"), read_rows),
    Part("profile", "where the time of a step goes", 60, _work("profile"), read_rows),
    Part("tests", "tests/models/test_gpu.py", 240, _tests, read_rows, _lacks_gpu),
    Part(
        "invariance",
        "rewards in other company: bits that change, and what it costs that none does",
        60,
        _comparison("invariance", "invariance.py"),
        read_benchmark,
        needs=("model",),
    ),
    Part("machine", "what is here, and its rates", 60, _work("machine"), read_rows),
    Part("mfu", "a step by sequence length and hidden size", 200, _work("mfu"), read_rows),
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
