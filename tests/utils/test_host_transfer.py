"""Page-locked memory with a fake CUDA runtime, and copies to it at the time of a GPU."""

from __future__ import annotations

import gc

import pytest
import torch

from nemo_aligner.utils.host_transfer import host_zeros, start_host_copies, wait_for_host_copies
from tests.distributed.late_copies import play_late_copies


class Runtime:
    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        assert flags == 0
        self.locked[address] = num_bytes
        return self.code

    def cudaHostUnregister(self, address: int) -> None:
        assert is_mapped(address), "it was unmapped before"
        del self.locked[address]


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as lines:
        ranges = [line.split()[0].split("-") for line in lines]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


LIKE = [
    torch.ones(3, 5),
    torch.ones(7, dtype=torch.bfloat16),
    torch.ones(0),
    torch.ones(2, 2, dtype=torch.int64, device="meta"),
]


def use(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)


def check(found: list[torch.Tensor]) -> None:
    assert [(x.shape, x.dtype, x.device.type) for x in found] == [
        (x.shape, x.dtype, "cpu") for x in LIKE
    ]
    assert not any(bool(x.any()) for x in found)
    for number, tensor in enumerate(found):
        tensor.fill_(number + 1)
    assert all(bool((tensor == n + 1).all()) for n, tensor in enumerate(found))


def test_host_memory_without_a_gpu_is_plain() -> None:
    check(host_zeros(LIKE))


def test_host_memory_with_a_gpu_is_locked_in_one_piece_until_the_last_tensor_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime = Runtime()
    use(monkeypatch, runtime)
    found = host_zeros(LIKE)
    check(found)
    assert list(runtime.locked.values()) == [64 + 64 + 64]
    kept = found[1]
    del found
    gc.collect()
    assert runtime.locked
    del kept
    gc.collect()
    assert not runtime.locked


def test_host_memory_that_is_refused_is_an_error_that_says_how_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(monkeypatch, Runtime(code=2))
    with pytest.raises(RuntimeError, match=r"CUDA error 2: 1\.0 GiB of host memory could not be"):
        host_zeros([torch.ones(2**28, device="meta")])


def test_host_copies_on_a_cpu_are_made_at_once() -> None:
    host, source = torch.zeros(3), torch.ones(3)
    arrived = start_host_copies([(host, source)])
    assert host.tolist() == [1, 1, 1]
    source.zero_()
    wait_for_host_copies()
    arrived()
    assert host.tolist() == [1, 1, 1]


def test_host_copy_is_there_when_it_was_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = play_late_copies(monkeypatch.setattr)
    hosts, source = [torch.zeros(3) for _ in range(2)], torch.ones(3)
    start_host_copies([(hosts[0], source)])
    arrived = start_host_copies([(hosts[1], source)])
    assert stream.num_left == 2
    arrived()
    # Copies that began earlier have arrived, too.
    assert [host.tolist() for host in hosts] == [[1, 1, 1]] * 2


def test_host_copy_has_nothing_that_is_written_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    play_late_copies(monkeypatch.setattr)
    hosts, source = [torch.zeros(3) for _ in range(2)], torch.ones(3)
    arrived = start_host_copies([(hosts[0], source)])
    wait_for_host_copies()
    source.fill_(2)
    arrived()
    assert hosts[0].tolist() == [1, 1, 1]
    arrived = start_host_copies([(hosts[1], source)])
    source.fill_(3)  # writing without waiting spoils the copy
    arrived()
    assert hosts[1].tolist() == [3, 3, 3]
