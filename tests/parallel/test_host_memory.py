"""Page-locked memory, with a stand-in for CUDA's runtime."""

from __future__ import annotations

import gc

import pytest
import torch

from nemo_aligner.parallel.host_memory import host_zeros


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


def test_without_a_gpu_it_is_plain_memory() -> None:
    check(host_zeros(LIKE))


def test_with_a_gpu_it_is_locked_in_one_piece_until_the_last_tensor_is_gone(
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


def test_a_refusal_says_how_much_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Runtime(code=2))
    with pytest.raises(RuntimeError, match=r"CUDA error 2: 1\.0 GiB of host memory could not be"):
        host_zeros([torch.ones(2**28, device="meta")])
