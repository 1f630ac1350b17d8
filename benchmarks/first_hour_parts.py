"""The parts of gpu_first_hour.py: what each shows, its command, what it needs, where its rows are.

A part is a process of its own, so that it fails alone. Its limit is in seconds; together they stay
below half an hour.
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ROOT, lacking
from first_hour_sizes import Sizes

Row = dict[str, Any]
_RANKS = 2  # of the part that reduces gradients: GPUs, or processes of a CPU


@dataclass(frozen=True)
class Hour:
    """What all parts have in common; the pythons are those of the other sides."""

    device: str
    gpus: int
    work: Path
    sizes: Sizes
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


def _worker(name: str, arguments: list[str], hour: Hour, part: str) -> list[str]:
    script = str(ROOT / "benchmarks" / name)
    return [sys.executable, script, *arguments, str(hour.output(part))]


def _machine(hour: Hour) -> list[str]:
    return _worker("first_hour_machine.py", [], hour, "machine")


def _tests(hour: Hour) -> list[str]:
    where = [str(ROOT / "tests/models/test_gpu.py"), f"--junitxml={hour.output('tests')}"]
    return [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *where]


def _model(hour: Hour) -> list[str]:
    job = {
        "work": str(hour.work),
        "model": None if hour.model is None else str(hour.model),
        "data": None if hour.data is None else str(hour.data),
        "shape": hour.sizes.hf,
        "pairs": hour.sizes.file_pairs,
    }
    return _worker("first_hour_model.py", [json.dumps(job)], hour, "model")


def _comparison(hour: Hour, script: str, part: str, *more: str) -> list[str]:
    files = [f"--model={hour.work / 'hf'}", f"--data={hour.work / 'pairs.jsonl'}"]
    where = [f"--work={hour.work}", f"--output={hour.output(part)}", f"--device={hour.device}"]
    return [sys.executable, str(ROOT / "benchmarks" / script), *files, *where, *more]


def _training(hour: Hour) -> list[str]:
    trl = f"--trl-python={hour.trl_python}"
    return _comparison(hour, "training.py", "training", trl, *hour.sizes.training)


def _scoring(hour: Hour) -> list[str]:
    return _comparison(hour, "scoring.py", "scoring", *hour.sizes.scoring)


def _invariance(hour: Hour) -> list[str]:
    return _comparison(hour, "invariance.py", "invariance", *hour.sizes.invariance)


def _vllm(hour: Hour) -> list[str]:
    vllm = f"--vllm-python={hour.vllm_python}"
    return _comparison(hour, "scoring.py", "vllm", vllm, *hour.sizes.scoring)


def _work(part: str) -> Callable[[Hour], list[str]]:
    def command(hour: Hour) -> list[str]:
        points = hour.sizes.points[part]
        job = {"points": points, "tflops": hour.tflops, "folder": str(hour.work)}
        return _worker("first_hour_work.py", [part, json.dumps(job)], hour, part)

    return command


def _overlap(hour: Hour) -> list[str]:
    python, *rest = _work("overlap")(hour)
    ranks = f"--nproc-per-node={_RANKS}"
    return [python, "-m", "torch.distributed.run", "--standalone", ranks, *rest]


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
    Part("machine", "what is here, and its rates", 60, _machine, read_rows),
    Part("tests", "tests/models/test_gpu.py", 240, _tests, read_tests, _lacks_gpu),
    Part("model", "the model and pairs of the comparisons", 120, _model, read_rows),
    Part(
        "training",
        "training against TRL's RewardTrainer",
        240,
        _training,
        read_benchmark,
        lambda hour: _lacks(hour.trl_python, "trl", "datasets", "accelerate"),
        ("model",),
    ),
    Part(
        "scoring",
        "scoring against transformers",
        120,
        _scoring,
        read_benchmark,
        needs=("model",),
    ),
    Part(
        "vllm",
        "scoring against vLLM",
        180,
        _vllm,
        read_benchmark,
        lambda hour: _lacks(hour.vllm_python, "vllm"),
        ("model",),
    ),
    Part(
        "invariance",
        "rewards in other company: bits that change, and what it costs that none does",
        60,
        _invariance,
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
        120,
        _overlap,
        read_rows,
        _lacks_two,
    ),
)
