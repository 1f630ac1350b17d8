"""The parts (measurements) of gpu_first_hour.py: subject, command and result file of each.

gpu_first_hour.py runs them in the order of ``PARTS``.
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
_ONE_WIDTH = "without a GPU only the hidden size 1,024 is measured"
# The parts "overlap" and "context" each start this many ranks (processes). On a machine with GPUs
# every rank needs a GPU of its own; otherwise the ranks share the CPU.
_RANKS = 2
# Options of the comparisons, by device: sized for a GPU of 80 GiB, or tiny for a CPU.
_OPTIONS = {
    "training": {
        "cuda": "--steps=4 --warm-up=4 --global-batch=32 --turns=1 --trl-batch 8 "
        "--trl-tuned 16 32 8",
        "cpu": "--steps=1 --warm-up=1 --global-batch=4 --turns=1 --threads=1 --trl-batch 2",
    },
    "scoring": {
        "cuda": "--pairs=128 --batch 16 32 64 --turns=3 --rows 0 256 --cuda-graphs "
        "--attention-packages",
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
    """The options of one run of gpu_first_hour.py, which all its parts (measurements) share.

    Attributes:
        precision: precision of the models with random weights.
        work: the folder for models, row files and logs.
        tflops: the GPU's peak that predictions assume.
        trl_python, vllm_python: interpreters of the environments that have TRL and vLLM.
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
        """Return the path of the file to which the measurement ``part`` writes its rows."""
        return self.work / f"{part}.out"

    def log(self, part: str) -> Path:
        """Return the path of the file that gets what the measurement ``part`` prints."""
        return self.work / f"{part}.log"


Command = Callable[[Hour, float], list[str]]


@dataclass(frozen=True)
class Part:
    """One measurement of gpu_first_hour.py, which runs in a separate process.

    Attributes:
        about: what it measures, for the report.
        limit: seconds after which it is stopped.
        command: builds the command from the options and the seconds that the part may take.
        read: reads the output file; returns its rows, and texts about failures for the report.
        lacks: returns the reason why the part cannot run on this machine, or None if it can.
        needs: names of parts that must be done before it.
    """

    name: str
    about: str
    limit: int
    command: Command
    read: Callable[[Path], tuple[list[Row], list[str]]]
    lacks: Callable[[Hour], str | None] = lambda hour: None
    needs: tuple[str, ...] = ()


def read_rows(output: Path) -> tuple[list[Row], list[str]]:
    """Read the rows that a part wrote to its output file.

    Returns:
        The rows, and an empty list: such a part has no texts about failures (``Part.read``).
    """
    return json.loads(output.read_text()), []


def read_benchmark(output: Path) -> tuple[list[Row], list[str]]:
    """Read the output file of training.py or scoring.py.

    Returns:
        The rows, and a text for each failure of TRL, vLLM or transformers.
    """
    content = json.loads(output.read_text())
    failures = [*content.get("failures", []), content.get("failure")]
    return content["rows"], [failure for failure in failures if failure]


def _worker_command(part: str) -> Command:
    """Return a function that builds the command of ``part``, a function of first_hour_work.py."""

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


def _ranks_command(part: str) -> Command:
    def command(hour: Hour, seconds: float) -> list[str]:
        python, *arguments = _worker_command(part)(hour, seconds)
        ranks = f"--nproc-per-node={_RANKS}"
        return [python, "-m", "torch.distributed.run", "--standalone", ranks, *arguments]

    return command


def _tests_command(hour: Hour, seconds: float) -> list[str]:
    script, tests = ROOT / "benchmarks/first_hour_tests.py", ROOT / "tests/models/test_gpu.py"
    return [sys.executable, str(script), str(tests), str(hour.output("tests"))]


def _comparison_command(part: str, script: str) -> Command:
    """Return a function that builds the command of ``part``, which runs the benchmark ``script``.

    The benchmark uses the model and the pairs that the part ``model`` has written.
    """

    def command(hour: Hour, seconds: float) -> list[str]:
        files = [f"--model={hour.work / 'hf'}", f"--data={hour.work / 'pairs.jsonl'}"]
        outputs = [
            f"--work={hour.work}",
            f"--output={hour.output(part)}",
            f"--device={hour.device}",
        ]
        trl, vllm = f"--trl-python={hour.trl_python}", f"--vllm-python={hour.vllm_python}"
        peer = {"training": [trl, *_our_settings(hour)], "vllm": [vllm]}.get(part, [])
        options = _OPTIONS[part][hour.device].split()
        return [
            sys.executable,
            str(ROOT / "benchmarks" / script),
            *files,
            *outputs,
            *peer,
            *options,
        ]

    return command


