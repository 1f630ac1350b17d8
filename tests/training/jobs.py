"""Several jobs on the same ranks, each in processes of its own: so many fewer imports.

A rank imports the package once and forks for each job. What a job does to itself, and what is done
to it by an accident, ends with its process; that of a rank which fails ends it on the others.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.harness import tiny
from tests.harness.launching import free_port

TIMEOUT_S = 600.0  # of all jobs together
Done = subprocess.CompletedProcess[str]


@dataclass
class Job:
    """``nemo-aligner VERB ...``.

    Attributes:
        accident: what happens to it, where, on which rank: the first arguments of interrupted.py.
        by_onednn: all products go to oneDNN, as on other processors, small ones, too.
        environment: more than there is.
        fails: it may.
    """

    verb: str
    arguments: Sequence[str]
    accident: Sequence[str] = ()
    by_onednn: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    fails: bool = False


def run(jobs: Sequence[Job], processes: int = 1) -> list[Done]:
    """What each of them said, on all ranks, and its exit code; those that may not fail succeed."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        listed = [asdict(job) | {"port": free_port()} for job in jobs]
        (folder / "jobs.json").write_text(json.dumps(listed))
        tiny.run_script(
            "tests/training/run_jobs.py",
            temporary,
            processes=processes,
            timeout=TIMEOUT_S,
        )
        results = [_done(folder, number, job, processes) for number, job in enumerate(jobs)]
    for job, done in zip(jobs, results, strict=True):
        if done.returncode and not job.fails:
            raise AssertionError(
                f"{done.args} ended with {done.returncode}\n"
                f"{done.stdout[-4000:]}\n{done.stderr[-6000:]}"
            )
    return results


def _done(folder: Path, number: int, job: Job, processes: int) -> Done:
    codes = [int((folder / f"{number}.{rank}.code").read_text()) for rank in range(processes)]
    output = [(folder / f"{number}.{stream}").read_text() for stream in ("stdout", "stderr")]
    code = codes[0] if processes == 1 else int(any(codes))
    return subprocess.CompletedProcess([job.verb, *job.arguments], code, *output)
