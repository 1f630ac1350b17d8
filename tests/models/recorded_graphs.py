"""CUDA graphs without a GPU: what is captured is called again, on the buffers of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_aligner.models import backbone
from nemo_aligner.models.attention import packed
from nemo_aligner.models.attention.packed import PackedAttention
from nemo_aligner.models.attention.segments import PackedSegments, Scores


class RecordedCapture:
    """In the place of ``CudaCapture``; ``around`` is entered for what is captured."""

    def __init__(self, around: Callable[[], Any] | None = None) -> None:
        self._around = around or torch.enable_grad

    def warm_up(self, work: Callable[[], object]) -> None:
        work()

    def forward(self, work: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        grad = torch.is_grad_enabled()

        def run() -> Tensor:
            with self._around(), torch.set_grad_enabled(grad):
                return work().detach()

        result = run().clone()

        def replay() -> None:
            result.copy_(run())

        return result, replay

    def backward(self, work: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            with self._around():
                work()

        return replay

    def reset(self) -> None: ...


def attend_by_bounds(
    query: Tensor, key: Tensor, value: Tensor, segments: PackedSegments, scores: Scores
) -> Tensor:
    """Attention that reads only what a varlen kernel is given, so that it can be replayed.

    The gradients of keys in no segment are NaN: a kernel leaves there what was in memory.
    """
    query, key, value, of_queries, of_keys, most, most_keys = packed._packed(
        query, key, value, segments, scores
    )
    outputs = []
    for index in range(len(of_queries) - 1):
        start, end = of_queries[index : index + 2].tolist()
        first, last = of_keys[index : index + 2].tolist()
        assert 0 <= end - start <= most
        assert end - start <= last - first <= most_keys
        if start == end:
            continue
        q, k, v = (
            each.transpose(0, 1)[None]
            for each in (query[start:end], key[first:last], value[first:last])
        )
        behind = last - first - (end - start)
        mask = torch.ones(end - start, last - first, dtype=torch.bool).tril(behind)
        out = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1))
    assert int(of_queries[-1]) == len(query)
    return torch.cat(outputs)


def infer_as_on_a_gpu(
    self: PackedAttention, turning: Tensor, value: Tensor, segments: PackedSegments
) -> Tensor:
    query, key = turning[:, :, :-1].flatten(1, 2), turning[:, :, -1]
    heads = (each.unsqueeze(1) for each in (query, key, value))
    return self(*heads, packed_seq_params=segments)


@pytest.fixture
def attention_by_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU attention as on a GPU, and gradients that products do not add up themselves."""
    monkeypatch.setattr(packed, "_attention_for", lambda *unused: attend_by_bounds)
    monkeypatch.setattr(PackedAttention, "infer_on_cpu", infer_as_on_a_gpu)
    monkeypatch.setattr(backbone, "can_accumulate_weight_gradients", lambda *unused: False)
