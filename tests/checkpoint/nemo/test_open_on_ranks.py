"""An archive that several ranks read stays whole until all are done, and is gone afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import tiny
from tests.launching import ROOT
from tests.once import Once
from tests.test_temporary import is_empty_soon

START = (
    "import sys; from nemo_aligner.parallel.local import run_ranks; "
    "sys.exit(run_ranks(sys.argv[2:], int(sys.argv[1])))"
)
READ = """
import os, pathlib, sys, time
from nemo_aligner.processes import report
from nemo_aligner.checkpoint.nemo.open import open_nemo
from nemo_aligner.errors import DataError
from nemo_aligner.parallel.launch import launch
from nemo_aligner.parallel.collectives import barrier

def main(argv):
    archive, failing, marks = argv[0], argv[1], pathlib.Path(argv[2])
    rank = os.environ["RANK"]
    with launch(), open_nemo(archive) as folder:
        barrier()
        if rank == failing:
            raise DataError("a.jsonl:3: got 3")
        if failing == "none":
            return 0
        (marks / rank).touch()
        end = time.monotonic() + float(argv[3])
        while time.monotonic() < end:
            time.sleep(0.05)
            if not folder.weights.is_dir():
                raise DataError("it is gone under our hands")
    return 0

try:
    sys.exit(main(sys.argv[1:]))
except Exception as error:
    sys.exit(report(error))
"""


@pytest.fixture
def start(once: Once, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    archive = once("base", lambda folder: tiny.write_base_nemo(folder / "base.nemo")) / "base.nemo"
    for name in ("scratch", "marks"):
        (tmp_path / name).mkdir()

    def run(failing: str, seconds: float = 1.0) -> subprocess.Popen[str]:
        given = (str(archive), failing, str(tmp_path / "marks"), str(seconds))
        return subprocess.Popen(
            [sys.executable, "-c", START, "2", "-c", READ, *given],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=tiny.environment(**tiny.temporary_files_in(tmp_path / "scratch")),
            cwd=ROOT,
        )

    return run


@pytest.mark.parametrize(
    ("failing", "code", "said"),
    [
        ("none", 0, ""),
        ("0", 1, "rank 0: DataError: a.jsonl:3: got 3\n"),
        ("1", 1, "rank 1: DataError: a.jsonl:3: got 3\n"),
    ],
)
def test_what_was_unpacked_is_gone(
    failing: str,
    code: int,
    said: str,
    start: Callable[..., subprocess.Popen[str]],
    tmp_path: Path,
) -> None:
    process = start(failing)
    assert process.communicate(timeout=120)[1] == said
    assert process.returncode == code
    assert is_empty_soon(tmp_path / "scratch")


@pytest.mark.parametrize("order", [signal.SIGTERM, signal.SIGINT])
def test_what_was_unpacked_is_gone_after_a_signal(
    order: signal.Signals, start: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = start("nobody", seconds=100)
    end = time.monotonic() + 60
    while len(list((tmp_path / "marks").iterdir())) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    assert list((tmp_path / "scratch").iterdir())
    os.kill(process.pid, order)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert is_empty_soon(tmp_path / "scratch")
