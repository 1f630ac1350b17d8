"""The workers of a run of tests, side by side: what is built once, and whose turn it is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.once import Turns, once_per_run
from tests.tiny import ROOT

WORKER = """
import sys, time
from pathlib import Path
from tests.once import Turns, once_per_run

def build(folder):
    time.sleep(0.5)
    (folder / "made").write_text("")
    print("built")

run = Path(sys.argv[1])
assert (once_per_run(run, "thing", build) / "made").exists()
turns = Turns()
turns.begin(run)
turns.count = 1
with turns.one(), turns.one():
    (run / "inside").mkdir()  # no other worker is
    time.sleep(0.2)
    (run / "inside").rmdir()
"""


def test_workers_build_a_thing_once_and_take_turns(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WORKER, str(tmp_path)]
    workers = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(4)
    ]
    said = [worker.communicate()[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * 4
    assert sorted(said) == ["", "", "", "built\n"]


def test_what_failed_is_built_again_in_an_empty_folder(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        once_per_run(tmp_path, "thing", fail)
    folder = once_per_run(tmp_path, "thing", lambda folder: (folder / "whole").write_text(""))
    assert [path.name for path in folder.iterdir()] == ["whole"]
    assert once_per_run(tmp_path, "thing", fail) == folder


def test_outside_of_a_run_nobody_waits() -> None:
    with Turns().one():
        pass
