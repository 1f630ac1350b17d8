"""Models with CUDA graphs, packs and gradients to compare; and graphs without a GPU.

There what is captured is called again, on the buffers that a graph reads.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_aligner.batch.packed import Group, PackedBatch, Records
from nemo_aligner.checkpoint.nemo.reward_model import load_pretrained
from nemo_aligner.config.common import Precision
from nemo_aligner.distributed.layout import ParallelLayout
from nemo_aligner.models.attention import backends, packed, varlen
from nemo_aligner.models.attention.backends import Backend, Feature
from nemo_aligner.models.attention.packed import PackedAttention
from nemo_aligner.models.attention.segments import PackedSegments, Scores
from nemo_aligner.models.batch_invariance import make_batch_invariant
from nemo_aligner.models.step import forward_backward
from nemo_aligner.models.training_wrap import wrap_for_training


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
            result.data.copy_(run())  # no version of a tensor counts a replay

        return result, replay

    def backward(self, work: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            with self._around():
                work()

        return replay

    def reset(self) -> None: ...

    def used_bytes(self) -> int:
        return 0


def attend_by_bounds(tensors: varlen.Tensors, segments: PackedSegments, scores: Scores) -> Tensor:
    """Attention that reads only what a varlen kernel is given, so that it can be replayed.

    The gradients of keys in no segment are NaN: a kernel leaves there what was in memory.
    """
    arguments = varlen.packed_arguments(*tensors[:3], segments, scores)
    query, key, value, of_queries, of_keys, most, most_keys = arguments
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


@pytest.fixture
def attention_by_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU attention as on a GPU."""
    attend = backends._by_varlen(attend_by_bounds)
    by_bounds: Backend[None] = Backend(
        "by bounds", frozenset(Feature), lambda case: True, attend, lambda segments, case: None
    )
    monkeypatch.setattr(packed, "choose_backend", lambda case: by_bounds)
    monkeypatch.setattr(PackedAttention, "infer_on_cpu", PackedAttention.infer_on_gpu)


def load(base: Path, layout: ParallelLayout, capture: Any, **options: Any) -> Any:
    """A model with graphs by ``capture``; False without graphs, None with CUDA's."""
    kinds = {"num_attributes": 2, "precision": Precision.fp32, **options}
    model = load_pretrained(base, layout, **kinds).model
    make_batch_invariant(model, 64)
    if capture is not False:
        model.use_cuda_graphs(capture)
    return model


def plain(*lengths: int) -> PackedBatch:
    return PackedBatch.pack([list(range(3, 3 + length)) for length in lengths])


def sharing(prefix: int, *lengths: int) -> PackedBatch:
    common = list(range(3, 3 + prefix))
    texts = [common + list(range(60, 60 + length)) for length in lengths]
    groups = [Group(2, prefix)] * (len(texts) // 2)
    return PackedBatch.pack(texts, Records.of(range(len(groups)), [2] * len(groups)), groups=groups)


PACKS = {
    "plain": [plain(5, 40, 1, 17), plain(30, 2, 9), plain(60, 1), plain(128)],
    "sharing": [sharing(40, 5, 1, 12, 9), sharing(33, 8, 2, 3, 1), sharing(47, 4, 2, 1, 1)],
}


def gradients(model: Any, packs: list[PackedBatch], layout: ParallelLayout) -> dict[str, Any]:
    wrapped = wrap_for_training(model)
    wrapped.train()

    def loss(rewards: torch.Tensor, records: Records) -> tuple[torch.Tensor, torch.Tensor]:
        return rewards.square().sum(), torch.tensor(rewards.size(0))

    found = {}
    for step in range(2):
        wrapped.zero_grad_buffer()
        forward_backward(wrapped, packs, layout, loss)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                found[step, name] = parameter.main_grad.clone()
                with torch.no_grad():
                    parameter -= 1e-3 * parameter.main_grad
    return found
