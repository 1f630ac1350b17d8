"""Attention over segments against softmax over each whole sequence, in fp64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from nemo_aligner.models.attention.cpu import attend
from nemo_aligner.models.attention.packed import _attend_one_by_one
from nemo_aligner.models.attention.segments import PackedSegments, Scores

# Two groups with a prefix each, one segment of one token, and three on their own.
LENGTHS = [30, 5, 1, 9, 25, 1, 40, 20, 10]
PREFIXES = [-1, 0, 0, -1, -1, 4, 4, -1, -1]


def plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    repeats = query.size(1) // key.size(1)
    key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    outputs = []
    for own, prefix in enumerate(PREFIXES):
        tokens = list(range(bounds[own], bounds[own + 1]))
        before = list(range(bounds[prefix], bounds[prefix + 1])) if prefix >= 0 else []
        scores = torch.einsum("qhc,khc->hqk", query[tokens], key[before + tokens]) * scale
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        indices = torch.arange(len(before) + len(tokens))
        behind = indices[len(before) :, None] - indices
        hidden = (behind < 0) | (behind >= (window or len(indices)))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        outputs.append(torch.einsum("hqk,khc->qhc", weights, value[before + tokens]))
    return torch.cat(outputs)


def attend_one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: list[int],
    prefixes: list[int],
    scale: float | None,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """What is done without a kernel for all segments."""
    none = torch.zeros(0)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    segments = PackedSegments(
        none, none, tuple(lengths), tuple(prefixes), bounds, bounds, None, none
    )
    return _attend_one_by_one(query, key, value, segments, Scores(scale, window, soft_cap))


GROUPS = (1, 2, 6)  # of 6 heads


def test_segments_on_a_cpu_have_outputs_and_gradients_of_the_definition() -> None:
    torch.manual_seed(0)
    for how in (attend, attend_one_by_one):
        for groups in GROUPS:
            for scale in (None, 0.5):
                inputs = draw(groups)
                found = how(*inputs, LENGTHS, PREFIXES, scale)
                check(found, plain(*inputs, scale or 8**-0.5), inputs)


# A window that ends in a prefix, one that is longer than the longest sequence, and one key.
@pytest.mark.parametrize("window", [None, 12, 71, 1])
def test_segments_one_by_one_have_windows_and_soft_caps(window: int | None) -> None:
    torch.manual_seed(0)
    for soft_cap in (None, 1.5):
        for groups in GROUPS:
            inputs = draw(groups)
            found = attend_one_by_one(*inputs, LENGTHS, PREFIXES, 0.5, window, soft_cap)
            check(found, plain(*inputs, 0.5, window, soft_cap), inputs)


def draw(groups: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens = sum(LENGTHS)
    query = torch.randn(tokens, 6, 8, dtype=torch.float64, requires_grad=True)
    key, value = (
        torch.randn(tokens, groups, 8, dtype=torch.float64, requires_grad=True) for _ in range(2)
    )
    return query, key, value


def check(found: Tensor, wanted: Tensor, inputs: tuple[Tensor, ...]) -> None:
    """The same outputs and gradients."""
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)
    grad = torch.randn_like(wanted)
    for ours, theirs in zip(
        torch.autograd.grad(found, inputs, grad),
        torch.autograd.grad(wanted, inputs, grad),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


def test_segments_on_a_cpu_keep_a_nan_in_its_sequence() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(sum(LENGTHS), 2, 8, requires_grad=True) for _ in range(3))
    with torch.no_grad():
        value[-1] = float("nan")
    others = sum(LENGTHS[:-1])
    out = attend(query, key, value, LENGTHS, PREFIXES, None)
    assert out[:others].isfinite().all()
    assert out[-1].isnan().all()
    grads = torch.autograd.grad(out[:others].sum(), (query, key, value))
    assert all(grad[:others].isfinite().all() for grad in grads)
