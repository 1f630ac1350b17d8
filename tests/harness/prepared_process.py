"""Import the libraries once, then fork for every script that a test starts.

``python tests/harness/prepared_process.py`` runs scripts, or some of the ranks of one. It reads
jobs from stdin, one line of JSON each, written by ``tests/harness/launching.py``. It prints one
line when a job's script begins and another when the script has ended; several may run at once. When
stdin closes, the process ends and kills the scripts that still run. It has a single thread when it
forks.

It imports this package, too. What an import sets in ``os.environ`` is for a GPU, and forks lack it.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib.util
import json
import os
import runpy
import select
import signal
import sys
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Any, NoReturn

LIBRARIES = (
    "numpy", "numpy.ma", "yaml", "omegaconf", "safetensors.torch", "torch",
    "torch.distributed.checkpoint", "torch.distributed.tensor.experimental",
    "torch.utils.cpp_extension", "torch.utils.tensorboard", "torch._dynamo", "transformers",
    "transformers.models.auto.tokenization_auto", "aiohttp", "fastapi", "uvicorn",
    "prometheus_client",
)  # fmt: skip
# Modules that import nearly all others of the package, and megatron-core.
OURS = (
    "nemo_aligner.cli.main",
    "nemo_aligner.cli.train",
    "nemo_aligner.training.run",
    "nemo_aligner.evaluation.run",
    "nemo_aligner.serving.run",
)


def main() -> dict[str, Any] | None:
    """Serve jobs until stdin closes. In a forked child, return the job to run there."""
    import_libraries()
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # it is for the interpreter that goes down, and forks only exit
    try_template()
    read_defaults()
    assert len(os.listdir("/proc/self/task")) == 1, "a library started a thread: it may not fork"
    gc.freeze()
    scripts: dict[int, int] = {}  # process id by a descriptor that is readable once it has ended
    while True:
        ready = select.select([0, *scripts], [], [])[0]
        for descriptor in scripts.keys() & set(ready):
            os.close(descriptor)
            pid, status = os.waitpid(scripts.pop(descriptor), 0)
            answer(pid=pid, returncode=os.waitstatus_to_exitcode(status))
        if 0 not in ready:
            continue
        line = sys.stdin.readline()
        if not line:
            for pid in scripts.values():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            return None
        pid = os.fork()
        if pid == 0:
            for descriptor in scripts:
                os.close(descriptor)
            return json.loads(line)
        scripts[os.pidfd_open(pid)] = pid
        answer(pid=pid)


def import_libraries() -> None:
    """Import the installed ones of ``LIBRARIES``, then this package, so that forks need not."""
    for name in (*LIBRARIES, *OURS):
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)


def try_template() -> None:
    """Check the chat template of the tests' tokenizer, which nearly every script does at its start.

    Forks have the result, and need no process for the trial: 0.15 s of CPU time.
    """
    from nemo_aligner.contract.chat_template import ChatTemplate
    from nemo_aligner.contract.template_check import check_terminates
    from tests.harness.template import BOS, CHATML, EOS

    check_terminates(ChatTemplate(CHATML, BOS, EOS))


def read_defaults() -> None:
    """Build OmegaConf's defaults of the verbs' settings, which takes 0.04 s of CPU time a verb."""
    from nemo_aligner.config.evaluation import EvaluateConfig
    from nemo_aligner.config.load import load_config
    from nemo_aligner.config.serving import ServeConfig, ServeCriticConfig
    from nemo_aligner.config.training import TrainConfig

    for schema in (TrainConfig, EvaluateConfig, ServeConfig, ServeCriticConfig):
        load_config(schema)


def answer(**values: int) -> None:
    print(json.dumps(values), flush=True)


def become(job: dict[str, Any]) -> None:
    """Give the fork the job's environment, working directory, standard files and arguments."""
    os.environ.clear()
    os.environ.update(job["environment"])
    show(job["command"], job["environment"])
    tempfile.tempdir = None  # a library has read TMPDIR
    os.chdir(job["folder"])
    inputs = os.open(os.devnull, os.O_RDONLY)
    outputs = [
        os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND) for name in ("stdout", "stderr")
    ]
    for number, descriptor in enumerate((inputs, *outputs)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin = open(0)  # noqa: SIM115
    sys.argv = job["command"]
    sys.path[0] = str(Path(job["command"][0]).parent)


def show(command: list[str], environment: dict[str, str]) -> None:
    """Let ``/proc/PID/cmdline`` and ``environ`` show the script's, for tests that look for it.

    The kernel reads them from the memory that it filled at the start. ``launching.py`` starts the
    process with an argument and a variable that leave room.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
    arguments, arguments_end, variables, variables_end = map(int, fields[45:49])
    pairs = [f"{name}={value}" for name, value in environment.items()]
    write_strings([sys.executable, *command], arguments, arguments_end - arguments)
    write_strings(pairs, variables, variables_end - variables)


def write_strings(strings: list[str], address: int, size: int) -> None:
    content = b"".join(os.fsencode(string) + b"\0" for string in strings)
    ctypes.memmove(address, content[:size].ljust(size, b"\0"), size)


def run_and_exit(script: str) -> NoReturn:
    """Run ``script``, and end the fork as Python ends; Ctrl-C does that in Python's own way."""
    try:
        runpy.run_path(script, run_name="__main__")
        code: Any = None
    except SystemExit as end:
        code = end.code
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    exit_fork(code)


def exit_fork(code: Any) -> NoReturn:
    """Exit as ``sys.exit(code)`` does, except that the interpreter is not taken down.

    Taking it down writes to the pages of all imported libraries, which a fork has to copy for this:
    0.3 s of CPU time.
    """
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit((code or 0) & 0xFF)


if __name__ == "__main__":
    forked_job = main()
    if forked_job is not None:
        become(forked_job)
        run_and_exit(forked_job["command"][0])
