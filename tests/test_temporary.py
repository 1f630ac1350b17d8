"""Temporary folders go with the process that made them, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nemo_aligner.utils.processes import make_temporary, remove_temporary

SCRIPT = """
import sys, time
from pathlib import Path
from nemo_aligner.utils.processes import make_temporary
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


@pytest.mark.parametrize("order", [0, signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_folder_goes_with_its_process(order: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), str(int(order))]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"
    assert [file.read_text() for file in tmp_path.glob("*/weights")] == ["many"]
    if order:  # to the whole group, as a terminal does
        os.killpg(process.pid, order)
    process.communicate()
    assert process.returncode != 0
    assert is_empty_soon(tmp_path)


def test_a_folder_is_gone_once_it_is_removed_and_one_of_others_stays(
    scratch: Path, tmp_path: Path
) -> None:
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
