"""Each pointwise operation of an implementation against its formula in fp64, left to autograd.

A script: ``pointwise_ops.py DEVICE NAME...`` prints JSON, by the name of each implementation:
the largest error of each operation and dtype, in roundings of that dtype; the operations whose rows
change with the rows beside them; and the losses of a few steps in fp32 next to those of eager.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

# Now, because this package lets functions of torch.cuda stand for the CPU's, and torch.compile
# refuses to list a function twice.
if __name__ == "__main__":
    torch.compile(torch.abs, backend="eager")(torch.ones(1))

import torch.nn.functional as F
from torch import Tensor

from nemo_aligner.batch.packed import Group, PackedBatch, Records
from nemo_aligner.config.common import Precision
from nemo_aligner.config.kernels import PointwiseChoice
from nemo_aligner.distributed.launch import launch
from nemo_aligner.distributed.layout import ParallelLayout, initialize_layout
from nemo_aligner.models.pointwise.choice import load_kernels
from nemo_aligner.models.pointwise.compiled import compiled_kernels
from nemo_aligner.models.pointwise.operations import (
    EAGER,
    PointwiseKernels,
    use_pointwise_kernels,
)
from nemo_aligner.models.reward_model import build_reward_model
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.training_wrap import wrap_for_training

SHAPE = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "vocab_size": 128,
    "max_position_embeddings": 128,
}
# Partial RoPE with the layers' plain norms, and all norms of Gemma 3, whose gammas start from 0.
MODELS: tuple[dict[str, Any], ...] = (
    {"rotary_percentage": 0.5, "qkv_bias": True, "residual_multiplier": 0.5},
    {"qk_layernorm": True, "post_layernorms": True, "layernorm_zero_centered_gamma": True},
)
# One case of each operation, for torch.compile on a CPU, which makes no code for a width.
TRACED = ("norm of 200", "sum and norm of 200", "SwiGLU of 24", "rotation of 8 of 2", "sum of 3")
DTYPES = (torch.float32, torch.bfloat16)
EPS = 1e-5
Case = tuple[
    str, Callable[[PointwiseKernels], Callable[..., Any]], Callable[..., Any], list[Tensor]
]
"""Name, the operation, its formula, and the arguments, whose first dimension is the rows."""


def norm_formula(x: Tensor, weight: Tensor, offset: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * (weight + offset)


def rotate_formula(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.size(-1)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def split_formula(
    mixed: Tensor, cos: Tensor, sin: Tensor, groups: int, channels: int
) -> tuple[Tensor, Tensor, Tensor]:
    heads = mixed.view(mixed.size(0), groups, -1, channels)
    query, key = (rotate_formula(x, cos, sin) for x in (heads[:, :, :-2], heads[:, :, -2:-1]))
    return query.flatten(1, 2), key.squeeze(2), heads[:, :, -1]


def gated_silu_formula(x: Tensor) -> Tensor:
    gate, linear = x.chunk(2, dim=-1)
    return F.silu(gate) * linear


def cases(rows: int) -> Iterator[Case]:
    """Widths below, at and above powers of two, and as few and as many rows as are asked for."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    for width in (64, 200, 2048):
        offset = 1.0 if width == 200 else 0.0
        yield (
            f"norm of {width}",
            lambda kernels, offset=offset: (
                lambda x, weight: kernels.rms_norm(x, weight, EPS, offset, x.dtype)
            ),
            lambda x, weight, offset=offset: norm_formula(x, weight, offset),
            [draw(rows, 1, width) * 3, draw(width)],
        )
        alpha = 0.5 if width == 200 else 1.0

        def add_formula(
            x: Tensor, added: Tensor, weight: Tensor, offset: float = offset, alpha: float = alpha
        ) -> tuple[Tensor, Tensor]:
            return x + alpha * added, norm_formula(x + alpha * added, weight, offset)

        yield (
            f"sum and norm of {width}",
            lambda kernels, offset=offset, alpha=alpha: (
                lambda x, added, weight: kernels.add_rms_norm(
                    x, added, weight, EPS, offset, x.dtype, alpha
                )
            ),
            add_formula,
            [draw(rows, 1, width), draw(rows, 1, width), draw(width)],
        )
    for width in (24, 1500):
        yield (
            f"SwiGLU of {width}",
            lambda kernels: kernels.gated_silu,
            gated_silu_formula,
            [draw(rows, 1, 2 * width) * 2],
        )
    for width, top_k in ((200, 3), (1500, 1)):

        def sum_of_experts(
            kernels: PointwiseKernels, top_k: int = top_k
        ) -> Callable[[Tensor, Tensor], Tensor]:
            def function(outputs: Tensor, weights: Tensor) -> Tensor:
                places = torch.arange(outputs.size(0) * top_k, device=outputs.device)
                places = places.view(-1, top_k).flip(1)
                total = kernels.sum_outputs(outputs.flatten(0, 1), weights, places)
                return total.to(outputs.dtype)

            return function

        yield (
            f"sum of {top_k} x {width}",
            sum_of_experts,
            lambda outputs, weights: (outputs.flip(1) * weights[..., None]).sum(1),
            [draw(rows, top_k, width), draw(rows, top_k)],
        )
    for groups, repeats, channels, half in ((2, 3, 16, 8), (1, 4, 24, 8), (5, 2, 64, 32)):
        angles = draw(rows, 1, 1, half)
        yield (
            f"rotation of {half} of {groups} x {repeats + 2} x {channels}",
            lambda kernels, groups=groups, channels=channels: (
                lambda mixed, cos, sin: kernels.split_and_rotate(mixed, cos, sin, groups, channels)
            ),
            lambda mixed, cos, sin, groups=groups, channels=channels: split_formula(
                mixed, cos, sin, groups, channels
            ),
            [draw(rows, 1, groups * (repeats + 2) * channels), angles.cos(), angles.sin()],
        )


