"""Moments in host memory: the same updates, a chunk at a time."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from nemo_aligner.training.optimizer_state import OffloadedStates, _Ferry


def parameters() -> list[torch.nn.Parameter]:
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(size)) for size in (30, 10, 10, 50, 5)]


def groups(of: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": of[:3], "weight_decay": 0.1}, {"params": of[3:], "weight_decay": 0.0}]


def adamw(of: list[torch.nn.Parameter]) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(groups(of), lr=0.1)
    for parameter in of:
        optimizer.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


class CountsByGroup(torch.optim.Optimizer):
    """Counts steps as Apex's and TransformerEngine's FusedAdam do, and steps by that count."""

    def __init__(self, of: list[torch.nn.Parameter]) -> None:
        super().__init__(groups(of), {})
        for parameter in of:
            self.state[parameter] = {"exp_avg": torch.zeros_like(parameter)}
            self.state[parameter]["exp_avg_sq"] = torch.zeros_like(parameter)

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                self.state[parameter]["exp_avg"] += parameter.grad
                parameter.data -= self.state[parameter]["exp_avg"] * group["step"]


@pytest.mark.parametrize("kind", [adamw, CountsByGroup])
@pytest.mark.parametrize(
    ("chunk_bytes", "chunks"), [(8 * 40, [[30, 10], [10], [50], [5]]), (2**30, None), (1, None)]
)
def test_moments_in_chunks_make_the_same_updates(kind: Any, chunk_bytes: int, chunks: Any) -> None:
    ours, plain = parameters(), parameters()
    offloaded, optimizer = kind(ours), kind(plain)
    inner, seen = offloaded.step, []

    def noting() -> None:
        held = [p.numel() for group in offloaded.param_groups for p in group["params"]]
        seen.append(held)
        inner()

    offloaded.step = noting
    OffloadedStates(offloaded, chunk_bytes)
    for _ in range(3):
        for mine, theirs in zip(ours, plain, strict=True):
            mine.grad = torch.randn_like(mine)
            theirs.grad = mine.grad.clone()
        offloaded.step()
        optimizer.step()
    assert all(map(torch.equal, ours, plain))
    for mine, theirs in zip(ours, plain, strict=True):
        for key, value in optimizer.state[theirs].items():
            assert torch.equal(offloaded.state[mine][key], value)
    got, wanted = offloaded.param_groups, optimizer.param_groups
    assert [len(g["params"]) for g in got] == [len(g["params"]) for g in wanted]
    assert [g.get("step") for g in got] == [g.get("step") for g in wanted]
    one_step = {2**30: [[30, 10, 10, 50, 5]], 1: [[30], [10], [10], [50], [5]]}
    assert seen == (chunks or one_step[chunk_bytes]) * 3


class Stream:
    """Notes what it is told to wait for; copies are made at once."""

    def __init__(self) -> None:
        self.waits: list[Any] = []

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other)

    wait_event = wait_stream

    def record_event(self) -> Stream:
        return self

    def synchronize(self) -> None:
        self.waits.append("the host")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """The stream that computes."""
    compute = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: compute)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    return compute


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_ferry_brings_loads_to_the_device_and_back(count: int, streams: Stream) -> None:
    ferry = _Ferry(torch.device("cpu"))
    loads = [[torch.full((3,), float(n)), torch.full((n + 1, 2), n + 0.5)] for n in range(count)]
    held = [list(load) for load in loads]
    for _ in range(2):
        seen = []
        for near in ferry.carry(loads):
            seen.append([float(tensor.flatten()[0]) for tensor in near])
            for tensor in near:
                tensor += 10
        assert [each[0] % 10 for each in seen] == [float(n) for n in range(count)]
    ferry.wait()
    for n, load in enumerate(loads):
        assert [float(tensor.flatten()[0]) for tensor in load] == [n + 20.0, n + 20.5]
        assert all(mine is kept for mine, kept in zip(load, held[n], strict=True))
    assert len(streams.waits) == 2 * count  # a step waits for its own load, and for nothing else
