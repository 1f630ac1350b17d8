"""Import the libraries once, then fork for every script that a test starts.

``python tests/harness/prepared_process.py`` is one rank. It reads jobs from stdin, one line of JSON
each, written by ``tests/harness/launching.py``. It prints one line when a job's script begins and
another when the script has ended. When stdin closes, the process ends and kills a script that still
runs. It imports nothing of this package, so that every script starts from the same state, and it
has a single thread when it forks.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

LIBRARIES = (
    "numpy", "yaml", "omegaconf", "safetensors.torch", "torch", "torch.distributed.checkpoint",
    "torch.distributed.tensor", "torch.utils.tensorboard", "transformers",
    "transformers.models.auto.tokenization_auto", "lightning.pytorch.loggers",
)  # fmt: skip
POLL_SECS = 0.01


def main() -> dict[str, Any] | None:
    """Serve jobs until stdin closes. In a forked child, return the job to run there."""
    for name in LIBRARIES:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a library started a thread: it may not fork"
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            return job
        print(json.dumps({"pid": pid}), flush=True)
        print(json.dumps({"returncode": wait(pid)}), flush=True)
    return None


def wait(pid: int) -> int:
    """Wait for the script and return its exit code; kill it if stdin closes meanwhile."""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        # A new job comes only after the last one has ended, so readable means that stdin closed.
        if select.select([sys.stdin], [], [], POLL_SECS)[0]:
            os.kill(pid, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def become(job: dict[str, Any]) -> None:
    """Give the fork the job's environment, working directory, standard files and arguments."""
    os.environ.clear()
    os.environ.update(job["environment"])
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
