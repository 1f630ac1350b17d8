"""Functions that all benchmarks share: devices, model conversion, workers, tables and clocks."""

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
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        help="device to compute on; default: cuda if there is a GPU",
    )


def choose_device(name: str | None) -> str:
    """Make this process and its children compute on ``name``; None takes a GPU if there is one.

    It must be called before torch looks for a GPU: "cpu" hides all GPUs.
    """
    if name == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    available = "cuda" if torch.cuda.is_available() else "cpu"
    if name is not None and name != available:
        sys.exit(f"--device: got {name}, wanted cpu: torch finds no GPU here")
    return available


def prepare_model(source: Path, folder: Path) -> tuple[Path, Path]:
    """Convert ``source``, a GGUF file or a Hugging Face folder, in ``folder``.

    Returns the Hugging Face folder and the ``.nemo`` file, which have the same weights.
    """
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

    location = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(**location, dtype="float32")
    # The weights are dequantized by now, but ``save_pretrained`` rejects a model that is still
    # marked as quantized, so remove the marks.
    del model.hf_quantizer
    del model.config.quantization_config
    model.save_pretrained(hf)
    AutoTokenizer.from_pretrained(**location).save_pretrained(hf)


class WorkerFailed(Exception):
    """A worker process ended without a result; the message has its exit and its last output."""


def require(*modules: str, python: str = sys.executable) -> None:
    """Exit with a one-line message if the interpreter ``python`` lacks one of ``modules``."""
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
    """The ``modules`` that the interpreter ``python`` cannot import.

    Raises:
        OSError: the interpreter cannot be run.
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
    """Run ``script`` in a process as its worker ``role`` (see ``start``) and return its result.

    With ``ranks`` above 1, torchrun starts the processes.

    Raises:
        WorkerFailed: the process ended without a result.
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
    """Run a benchmark's ``main`` or, in a process that ``run_worker`` started, one of ``workers``.

    A worker gets the job and returns its result, which is printed for ``run_worker``. If several
    ranks run a worker, all but one return None.
    """
    role, job = [*sys.argv[1:3], "", ""][:2]
    if role in workers:
        result = workers[role](json.loads(job))
        if result is not None:
            print(json.dumps(result))
        return
    try:
        main()
    except WorkerFailed as error:
        sys.exit(f"nemo_aligner: {error}")


def environment(threads: int) -> dict[str, str]:
    """Build the environment variables of a process that a benchmark starts.

    It computes with ``threads`` threads, and can import this package.
    """
    return {
        **os.environ,
        # The caller's PYTHONPATH stays in effect: it may name folders with more packages.
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }


def how_it_ended(returncode: int) -> str:
    """Describe how a process ended, from the ``returncode`` of ``subprocess``."""
    if returncode >= 0:
        return f"it ended with exit status {returncode}"
    name = signal.Signals(-returncode).name
    reason = ", as the kernel does where memory is short" if name == "SIGKILL" else ""
    return f"it was ended by {name}{reason}"


class Worker:
    """A process that runs ``script`` and answers requests, each a line of JSON on stdin."""

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
        """Send one request and return the answer.

        Raises:
            WorkerFailed: the process has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        questions = [question] if self._job is None else [self._job, question]
        self._job = None
        with suppress(BrokenPipeError):  # if the process has ended, the code below reports it
            self._process.stdin.write("".join(json.dumps(message) + "\n" for message in questions))
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            ending = how_it_ended(self._process.wait())
            self._said.seek(0)
            raise WorkerFailed(f"{ending}\n{self._said.read()[-4000:]}".strip())
        return json.loads(answer)

    def close(self) -> None:
        """Kill the worker's process."""
        self._process.kill()
        self._process.communicate()
        self._said.close()


def median_of_ratios(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Compute the median of ``theirs / ours`` over runs; both are seconds of each run.

    Above 1, ours took less time.
    """
    return median(t / o for o, t in zip(ours, theirs, strict=True))


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    """Render rows as a text table: the first column left-aligned, all others right-aligned."""
    names = list(rows[0])
    cells = [names, *([format_cell(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    lines = []
    for line in cells:
        first, *remaining = (
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        lines.append("  ".join([first, *remaining]).rstrip())
    return "\n".join(lines)


def format_cell(value: Any) -> str:
    """Format a table's cell: floats with three digits, None as a dash."""
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def write_json(path: Path | None, content: Mapping[str, Any]) -> None:
    if path is not None:
        write_whole(path, json.dumps(content, indent=2) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Replace a file by a rename, so that it is complete even if this process is stopped."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)


def machine() -> str:
    """Name of the machine's GPU, else of its CPU."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return processor()


def processor() -> str:
    """Name of the CPU and number of its cores."""
    model = next(
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    )
    return f"{model}, {os.cpu_count()} cores"


def now() -> float:
    """Read a clock in seconds after the GPU has finished all queued work.

    The difference of two readings is then the time that the work between them took.
    """
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def peak_gib() -> float:
    """Return the peak memory so far in GiB.

    On a GPU it is that of torch's allocator, otherwise that of this process.
    """
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def gpu_memory_used() -> float | None:
    """GiB in use on the first GPU, over all processes; None without nvidia-smi.

    It creates no CUDA context in this process, because the context's memory would be counted.
    """
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
        return float(done.stdout.splitlines()[0]) / 2**10
    except (OSError, subprocess.TimeoutExpired, IndexError, ValueError):
        return None


def matmul_rate() -> float:
    """Measure the FLOP/s of a large matmul, in bf16 on a GPU and in fp32 on a CPU.

    On a CPU it is the faster of torch's matmul and that of nemo_aligner/cpu.
    """
    import torch

    from nemo_aligner.cpu.matmuls import linear_in_chunks

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
