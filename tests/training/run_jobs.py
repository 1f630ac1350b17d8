"""``run_jobs.py FOLDER``: one rank of the jobs in FOLDER/jobs.json; see jobs.py."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from nemo_aligner.cli import main as cli
from nemo_aligner.cpu import matmuls
from nemo_aligner.data.formats import FORMATS
from tests.data.ranked_format import FORMAT
from tests.harness.launching import HOST
from tests.harness.prepared_process import exit_fork, import_libraries
from tests.training.interrupted import arm, decide_when_written

POLL_SECS, GRACE_SECS = 0.01, 30.0


def main(folder: Path, rank: int) -> dict[str, Any] | None:
    """Run all jobs; in a fork, the one to do there."""
    import_libraries()  # with --fresh, no prepared process has done so
    assert len(os.listdir("/proc/self/task")) == 1, "a module started a thread: it may not fork"
    gc.freeze()
    for number, job in enumerate(json.loads((folder / "jobs.json").read_text())):
        pid = os.fork()
        if pid == 0:
            become(job, folder / str(number))
            return job
        code = wait(pid, folder / f"{number}.failed")
        (folder / f"{number}.{rank}.code").write_text(str(code))
    return None


def become(job: dict[str, Any], path: Path) -> None:
    """Environment and output of the job."""
    os.environ.update(job["environment"])
    if "RANK" in os.environ:
        os.environ.update(MASTER_ADDR=HOST, MASTER_PORT=str(job["port"]))
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # torchrun's has another port
    tempfile.tempdir = None  # it is remembered
    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{path}.{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)


def wait(pid: int, failed: Path) -> int:
    """The exit code; where it fails on another rank, it is stopped, as torchrun does."""
    stop_time = 0.0
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            if code:
                failed.touch()
            return code
        if not stop_time and failed.exists():
            stop_time = time.monotonic()
            os.kill(pid, signal.SIGTERM)
        elif stop_time and time.monotonic() > stop_time + GRACE_SECS:
            os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECS)


def do(job: dict[str, Any], rank: str) -> int:
    FORMATS[FORMAT.name] = FORMAT
    if job["by_onednn"]:
        matmuls.is_slow_with_mkl = lambda: True  # type: ignore[assignment]
        matmuls._LARGE = matmuls._FEWEST = 0
    if job["accident"]:
        accident, target, text, nth, on_rank, writes = job["accident"]
        decide_when_written(writes)
        if rank == on_rank:
            arm(accident, target, text, int(nth))
    return cli.main([job["verb"], *job["arguments"]])


if __name__ == "__main__":
    ours = os.environ.get("RANK", "0")
    job = main(Path(sys.argv[1]), int(ours))
    if job is not None:
        exit_fork(do(job, ours))
