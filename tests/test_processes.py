"""Which rank this is by torchrun's and Slurm's environment, and which rank says what went wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_aligner import processes
from nemo_aligner.errors import ConfigError, PeerError
from nemo_aligner.processes import find_process, first_host, leave_together, report, settle
from tests.launching import TORCHRUN

SLURM = {
    "SLURM_PROCID": "9",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_ID": "0",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_STEP_NODELIST": "gpu[003-004]",
    "SLURM_JOB_ID": "71002",
}


def test_torchrun_environment() -> None:
    process = find_process(TORCHRUN)
    assert (process.rank, process.world_size, process.local_rank, process.local_world_size) == (
        5,
        8,
        1,
        4,
    )
    assert process.master == ("node1", 1234)


def test_slurm_environment() -> None:
    process = find_process(SLURM)
    assert (process.rank, process.world_size, process.local_rank, process.local_world_size) == (
        9,
        16,
        1,
        8,
    )
    assert process.master == ("gpu003", 29402)
    assert find_process({**SLURM, "MASTER_ADDR": "head"}).master == ("head", 29402)


def test_a_slurm_batch_shell_without_srun_is_one_process() -> None:
    shell = {"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_JOB_ID": "7"}
    assert find_process(shell).world_size == 1


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("gpu7", "gpu7"),
        ("gpu[003-005,9],cpu1", "gpu003"),
        ("a1,b2", "a1"),
        ("rack[2,4]-n", "rack2-n"),
    ],
)
def test_first_host_of_a_node_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_missing_and_malformed_variables_are_named() -> None:
    without = {key: value for key, value in TORCHRUN.items() if key != "MASTER_PORT"}
    with pytest.raises(ConfigError, match="MASTER_PORT: it is missing"):
        find_process(without)
    with pytest.raises(ConfigError, match="LOCAL_RANK: got 'x', wanted a number"):
        find_process({**TORCHRUN, "LOCAL_RANK": "x"})


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Where no launcher is, and how long one would have been waited for."""
    for key in (*TORCHRUN, *SLURM, "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(key, raising=False)
    waited: list[float] = []
    monkeypatch.setattr(processes.time, "sleep", waited.append)
    return waited


def start_as(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in {**TORCHRUN, "RANK": str(rank)}.items():
        monkeypatch.setenv(key, value)


def test_the_only_process_says_its_error_at_once(
    waits: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(ConfigError("x: got 3")) == 1
    assert report(ConfigError("x: got 3"), lambda error: f"no: {error}") == 1
    assert capsys.readouterr().err == "ConfigError: x: got 3\nno: x: got 3\n"
    assert waits == []


def test_before_the_ranks_know_each_other_the_first_one_speaks(
    waits: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start_as(0, monkeypatch)
    report(ConfigError("x: got 3"))
    assert (capsys.readouterr().err, waits) == ("ConfigError: x: got 3\n", [])
    start_as(5, monkeypatch)
    report(ConfigError("x: got 3"))
    assert capsys.readouterr().err == "rank 5: ConfigError: x: got 3\n"
    assert waits == [processes.HOLD_BACK_S]


def test_a_rank_that_speaks_for_others_does_not_wait(
    waits: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start_as(5, monkeypatch)
    error = ConfigError("x: got 3")
    settle(error, "")
    report(error)
    assert (capsys.readouterr().err, waits) == ("ConfigError: x: got 3\n", [])


def test_a_rank_whose_peer_failed_is_silent_and_ends_later(
    waits: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start_as(0, monkeypatch)
    assert report(PeerError("another")) == 1
    assert (capsys.readouterr().err, waits) == ("", [processes.HOLD_BACK_S])


def test_the_first_rank_alone_has_an_exit_code_and_leaves_last(
    waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert leave_together(138) == 138  # without a launcher there is nobody to wait for
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
    told = json.loads((tmp_path / "error.json").read_text())
    assert told["message"]["message"] == "ConfigError: x: got 3"


def test_an_environment_of_nonsense_is_said_by_every_rank(
    waits: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start_as(5, monkeypatch)
    monkeypatch.delenv("MASTER_PORT")
    report(ConfigError("MASTER_PORT: it is missing"))
    assert capsys.readouterr().err == "ConfigError: MASTER_PORT: it is missing\n"