def results(
    function: Callable[..., Any], arguments: list[Tensor], grads: list[Tensor] | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, then the gradients of what is learned from; and the outputs' gradients."""
    leaves = [each.clone().requires_grad_() for each in arguments]
    # RoPE's tables get none.
    learned = leaves[:1] if leaves[-1].dim() == 4 else leaves
    out = function(*leaves)
    outputs = list(out) if isinstance(out, tuple) else [out]
    if grads is None:
        generator = torch.Generator().manual_seed(1)
        grads = [
            torch.randn(each.shape, generator=generator, dtype=torch.float64).to(each.device)
            for each in outputs
        ]
    cast = [grad.to(each.dtype) for grad, each in zip(grads, outputs, strict=True)]
    found = torch.autograd.grad(outputs, learned, cast)
    return [*(each.detach() for each in outputs), *found], grads


def covered(
    kernels: PointwiseKernels, rows: int, starts: str | tuple[str, ...] = ""
) -> Iterator[Case]:
    """The cases whose names start so, without the rotation where attention itself does it."""
    for case in cases(rows):
        rotates = case[0].startswith("rotation")
        if case[0].startswith(starts) and (kernels.split_and_rotate is not None or not rotates):
            yield case


def errors(
    kernels: PointwiseKernels, device: str, rows: int, starts: str | tuple[str, ...]
) -> dict[str, float]:
    """Largest error of each case, relative to the largest value, in roundings of the dtype."""
    found = {}
    for name, operation, formula, arguments in covered(kernels, rows, starts):
        for dtype in DTYPES:
            rounded = [each.to(device, dtype) for each in arguments]
            wanted, grads = results(formula, [each.double() for each in rounded])
            got, _ = results(operation(kernels), rounded, grads)
            assert all(each.dtype is dtype for each in got), name
            assert all(each.shape == other.shape for each, other in zip(got, wanted, strict=True))
            worst = max(
                float((each.double() - other).abs().max() / other.abs().max())
                for each, other in zip(got, wanted, strict=True)
            )
            found[f"{name}, {str(dtype).removeprefix('torch.')}"] = worst / torch.finfo(dtype).eps
    return found


def variant_rows(kernels: PointwiseKernels, device: str, rows: int) -> list[str]:
    """Cases of which a row has other bits, or its gradient, alone or among fewer rows."""
    found = []
    for name, operation, _, arguments in covered(kernels, rows):
        for dtype in DTYPES:
            rounded = [each.to(device, dtype) for each in arguments]
            whole, grads = results(operation(kernels), rounded)
            for first, last in ((0, 1), (5, 6), (3, 12), (0, rows // 2)):
                part = [each[first:last] if each.dim() > 1 else each for each in rounded]
                cut = [each[first:last] for each in grads]
                for each, other in zip(
                    results(operation(kernels), part, cut)[0], whole, strict=True
                ):
                    # A weight's gradient is a sum over the rows.
                    if each.dim() > 1 and not torch.equal(each, other[first:last]):
                        found.append(f"{name}, {dtype}, rows {first} to {last}")
    return found


def losses(
    kernels: PointwiseKernels, layout: ParallelLayout, more: dict[str, Any], steps: int
) -> list[float]:
    """Losses of steps of plain gradient descent on two pairs, one with a shared prefix."""
    shape = ModelShape.from_config({**SHAPE, **more})
    model = build_reward_model(shape, layout, num_attributes=1, precision=Precision.fp32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            drawn = torch.randn(weight.shape, generator=generator)
            weight.copy_(drawn * (0.05 if weight.dim() > 1 else 1.0))
    use_pointwise_kernels(model, kernels)
    wrapped = wrap_for_training(model).train()
    batch = PackedBatch.pack(
        [[*range(3, 14)], [*range(3, 10), 7, 8], [*range(40, 50)], [*range(90, 93)]],
        Records.of(range(2), [2, 2]),
        groups=[Group(2, 7), Group(2, 0)],
    ).to(torch.cuda.current_device())
    found = []
    for _ in range(steps):
        wrapped.zero_grad_buffer()
        rewards = wrapped(batch)
        loss = F.softplus(rewards[1::2] - rewards[::2]).mean()
        loss.backward()
        found.append(loss.item())
        with torch.no_grad():
            for weight in model.parameters():
                weight -= 0.01 * weight.main_grad  # type: ignore[attr-defined]
    return found


def kernels_by_name(name: str, device: str) -> PointwiseKernels:
    # On a CPU the formulas are checked as torch.compile traces them: no code is made of them.
    if name == "compile" and device == "cpu":
        return compiled_kernels(backend="aot_eager")
    return load_kernels(PointwiseChoice(name))


def main(device: str, *names: str) -> None:
    # On a CPU an interpreter or torch's tracer takes seconds for a step.
    found, (rows, steps) = {}, (300, 4) if device == "cuda" else (13, 2)
    with launch():
        layout = initialize_layout()
        for name in names:
            kernels = kernels_by_name(name, device)
            starts = TRACED if name == "compile" and device == "cpu" else ""
            found[name] = {
                "errors": errors(kernels, device, rows, starts),
                "variant": variant_rows(kernels, device, rows) if name == "triton" else None,
                "losses": [
                    [losses(each, layout, more, steps) for each in (EAGER, kernels)]
                    for more in MODELS
                ],
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
