"""Temporary folders go with the process that made them, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_aligner.temporary import make_temporary, remove_temporary

SCRIPT = """
import sys, time
from pathlib import Path
from nemo_aligner.temporary import make_temporary
folder = make_temporary("a b'", Path(sys.argv[1]))
(folder / "weights").write_text("many")
print(flush=True)
if sys.argv[2] == "0":
    raise ValueError
time.sleep(60)
"""


def is_empty_soon(folder: Path, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while list(folder.iterdir()) and time.monotonic() < end:
        time.sleep(0.02)
    return not list(folder.iterdir())


def test_temporary_folder_goes_with_its_process(tmp_path: Path) -> None:
    """By an error (0), or a signal to the whole group, as a terminal sends it."""
    started = {}
    for order in (0, signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        folder = tmp_path / str(int(order))
        folder.mkdir()
        command = [sys.executable, "-c", SCRIPT, str(folder), folder.name]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, start_new_session=True)
        started[order] = (process, folder)
    for order, (process, folder) in started.items():
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        assert order == 0 or [file.read_text() for file in folder.glob("*/weights")] == ["many"]
        if order:
            os.killpg(process.pid, order)
        process.communicate()
        assert process.returncode != 0, order
        assert is_empty_soon(folder), order


def test_temporary_folder_is_removed_and_one_of_others_stays(scratch: Path, tmp_path: Path) -> None:
    folder = make_temporary("x")
    (folder / "inside").mkdir()
    assert folder.parent == scratch
    remove_temporary(folder)
    remove_temporary(folder)
    assert not list(scratch.iterdir())
    remove_temporary(tmp_path)
    assert tmp_path.is_dir()
    with pytest.raises(OSError, match="No such file"):
        make_temporary("x", tmp_path / "nowhere")
