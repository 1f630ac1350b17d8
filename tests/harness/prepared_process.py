"""Import the libraries once, then fork for every script that a test starts.

``python tests/harness/prepared_process.py`` is one rank. It reads jobs from its input, one line of
JSON each (``tests/harness/launching.py`` writes them), and prints a line when a job's script begins
and another when the script has ended. At the end of its input the process ends, and so does a
script that still runs. It imports nothing of this package, so that every script sees its own state,
and has a single thread when it forks.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import sys
from pathlib import Path
from typing import Any

LIBRARIES = (
    "numpy", "yaml", "omegaconf", "safetensors.torch", "torch", "torch.distributed.checkpoint",
    "torch.distributed.tensor", "torch.utils.tensorboard", "transformers",
    "transformers.models.auto.tokenization_auto", "lightning.pytorch.loggers",
)  # fmt: skip
POLL_SECS = 0.01


def main() -> dict[str, Any] | None:
    """Serve until the end of input; in a fork, what to run there."""
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
    """Until the script has ended, which is killed where nobody waits for it any more."""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        # A job comes after the last one's end: what can be read before that is the end of input.
        if select.select([sys.stdin], [], [], POLL_SECS)[0]:
            os.kill(pid, signal.SIGKILL)
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def become(job: dict[str, Any]) -> None:
    """What a process of its own would have: environment, folder, files, arguments."""
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


if __name__ == "__main__":
    told = main()
    if told is not None:
        become(told)
        runpy.run_path(told["command"][0], run_name="__main__")
