"""A Gated DeltaNet layer by flash-linear-attention against torch, and a stand-in for its function.

A script, for Triton's interpreter: it prints JSON with the deviations of the layer's output and
gradients in fp32, relative to the largest value of each, by name.
"""

from __future__ import annotations

import builtins
import json
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nemo_aligner.distributed.launch import launch
from nemo_aligner.distributed.layout import initialize_layout
from nemo_aligner.models.chunk_tree import ChunkTree
from nemo_aligner.models.flash_delta import FlashDelta, load_kernel
from nemo_aligner.models.layers import ColumnLinear, RowLinear
from nemo_aligner.models.linear_attention import GatedDeltaNet
from nemo_aligner.models.shapes.linear_attention import LinearAttentionShape

# Two samples that share a prefix of 70 tokens, one whole chunk, and a sample that shares none.
LENGTHS, PREFIXES = (70, 10, 20, 5), (-1, 0, 0, -1)
SHAPE = LinearAttentionShape(1, 2, 16, 16, 4)


def recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: Tensor,
    chunk_indices: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Compute what fla's ``chunk_gated_delta_rule`` does, token by token."""
    assert q.dtype is k.dtype is v.dtype
    assert g.dtype is beta.dtype is torch.float32
    assert use_qk_l2norm_in_kernel
    bounds = cu_seqlens.tolist()
    assert bounds[0] == 0
    assert bounds[-1] == q.size(1) == v.size(1) == g.size(1)
    chunks = [
        [index, chunk]
        for index, (start, end) in enumerate(pairwise(bounds))
        for chunk in range(-(-(end - start) // 64))
    ]
    assert chunk_indices.tolist() == chunks
    repeats = v.size(2) // k.size(2)
    query, key = (heads.float().repeat_interleave(repeats, 2)[0] for heads in (q, k))
    query, key = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
    outputs, states = [], []
    for index, (start, end) in enumerate(pairwise(bounds)):
        state = torch.zeros(v.size(2), k.size(3), v.size(3))
        if initial_state is not None:
            state = initial_state[index]
        for token in range(start, end):
            state = state * g[0, token].exp()[:, None, None]
            left = (key[token].unsqueeze(1) @ state).squeeze(1)
            written = (v[0, token].float() - left) * beta[0, token].unsqueeze(1)
            state = state + key[token].unsqueeze(2) * written.unsqueeze(1)
            read = (query[token].unsqueeze(1) @ state).squeeze(1) * k.size(3) ** -0.5
            outputs.append(read.to(q.dtype))
        states.append(state)
    return torch.stack(outputs).unsqueeze(0), torch.stack(states) if output_final_state else None


def layer_deviations(kernel: FlashDelta) -> dict[str, float]:
    # Only now, because nemo_aligner.distributed must be imported first.
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(0)
    config = TransformerConfig(
        hidden_size=32, num_layers=1, num_attention_heads=2, layernorm_epsilon=1e-6
    )
    linears = (ColumnLinear, RowLinear)
    layer = GatedDeltaNet(config, layer_number=1, shape=SHAPE, linears=linears)
    names = ("conv_weight", "a_log", "dt_bias", "norm_weight")
    weights = [layer.get_parameter(name) for name in names]
    for weight in weights:
        torch.nn.init.normal_(weight)
    layer.a_log.data.sub_(3)  # else states would be forgotten within a few tokens
    tree = ChunkTree.of(LENGTHS, PREFIXES, SHAPE.conv_kernel - 1, "cpu", has_runs=True)
    mixed = torch.randn(sum(LENGTHS), 1, SHAPE.projection_width, requires_grad=True)
    factors = torch.randn(sum(LENGTHS), 1, SHAPE.value_width)
    context: Any = SimpleNamespace(chunks=tree)
    results = []
    for layer.delta_kernel in (None, kernel):
        output = layer.attend(mixed, context)
        for tensor in (mixed, *weights):
            tensor.grad = None
        (output * factors).sum().backward()
        results.append([output.detach(), *(tensor.grad for tensor in (mixed, *weights))])
    return {
        name: float((result - expected).abs().max() / expected.abs().max())
        for name, expected, result in zip(("output", "mixed", *names), *results, strict=True)
    }


class Number(int):
    """An integer with the method of Triton's numbers that fla's kernels call on a loop's index."""

    def to(self, dtype: Any) -> int:
        return int(self)


def prepare_interpreter() -> None:
    """Skip the choice of tiles, which needs a GPU's clock, and let indices of loops be numbers."""
    from fla.ops.common import chunk_delta_h
    from triton.runtime.autotuner import Autotuner

    run = Autotuner.run

    def run_first(tuner: Any, *arguments: Any, **named: Any) -> Any:
        tuner.configs = tuner.configs[:1]
        return run(tuner, *arguments, **named)

    Autotuner.run = run_first
    chunk_delta_h.range = lambda *bounds: map(Number, builtins.range(*map(int, bounds)))


if __name__ == "__main__":
    prepare_interpreter()
    with launch():
        initialize_layout()
        print(json.dumps(layer_deviations(load_kernel())))
