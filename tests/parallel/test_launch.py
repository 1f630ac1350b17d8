"""Reading which rank this is from torchrun's and Slurm's environment, and refusing half of one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from nemo_aligner.errors import ConfigError
from nemo_aligner.parallel.launch import find_process, first_host, launch, single_process

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "1234",
}
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


def test_one_process_needs_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in TORCHRUN:
        monkeypatch.delenv(key, raising=False)
    with launch() as launched:
        assert launched.is_main
        assert launched.world_size == dist.get_world_size() == 1
        assert launched.backend == ("nccl" if torch.cuda.is_available() else "gloo")
    assert not dist.is_initialized()


def test_a_conversion_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in TORCHRUN:
        monkeypatch.delenv(key, raising=False)
    with single_process():
        assert dist.get_world_size() == 1
        with single_process():
            assert dist.is_initialized()
        assert dist.is_initialized()
    assert not dist.is_initialized()
    for key, value in TORCHRUN.items():
        monkeypatch.setenv(key, value)
    with (
        pytest.raises(ConfigError, match=f"got {TORCHRUN['WORLD_SIZE']} processes, wanted one"),
        single_process(),
    ):
        pass
