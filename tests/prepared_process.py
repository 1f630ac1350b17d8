"""Imports the libraries, and then forks itself into whatever script it is told to run.

``python tests/prepared_process.py`` reads jobs, a line of JSON each, and answers each with a line
once it has ended; ``tests/launching.py`` writes them. Nothing of ours is imported here, and
nothing that our package prepares for; one thread is all there is when a script begins.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

LIBRARIES = (
    "numpy", "yaml", "omegaconf", "safetensors.torch", "torch", "torch.distributed.checkpoint",
    "torch.distributed.tensor", "torch.utils.tensorboard", "transformers",
)  # fmt: skip
POLL_SECS = 0.01
GRACE_SECS = 30  # as torchrun gives the other ranks of one that failed


def main() -> dict[str, Any] | None:
    """Serve until the end of input; in a fork, what to run there."""
    for name in LIBRARIES:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a library started a thread: it may not fork"
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        ranks = []
        for environment in job["environments"]:
            pid = os.fork()
            if pid == 0:
                return {**job, "environment": environment}
            ranks.append(pid)
        print(json.dumps(wait(ranks, job["timeout"])), flush=True)
    return None


def wait(ranks: list[int], timeout: float) -> dict[str, Any]:
    """Until all ranks have ended; where one fails, the others are stopped, as torchrun does."""
    codes: dict[int, int] = {}
    end, last_order, is_late = time.monotonic() + timeout, signal.SIGTERM, False
    while len(codes) < len(ranks):
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid > 0:
            codes[pid] = os.waitstatus_to_exitcode(status)
            if codes[pid] != 0 and last_order == signal.SIGTERM and not is_late:
                stop([rank for rank in ranks if rank not in codes], last_order)
                end, last_order = min(end, time.monotonic() + GRACE_SECS), signal.SIGKILL
        elif time.monotonic() > end:
            is_late = is_late or last_order == signal.SIGTERM
            stop([rank for rank in ranks if rank not in codes], signal.SIGKILL)
            time.sleep(POLL_SECS)
        else:
            time.sleep(POLL_SECS)
    if len(ranks) == 1:
        return {"returncode": codes[ranks[0]], "is_late": is_late}
    return {"returncode": int(any(codes.values())), "is_late": is_late}


def stop(ranks: list[int], order: signal.Signals) -> None:
    for rank in ranks:
        os.kill(rank, order)


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