def _our_settings(hour: Hour) -> list[str]:
    """Return options for training.py, which compares with TRL: the settings of our side.

    They are the fastest ones that the part ``width-2048`` has measured.
    """
    best = fastest_so_far(hour.output("width-2048"))
    if best is None or hour.model is not None:
        return []
    return ["--ours", *(f"model.{name}={json.dumps(v)}" for name, v in vars(best).items())]


def _describe_missing(python: str, *modules: str) -> str | None:
    try:
        missing = lacking(*modules, python=python)
    except OSError as error:
        return f"{python}: cannot be run: {error.strerror}"
    return f"{python} lacks {', '.join(missing)}" if missing else None


def _describe_missing_gpu(hour: Hour) -> str | None:
    if hour.device != "cuda":
        return "it needs a GPU: without one every test is skipped"
    return _describe_missing(sys.executable, "pytest")


def _describe_missing_ranks(hour: Hour) -> str | None:
    """Return why two ranks cannot run on this machine; None if they can.

    NCCL needs a GPU for each rank. On a CPU, ranks use gloo.
    """
    if hour.device == "cuda" and hour.gpus < _RANKS:
        return f"NCCL needs two GPUs, and this machine has {hour.gpus}"
    return None


def _width_part(hidden: int, seconds: int) -> Part:
    return Part(
        f"width-{hidden}",
        f"a step at a width of {hidden:,}, by kernels, graphs and micro-batch",
        seconds,
        _worker_command(f"width-{hidden}"),
        read_rows,
        lambda hour: None if hour.device == "cuda" or hidden == 1024 else _ONE_WIDTH,
    )


# The most valuable parts come first, in case time runs out. The time limits of the parts up to
# "save" add up to the nine minutes of gpu_first_hour.py.
PARTS = (
    # The first part also fills the kernel caches for the others, hence its larger limit.
    _width_part(1024, 90),
    _width_part(2048, 75),
    _width_part(4096, 75),
    Part(
        "model", "the model and pairs of the comparisons", 60, _worker_command("model"), read_rows
    ),
    Part(
        "scoring",
        "scoring against transformers, by rows of a matmul and CUDA graphs",
        85,
        _comparison_command("scoring", "scoring.py"),
        read_benchmark,
        needs=("model",),
    ),
    Part("memory", "memory against the planner, in GiB", 30, _worker_command("memory"), read_rows),
    Part(
        "training",
        "training against TRL's RewardTrainer",
        75,
        _comparison_command("training", "training.py"),
        read_benchmark,
        lambda hour: _describe_missing(hour.trl_python, "trl", "datasets", "accelerate"),
        ("model",),
    ),
    Part("offload", "Adam's moments in host memory", 25, _worker_command("offload"), read_rows),
    Part("save", "how long a save holds training up", 25, _worker_command("save"), read_rows),
    Part("profile", "where the time of a step goes", 60, _worker_command("profile"), read_rows),
    Part(
        "tests", "tests/models/test_gpu.py", 240, _tests_command, read_rows, _describe_missing_gpu
    ),
    Part(
        "invariance",
        "rewards that depend on the batch, and what batch invariance costs",
        60,
        _comparison_command("invariance", "invariance.py"),
        read_benchmark,
        needs=("model",),
    ),
    Part("machine", "what is here, and its rates", 60, _worker_command("machine"), read_rows),
    Part(
        "mfu", "a step by sequence length and hidden size", 200, _worker_command("mfu"), read_rows
    ),
    Part(
        "vllm",
        "scoring against vLLM",
        180,
        _comparison_command("vllm", "scoring.py"),
        read_benchmark,
        lambda hour: _describe_missing(hour.vllm_python, "vllm"),
        ("model",),
    ),
    Part(
        "overlap",
        "gradients reduced while others are computed",
        90,
        _ranks_command("overlap"),
        read_rows,
        _describe_missing_ranks,
    ),
    Part(
        "context",
        "context parallelism on long texts, and expert parallelism",
        90,
        _ranks_command("context"),
        read_rows,
        _describe_missing_ranks,
    ),
)
