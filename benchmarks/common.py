"""What the benchmarks have in common: the same weights in both forms, processes, and a table."""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def add_device_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: what the machine has")


def choose_device(name: str | None) -> str:
    """Make this process, and those it starts, compute on ``name``; None is what the machine has.

    Called before torch looks for a GPU: "cpu" hides them all.
    """
    if name == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    found = "cuda" if torch.cuda.is_available() else "cpu"
    if name is not None and name != found:
        sys.exit(f"--device: got {name}, wanted cpu: torch finds no GPU here")
    return found


def prepare_model(source: Path, folder: Path) -> tuple[Path, Path]:
    """``source`` (GGUF, or a Hugging Face folder) as a Hugging Face folder and as a ``.nemo``."""
    if source.suffix == ".gguf":
        require("accelerate", "gguf")
    folder.mkdir(parents=True, exist_ok=True)
    hf, nemo = source, folder / "base.nemo"
    if source.suffix == ".gguf":
        hf = folder / "hf"
        if not (hf / "config.json").is_file():
            _unpack_gguf(source, hf)
    if not nemo.is_file():
        from nemo_aligner.checkpoint.hf.convert import convert_hf_to_nemo

        convert_hf_to_nemo(hf, nemo)
    return hf, nemo


def _unpack_gguf(source: Path, hf: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype="float32")
    # Its weights are plain numbers by now, but it would not save what was once quantized.
    del model.hf_quantizer
    del model.config.quantization_config
    model.save_pretrained(hf)
    AutoTokenizer.from_pretrained(**where).save_pretrained(hf)


class WorkerFailed(Exception):
    """A process that a benchmark started ended without a result; the message says how."""


def require(*modules: str, python: str = sys.executable) -> None:
    """End this benchmark with one line where ``python`` lacks a module that it needs."""
    try:
        missing = lacking(*modules, python=python)
    except OSError as error:
        sys.exit(f"{python}: cannot be run: {error.strerror}")
    if missing:
        sys.exit(
            f"{python} lacks {', '.join(missing)}, which this benchmark needs: "
            f"{python} -m pip install -e '{ROOT}[bench]'"
        )


def lacking(*modules: str, python: str = sys.executable) -> list[str]:
    """Which of these modules ``python`` lacks.

    Raises:
        OSError: it cannot be run.
    """
    program = (
        "import sys; from importlib.util import find_spec; "
        "print(*(name for name in sys.argv[1:] if find_spec(name) is None))"
    )
    done = subprocess.run([python, "-c", program, *modules], capture_output=True, text=True)
    return done.stdout.split()


def run_worker(
    script: str,
    role: str,
    job: Mapping[str, Any],
    threads: int,
    *,
    python: str = sys.executable,
    ranks: int = 1,
) -> dict[str, Any]:
    """Run ``script`` as its worker ``role`` (see ``start``); torchrun starts several ranks.

    Raises:
        WorkerFailed: it ended without a result.
    """
    command = [python]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [str(ROOT / "benchmarks" / script), role, json.dumps(job)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(threads), check=False
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        raise WorkerFailed(f"{how_it_ended(done.returncode)}\n{done.stderr[-4000:]}".strip())
    return json.loads(lines[-1])


def start(main: Callable[[], None], **workers: Callable[[Any], object]) -> None:
    """Run a benchmark or, in a process that ``run_worker`` started, its worker.

    A worker gets the job, and returns the result: None on all ranks but one.
    """
    role, job = [*sys.argv[1:3], "", ""][:2]
    if role in workers:
        found = workers[role](json.loads(job))
        if found is not None:
            print(json.dumps(found))
        return
    try:
        main()
    except WorkerFailed as error:
        sys.exit(f"nemo_aligner: {error}")


def environment(threads: int) -> dict[str, str]:
    """That of a process which a benchmark starts."""
    return {
        **os.environ,
        # What was given stays: packages may lie beside the environment's.
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }


def how_it_ended(returncode: int) -> str:
    """How a process has ended, by the exit status that its parent is told."""
    if returncode >= 0:
        return f"it ended with exit status {returncode}"
    name = signal.Signals(-returncode).name
    reason = ", as the kernel does where memory is short" if name == "SIGKILL" else ""
    return f"it was ended by {name}{reason}"


class Worker:
    """``script`` in a process of its own that answers questions, each a line of JSON."""

    def __init__(self, python: str, script: str, job: Mapping[str, Any], threads: int) -> None:
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed with the process)
        self._process = subprocess.Popen(
            [python, str(ROOT / "benchmarks" / script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=environment(threads),
        )
        self._job: Mapping[str, Any] | None = job

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one question.

        Raises:
            WorkerFailed: the process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        questions = [question] if self._job is None else [self._job, question]
        self._job = None
        with suppress(BrokenPipeError):  # the answer that does not come says why
            self._process.stdin.write("".join(json.dumps(each) + "\n" for each in questions))
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            ending = how_it_ended(self._process.wait())
            self._said.seek(0)
            raise WorkerFailed(f"{ending}\n{self._said.read()[-4000:]}".strip())
        return json.loads(answer)

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self._process.communicate()
        self._said.close()


def median_of_ratios(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of ``theirs / ours``, run by run: above 1 ours took less."""
    return median(t / o for o, t in zip(ours, theirs, strict=True))


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    """Columns as wide as their content; numbers on the right; None is a dash."""
    names = list(rows[0])
    cells = [names, *([shown(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    lines = []
    for line in cells:
        first, *rest = (
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        lines.append("  ".join([first, *rest]).rstrip())
    return "\n".join(lines)


def shown(value: Any) -> str:
    """A cell of a table: numbers to three places, None as a dash."""
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def write_json(path: Path | None, content: Mapping[str, Any]) -> None:
    if path is not None:
        write_whole(path, json.dumps(content, indent=2) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file that is whole at any time, even if the process is stopped meanwhile."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)


def machine() -> str:
    """What the figures were measured on."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return processor()


def processor() -> str:
    """This machine's CPU and its cores."""
    model = next(
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    return f"{model}, {os.cpu_count()} cores"


def now() -> float:
    """Seconds on a clock, once a GPU has done what it was given."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_gib() -> float:
    """The most memory so far: of the allocator on a GPU, else of this process."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def gpu_memory_used() -> float | None:
    """GiB of the first GPU that all processes hold, by nvidia-smi; None without it.

    It does not make a CUDA context in this process, which would be counted.
    """
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
        return float(done.stdout.splitlines()[0]) / 2**10
    except (OSError, subprocess.TimeoutExpired, IndexError, ValueError):
        return None


def matmul_rate() -> float:
    """FLOP/s of a large product in the precision that is trained in, by the faster library."""
    import torch

    from nemo_aligner.cpu.products import linear_in_chunks

    gpu = torch.cuda.is_available()
    size = 8192 if gpu else 2048
    dtype, device = (torch.bfloat16, "cuda") if gpu else (torch.float32, "cpu")
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    best = float("inf")
    for multiply in (torch.matmul,) if gpu else (torch.matmul, linear_in_chunks):
        for _ in range(5):
            start = time.perf_counter()
            multiply(a, b).sum().item()
            best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best
