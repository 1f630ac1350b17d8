"""An unpacked archive stays until all ranks have left the block, and is removed then."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.harness import tiny
from tests.harness.launching import free_port, launch_script, rank_environment, start_script
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


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "read.py"
    path.write_text(READ)
    return path


def prepare(
    script: Path, base: Path, folder: Path, failing: str
) -> tuple[list[str], dict[str, str]]:
    """The command and environment of ranks that open the archive ``base``; one fails, or none.

    If ``failing`` is the name of a signal, they wait for it.
    """
    for name in ("scratch", "marks"):
        (folder / name).mkdir(parents=True)
    environment = tiny.environment(**tiny.temporary_files_in(folder / "scratch"))
    return [str(script), str(base), failing, str(folder / "marks")], environment


def run(script: Path, base: Path, folder: Path, failing: str) -> tuple[int, str]:
    """Open the archive ``base`` on two ranks; return exit code and stderr."""
    command, environment = prepare(script, base, folder, failing)
    done = launch_script(command, environment, processes=2, timeout=120)
    return done.returncode, done.stderr


def test_archive_unpacked_for_ranks_is_gone_when_they_end(
    script: Path, base: Path, tmp_path: Path
) -> None:
    for failing, expected in {
        "none": (0, ""),
        "0": (1, "rank 0: DataError: a.jsonl:3: got 3\n"),
        "1": (1, "rank 1: DataError: a.jsonl:3: got 3\n"),
    }.items():
        assert run(script, base, tmp_path / failing, failing) == expected
        assert is_empty_soon(tmp_path / failing / "scratch"), failing


def test_archive_that_one_rank_cannot_unpack_or_open_is_the_same_error_on_all_ranks(
    script: Path, base: Path, tmp_path: Path
) -> None:
    """If rank 1 did not get the error, but waited for rank 0, the message would name rank 0."""
    for failing, expected in {
        "no folder": "ConfigError: TMPDIR: no temporary folder can be made: No usable directory. "
        "Set it to a folder that you may write to, on a disk with free space\n",
        # The pickle of this error cannot be read, so its text is sent.
        "bug": "RuntimeError: Unreadable: 2 parts\n",
        "rank 1 cannot open": "OSError: Stale file handle\n",
    }.items():
        assert run(script, base, tmp_path / failing, failing) == (1, expected)


def test_archive_unpacked_for_ranks_is_gone_after_a_signal(
    script: Path, base: Path, tmp_path: Path
) -> None:
    """A launcher sends it to every rank; see paths/distributed/test_local_ranks.py."""
    started = {}
    for order in (signal.SIGTERM, signal.SIGINT):
        command, environment = prepare(script, base, tmp_path / order.name, order.name)
        port = free_port()
        ranks = [rank_environment(rank, 2, port) for rank in range(2)]
        output = tmp_path / f"{order.name}.log"
        started[order] = start_script(command, environment, ranks, output)
    end = time.monotonic() + 60
    for order, processes in started.items():
        folder = tmp_path / order.name
        while len(list((folder / "marks").iterdir())) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        assert list((folder / "scratch").iterdir())
        for process in processes:
            process.send_signal(order)
    for order, processes in started.items():
        assert all(process.wait(timeout=60) != 0 for process in processes)
        assert is_empty_soon(tmp_path / order.name / "scratch"), order
