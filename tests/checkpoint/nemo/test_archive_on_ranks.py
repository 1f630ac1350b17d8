"""An unpacked archive stays until all ranks have left the block, and is removed then."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.harness import tiny
from tests.harness.launching import start_local_ranks
from tests.harness.once import Once
from tests.utils.test_processes import is_empty_soon

READ = """
import os, pathlib, sys, tempfile, time
from nemo_aligner.utils.processes import report
from nemo_aligner.checkpoint.nemo import archive as archives
from nemo_aligner.checkpoint.nemo.archive import open_nemo
from nemo_aligner.utils.errors import DataError
from nemo_aligner.distributed.launch import launch
from nemo_aligner.distributed.collectives import barrier

class Unreadable(Exception):
    def __init__(self, *parts):
        super().__init__(f"{len(parts)} parts")

ERRORS = {"no folder": OSError("No usable directory"), "bug": Unreadable(1, 2)}

def cannot_open(*paths):
    raise OSError("Stale file handle")

def main(archive, failing, marks):
    rank = os.environ["RANK"]
    if failing in ERRORS and rank == "0":
        def make_folder(**options):
            raise ERRORS[failing]
        tempfile.mkdtemp = make_folder
    if failing == "rank 1 cannot open" and rank == "1":
        archives.folder_of = cannot_open
    with launch(), open_nemo(archive) as folder:
        barrier()
        if rank == failing:
            raise DataError("a.jsonl:3: got 3")
        if failing == "none":
            return 0
        pathlib.Path(marks, rank).touch()
        end = time.monotonic() + (100 if failing.startswith("SIG") else 1)
        while time.monotonic() < end:
            time.sleep(0.05)
            if not folder.weights.is_dir():
                raise DataError("it is gone under our hands")
    return 0

try:
    sys.exit(main(*sys.argv[1:]))
except Exception as error:
    sys.exit(report(error))
"""


@pytest.fixture
def archive(once: Once) -> Path:
    return once("base", lambda folder: tiny.write_base_nemo(folder / "base.nemo")) / "base.nemo"


def start(archive: Path, folder: Path, failing: str) -> subprocess.Popen[str]:
    """Start two ranks that open ``archive``; one fails, or none, or a signal ends both."""
    for name in ("scratch", "marks"):
        (folder / name).mkdir(parents=True)
    environment = tiny.environment(**tiny.temporary_files_in(folder / "scratch"))
    command = ["-c", READ, str(archive), failing, str(folder / "marks")]
    return start_local_ranks(command, environment)


def test_archive_unpacked_for_ranks_is_gone_when_they_end(archive: Path, tmp_path: Path) -> None:
    expected = {
        "none": (0, ""),
        "0": (1, "rank 0: DataError: a.jsonl:3: got 3\n"),
        "1": (1, "rank 1: DataError: a.jsonl:3: got 3\n"),
    }
    started = {who: start(archive, tmp_path / who, who) for who in expected}
    outputs = {who: process.communicate(timeout=120)[1] for who, process in started.items()}
    assert {who: (started[who].returncode, outputs[who]) for who in expected} == expected
    for who in expected:
        assert is_empty_soon(tmp_path / who / "scratch"), who


def test_archive_that_one_rank_cannot_unpack_or_open_is_the_same_error_on_all_ranks(
    archive: Path, tmp_path: Path
) -> None:
    """If rank 1 did not get the error, but waited for rank 0, the message would name rank 0."""
    expected = {
        "no folder": "ConfigError: TMPDIR: no temporary folder can be made: No usable directory. "
        "Set it to a folder that you may write to, on a disk with free space\n",
        # The pickle of this error cannot be read, so its text is sent.
        "bug": "RuntimeError: Unreadable: 2 parts\n",
        "rank 1 cannot open": "OSError: Stale file handle\n",
    }
    started = {why: start(archive, tmp_path / why, why) for why in expected}
    assert {why: started[why].communicate(timeout=120)[1] for why in expected} == expected


def test_archive_unpacked_for_ranks_is_gone_after_a_signal(archive: Path, tmp_path: Path) -> None:
    orders = (signal.SIGTERM, signal.SIGINT)
    started = {order: start(archive, tmp_path / order.name, order.name) for order in orders}
    end = time.monotonic() + 60
    for order, process in started.items():
        folder = tmp_path / order.name
        while len(list((folder / "marks").iterdir())) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        assert list((folder / "scratch").iterdir())
        process.send_signal(order)
    for order, process in started.items():
        process.communicate(timeout=60)
        assert process.returncode != 0
        assert is_empty_soon(tmp_path / order.name / "scratch"), order
