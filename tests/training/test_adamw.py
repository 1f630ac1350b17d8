"""AdamW on flat shards next to torch's on whole parameters; moments in host memory; loss scales."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from torch import Tensor

from nemo_aligner.training.adamw import AdamW, MomentStreamer
from nemo_aligner.training.optimizer import LossScale
from nemo_aligner.training.optimizer_state import MOMENTS, Segment, Shard

GROUPS = [
    {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.98), "eps": 1e-6},
    {"lr": 0.02, "weight_decay": 0.0, "betas": (0.8, 0.95), "eps": 1e-3},
]
# Of each parameter: where it begins in its shard, how long it is, and its group. Two in the first
# shard are adjacent and of one group.
LENGTH = 448
LAYOUTS = [[(0, 128, 0), (128, 64, 0), (192, 30, 0), (256, 50, 1), (320, 70, 0)], [(0, 130, 1)]]


def make_shard(layout: Sequence[tuple[int, int, int]], dtype: torch.dtype) -> Shard:
    weights = torch.zeros(LENGTH, dtype=dtype)
    segments = []
    for start, numel, _ in layout:
        weights[start : start + numel] = torch.randn(numel)
        parameter = torch.nn.Parameter(weights[start : start + numel].float().clone())
        segments.append(Segment(parameter, start, start + numel, 0))
    state = {"param": weights.float(), **{key: torch.zeros(LENGTH) for key in MOMENTS}}
    return Shard(weights, torch.zeros(LENGTH), state, segments)


class CopyingStreamer:
    """A streamer that only copies, and records what it copies."""

    def __init__(self) -> None:
        self.sizes: list[list[int]] = []

    def stream(self, loads: Sequence[list[Tensor]]) -> Iterator[list[Tensor]]:
        for load in loads:
            self.sizes.append([tensor.numel() for tensor in load])
            copies = [tensor.clone() for tensor in load]
            yield copies
            for tensor, updated in zip(load, copies, strict=True):
                tensor.copy_(updated)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("chunk_numel", "sizes"),
    [
        (None, None),
        (192, [[192] * 2, [192] * 2, [64, 64, 128, 128], [192] * 2, [128] * 2]),
        (2**20, [[LENGTH] * 4]),
    ],
)
def test_shards_are_updated_as_torch_updates_parameters(
    dtype: torch.dtype, chunk_numel: int | None, sizes: list[list[int]] | None
) -> None:
    """To the bit, and the padding between them stays zero."""
    torch.manual_seed(0)
    shards = [make_shard(layout, dtype) for layout in LAYOUTS]
    segments = [(shard, segment) for shard in shards for segment in shard.segments]
    groups = [group for layout in LAYOUTS for _, _, group in layout]
    group_of = {part.parameter: group for (_, part), group in zip(segments, groups, strict=True)}
    of_torch = [[p for p, group in group_of.items() if group == n] for n in range(len(GROUPS))]
    expected = torch.optim.AdamW(
        [{"params": ps, **group} for ps, group in zip(of_torch, GROUPS, strict=True)], fused=True
    )
    streamer: Any = CopyingStreamer()
    options = {} if chunk_numel is None else {"streamer": streamer, "chunk_numel": chunk_numel}
    adamw = AdamW(shards, group_of, **options)
    for count in range(1, 4):
        for shard, segment in segments:
            gradient = torch.randn_like(segment.parameter)
            shard.gradients[segment.start : segment.stop] = segment.parameter.grad = gradient
        adamw.step(GROUPS, count)
        expected.step()
    for shard, segment in segments:
        elements = slice(segment.start, segment.stop)
        assert torch.equal(shard.state["param"][elements], segment.parameter)
        assert torch.equal(shard.weights[elements], segment.parameter.to(dtype))
        for key in MOMENTS:
            assert torch.equal(shard.state[key][elements], expected.state[segment.parameter][key])
    for shard in shards:
        is_padding = torch.ones(LENGTH, dtype=torch.bool)
        for segment in shard.segments:
            is_padding[segment.start : segment.stop] = False
        assert not any(flat[is_padding].any() for flat in (shard.weights, *shard.state.values()))
    assert streamer.sizes == (sizes or []) * 3


def test_loss_scale_counts_as_megatron_cores() -> None:
    """Two overflows halve it, down to 1; 1,000 steps without one double it."""
    theirs = DynamicGradScaler(2.0**16, 1.0, 2.0, 0.5, 1000, 2)
    ours = LossScale()
    overflows = [True, True, False, True, *[False] * 2100, *[True] * 30, *[False] * 1200, True]
    scales = []
    for number, overflow in enumerate(overflows):
        theirs.update(overflow)
        ours.update(overflow)
        scales.append(ours.value)
        assert ours.state_dict() == theirs.state_dict()
        if number % 500 == 0:
            resumed = LossScale()
            resumed.load_state_dict(theirs.state_dict())
            assert resumed == ours
    assert scales[:4] == [2.0**16, 2.0**15, 2.0**15, 2.0**14]
    assert (scales[1003], max(scales), min(scales)) == (2.0**15, 2.0**16, 1.0)


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
def test_streamer_copies_loads_to_the_device_and_back(count: int, streams: Stream) -> None:
    streamer = MomentStreamer(torch.device("cpu"))
    loads = [[torch.full((3,), float(n)), torch.full((n + 1, 2), n + 0.5)] for n in range(count)]
    originals = [list(load) for load in loads]
    for _ in range(2):
        seen = []
        for near in streamer.stream(loads):
            seen.append([float(tensor.flatten()[0]) for tensor in near])
            for tensor in near:
                tensor += 10
        assert [numbers[0] % 10 for numbers in seen] == [float(n) for n in range(count)]
    streamer.wait()
    for n, load in enumerate(loads):
        assert [float(tensor.flatten()[0]) for tensor in load] == [n + 20.0, n + 20.5]
        assert all(tensor is original for tensor, original in zip(load, originals[n], strict=True))
    assert len(streams.waits) == 2 * count  # a step waits for its own load, and for nothing else
