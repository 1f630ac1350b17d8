"""Ranks from the variables of torchrun and Slurm, who reports an error, temporary folders."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_aligner.utils import processes
from nemo_aligner.utils.errors import ConfigError, PeerError
from nemo_aligner.utils.processes import (
    find_process,
    first_host,
    leave_together,
    make_temporary,
    remove_temporary,
    report,
    settle,
)
from tests.harness.launching import TORCHRUN

SLURM = {
    "SLURM_PROCID": "9",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_ID": "0",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_JOB_ID": "71002",
}
ONLY_TASK = {
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}


def test_process_is_known_by_the_environment_of_torchrun_and_of_slurm() -> None:
    for environment, numbers, master in (
        (TORCHRUN, (5, 8, 1, 4), ("node1", 1234)),
        (SLURM, (9, 16, 1, 8), ("gpu003", 29402)),
        ({**SLURM, "MASTER_ADDR": "head"}, (9, 16, 1, 8), ("head", 29402)),
        ({**SLURM, "SLURM_STEP_ID": "1"}, (9, 16, 1, 8), ("gpu003", 29539)),
        ({**SLURM, **ONLY_TASK}, (0, 1, 0, 1), None),
    ):
        process = find_process(environment)
        ranks = (process.rank, process.world_size, process.local_rank, process.local_world_size)
        assert (ranks, process.master) == (numbers, master)
    # A batch shell without srun is a single process.
    shell = {"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_JOB_ID": "7"}
    assert find_process(shell).world_size == 1
    hosts = {
        "gpu7": "gpu7",
        "gpu[003-005,9],cpu1": "gpu003",
        "a1,b2": "a1",
        "rack[2,4]-n": "rack2-n",
    }
    assert {nodes: first_host(nodes) for nodes in hosts} == hosts


def test_missing_and_malformed_variables_are_named() -> None:
    without = {key: value for key, value in TORCHRUN.items() if key != "MASTER_PORT"}
    with pytest.raises(ConfigError, match="MASTER_PORT: it is not set"):
        find_process(without)
    with pytest.raises(ConfigError, match="LOCAL_RANK: got 'x', wanted a number"):
        find_process({**TORCHRUN, "LOCAL_RANK": "x"})


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """No launcher's variables; the fixture collects the seconds that report() sleeps."""
    for key in (*TORCHRUN, *SLURM, "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(key, raising=False)
    waited: list[float] = []
    monkeypatch.setattr(processes.time, "sleep", waited.append)
    return waited


def start_as(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {**TORCHRUN, "RANK": str(rank)}.items():
        monkeypatch.setenv(key, value)


def test_error_is_said_by_one_rank_and_others_wait(
    waits: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In turn: the only process, the first rank, and one rank that reports for all."""

    def reported(
        error: Exception, *renderers: Callable[[Exception], str]
    ) -> tuple[str, list[float]]:
        waits.clear()
        assert report(error, *renderers) == 1
        return capsys.readouterr().err, list(waits)

    error, held_back = ConfigError("x: got 3"), [processes.HOLD_BACK_S]
    assert reported(error) == ("ConfigError: x: got 3\n", [])
    assert reported(error, lambda error: f"no: {error}") == ("no: x: got 3\n", [])
    start_as(0, monkeypatch)
    assert reported(error) == ("ConfigError: x: got 3\n", [])
    # A rank whose peer failed is silent.
    assert reported(PeerError("another")) == ("", held_back)
    start_as(5, monkeypatch)
    assert reported(error) == ("rank 5: ConfigError: x: got 3\n", held_back)
    settle(error, "")
    assert reported(error) == ("ConfigError: x: got 3\n", [])
    # Every rank reports invalid variables.
    monkeypatch.delenv("MASTER_PORT")
    assert reported(ConfigError("MASTER_PORT"))[0] == "ConfigError: MASTER_PORT\n"


def test_the_first_rank_alone_has_an_exit_code_and_leaves_last(
    waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert leave_together(138) == 138  # without a launcher there is no rank to wait for
    start_as(5, monkeypatch)
    assert leave_together(138) == 0
    start_as(0, monkeypatch)
    assert leave_together(0) == 0
    assert waits == []
    assert leave_together(138) == 138
    assert waits == [processes.HOLD_BACK_S]


def test_torchrun_is_told(
    waits: list[float], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for file in (tmp_path / "error.json", tmp_path / "nowhere" / "error.json"):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        assert report(ConfigError("x: got 3")) == 1
    content = json.loads((tmp_path / "error.json").read_text())
    assert content["message"]["message"] == "ConfigError: x: got 3"


SCRIPT = """
import sys
from pathlib import Path
from nemo_aligner.utils.processes import make_temporary
folder = make_temporary("a b'", Path(sys.argv[1]))
(folder / "weights").write_text("many")
print(flush=True)
sys.stdin.readline()
raise ValueError
"""


def is_empty_soon(folder: Path, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while list(folder.iterdir()) and time.monotonic() < end:
        time.sleep(0.02)
    return not list(folder.iterdir())


@pytest.mark.parametrize("order", [0, signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_folder_goes_with_its_process(order: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"\n"
    assert [file.read_text() for file in tmp_path.glob("*/weights")] == ["many"]
    if order:  # to the whole process group, as a terminal does
        os.killpg(process.pid, order)
        process.wait()
    process.communicate(b"\n")  # a process without a signal reads this line, and raises an error
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
