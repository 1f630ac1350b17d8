"""Linear layers, norms and gated activations of a decoder.

A GEMM chooses its kernel, and with it the order of its sums, by the number of rows. A batch
invariant model therefore computes chunks of a fixed number of rows, the last one padded, and sums
tensor parallel partial results in rank order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.autograd import Function

from nemo_aligner.distributed.cpu_products import invariant_linear_on_cpu
from nemo_aligner.distributed.gpu_products import invariant_linear_on_gpu
from nemo_aligner.models import kernels
from nemo_aligner.models.shape import LORA_A, LORA_B


def learns(module: torch.nn.Module) -> bool:
    """Tell if ``module`` is trained now, or may be asked for gradients; else it only infers."""
    return module.training or torch.is_grad_enabled()


# Linear layers, which also hold LoRA's adapters.


def invariant_linear(input: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    """Compute ``input [..., i]`` by ``weight [o, i]`` -> ``[..., o]`` in chunks of ``rows`` rows.

    Other chunk sizes are used where a trial gave the same bits.
    """
    multiply = invariant_linear_on_cpu if input.is_cpu else invariant_linear_on_gpu
    return multiply(input, weight, bias, rows)


def in_chunks(function: Callable[[Tensor], Tensor], input: Tensor, rows: int) -> Tensor:
    """Apply ``function`` to ``input [T, ..., i]`` in chunks of ``rows`` rows, the last padded."""
    found = [function(_filled(piece, rows)) for piece in input.split(rows)]
    return torch.cat(found)[: input.size(0)]


def _filled(rows: Tensor, multiple: int) -> Tensor:
    """Pad ``[T, ...]`` with zero rows until ``multiple`` divides T."""
    missing = -rows.size(0) % multiple
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows


class ColumnLinear(ColumnParallelLinear):
    """Linear layer whose outputs tensor parallelism splits.

    Attributes:
        invariant_rows: rows of a product in evaluation mode; None leaves it to megatron-core.
        adapter: LoRA's adapter, whose output is added; None without LoRA.
    """

    invariant_rows: int | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_module("adapter", None)

    def forward(self, input_: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
        if rows_now(self) is not None:
            return self.infer(input_), None
        output, bias = super().forward(input_, *args, **options)
        return output if self.adapter is None else output + self.adapter(input_, None), bias

    def infer(self, input_: Tensor) -> Tensor:
        """Compute ``[T, 1, i] -> [T, 1, o]`` without gradients, batch invariant if it is to be.

        A call of the module would cost as much as 10 rows of a product.
        """
        rows = self.invariant_rows
        if rows is None:
            return ColumnLinear.forward(self, input_)[0]
        given = input_
        if self.sequence_parallel:
            given = gather_from_sequence_parallel_region(given, group=self.tp_group)
        output = invariant_linear(given, self.weight, self.bias, rows)
        return output if self.adapter is None else output + self.adapter(input_, rows)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        entries = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.adapter is not None:
            entries |= _sharded(self, LORA_B, 0, prefix, sharded_offsets, metadata)
        return entries


class RowLinear(RowParallelLinear):
    """Linear layer whose inputs tensor parallelism splits; attributes as in ``ColumnLinear``."""

    invariant_rows: int | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_module("adapter", None)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        if rows_now(self) is not None:
            return self.infer(input_), None
        output, bias = super().forward(input_)
        return output if self.adapter is None else output + self.adapter(input_, None), bias

    def infer(self, input_: Tensor) -> Tensor:
        """Compute as ``ColumnLinear.infer``."""
        rows = self.invariant_rows
        if rows is None:
            return RowLinear.forward(self, input_)[0]
        output = invariant_linear(input_, self.weight, None, rows)
        output = sum_partial(output, self.tp_group, self.sequence_parallel, rows)
        return output if self.adapter is None else output + self.adapter(input_, rows)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        entries = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.adapter is not None:
            entries |= _sharded(self, LORA_A, 1, prefix, sharded_offsets, metadata)
        return entries


def _sharded(
    layer: Any,
    name: str,
    axis: int,
    prefix: str,
    offsets: tuple,
    metadata: dict | None,
) -> dict[str, Any]:
    """Checkpoint entry of an adapter's tensor, sharded along ``axis``.

    megatron-core's layers know the axes of their own tensors only, and its MLP does not know that
    the gated fc1 of an adapter is two matrices in one.
    """
    entries = make_sharded_tensors_for_checkpoint(
        {name: layer.get_parameter(name)},
        prefix,
        {name: axis},
        offsets,
        tp_group=layer.tp_group,
        dp_cp_group=(metadata or {})["dp_cp_group"],
    )
    if prefix.endswith("linear_fc1.") and layer.config.gated_linear_unit:
        return {key: apply_swiglu_sharded_factory(entry, offsets) for key, entry in entries.items()}
    return entries


def sum_partial(partial: Tensor, group: Any, is_scattered: bool, rows: int | None) -> Tensor:
    """Sum all ranks' ``partial``; with ``is_scattered`` each keeps its share of the tokens.

    In rank order for a batch invariant product (``rows`` is not None).
    """
    if group.size() == 1:
        return partial
    # a + b == b + a, so two ranks need nothing; with more, NCCL's algorithm picks the order.
    if rows is not None and group.size() > 2:
        return sum_in_rank_order(partial, group, is_scattered)
    if is_scattered:
        return reduce_scatter_to_sequence_parallel_region(partial, group=group)
    return reduce_from_tensor_model_parallel_region(partial, group=group)


def rows_now(layer: Any) -> int | None:
    """Rows of a product of ``layer`` now; None in training, which is not batch invariant."""
    return None if learns(layer) else layer.invariant_rows


def sum_in_rank_order(partial: Tensor, group: Any, is_scattered: bool) -> Tensor:
    """Sum all ranks' ``partial [T, ...]`` in fp32 and in rank order.

    Each rank sums a share of the rows, so no ring or tree decides the order.

    Returns:
        ``[T, ...]``, or this rank's ``[T / ranks, ...]`` if ``is_scattered``.
    """
    ranks, rows = group.size(), partial.size(0)
    sent = _filled(partial, ranks).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    first, *others = received.chunk(ranks)
    total = first.float()
    for other in others:
        total = total + other
    share = total.to(partial.dtype)
    if is_scattered:
        return share
    # Not into ``sent``, which may be the caller's ``partial``.
    dist.all_gather_into_tensor(received, share, group=group)
    return received[:rows]


# Norms with megatron-core's constructor. They take a residual stream of any dtype and return the
# model's, which is what the linear layer behind them computes in.


class SequenceParallelRMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose output has the model's dtype, whatever the input's.

    Its weight is marked under sequence parallelism: it sees only this rank's tokens, and Megatron
    sums the gradients of marked parameters over the TP ranks.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any
    ) -> None:
        device = torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._eps = eps
        self._is_zero_centered = config.layernorm_zero_centered_gamma
        self._dtype = config.params_dtype

    def forward(self, x: Tensor) -> Tensor:
        if self.is_kernels and kernels.take(x):
            return kernels.rms_norm(x, self._factors(), self._eps, self._dtype)
        return rms_norm(x, self._factors(), self._eps, self._dtype)

    def add(self, x: Tensor, added: Tensor) -> Tensor:
        """Add to ``x`` in place, where ``kernels.can_add``, and norm the sum."""
        return kernels.add_and_norm(x, added, self._factors(), self._eps, self._dtype)

    @property
    def is_kernels(self) -> bool:
        """Tell if ``kernels`` computes it now, of what it takes."""
        return not self.training and self._dtype in kernels.FLOATS

    def _factors(self) -> Tensor:
        return self.weight.float() + 1 if self._is_zero_centered else self.weight


class SequenceParallelLayerNorm1P(torch.nn.LayerNorm):
    """LayerNorm with a bias, stored as ``gamma - 1``; marked like ``SequenceParallelRMSNorm``."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any
    ) -> None:
        device = torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._dtype = config.params_dtype

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        normed = F.layer_norm(x, self.normalized_shape, weight + 1, bias, self.eps)
        return normed.to(self._dtype)


class NoNorm(torch.nn.Module):
    """In the place of a norm that a model lacks: gives a residual stream the model's dtype."""

    def __init__(self, config: TransformerConfig, hidden_size: int, **unused: Any) -> None:
        super().__init__()
        self._dtype = config.params_dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self._dtype)


NORMS = {"RMSNorm": SequenceParallelRMSNorm, "LayerNorm": SequenceParallelLayerNorm1P}


# Pointwise parts of a layer as autograd functions that save only their input.
#
# Composed of torch operations, each would keep several tensors of its input's size and make as many
# passes over memory; on a CPU that is a third of a layer's memory and a tenth of its time.

# Most elements that one thread computes: at::internal::GRAIN_SIZE, and GELU's own (Activation.cpp).
_GRAIN, _GELU_GRAIN = 2**15, 2**14


def gated_silu(x: Tensor) -> Tensor:
    """``[..., 2 f] -> [..., f]``: ``silu(gate) * linear`` (SwiGLU, Shazeer 2020), gate first.

    Only ``x`` is kept for the backward.
    """
    return _Gated.apply(x, F.silu, torch.ops.aten.silu_backward.grad_input)


def gated_gelu(x: Tensor) -> Tensor:
    """GEGLU (Shazeer 2020) with GELU's tanh approximation, as in Gemma; see ``gated_silu``."""
    return _Gated.apply(x, _gelu, _gelu_backward)


def by_whole_rows(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply ``function`` to ``x [T, ..., c]`` on a CPU with bits that do not depend on T.

    torch splits the elements evenly over its threads, and computes the remainder of a thread's
    share past whole vectors with a different exponential. Padding with zero rows until every
    thread gets whole rows keeps the remainder in the same place of each row.
    """
    if x.size(0) == 0:
        return function(x)
    rows, width = x.size(0), x.numel() // x.size(0) // 2
    fitting = next(count for count in itertools.count(rows) if _splits_by_rows(count, width))
    if fitting == rows:
        return function(x)
    return function(F.pad(x, (0, 0) * (x.dim() - 1) + (0, fitting - rows)))[:rows]


def _splits_by_rows(rows: int, width: int) -> bool:
    """Check that each thread gets whole rows, by torch's general grain size and by GELU's."""
    numbers, threads = rows * width, torch.get_num_threads()
    by_grains = min(threads, -(-numbers // _GRAIN))
    return rows % by_grains == 0 and (numbers <= _GELU_GRAIN or rows % threads == 0)


def squared_relu(x: Tensor) -> Tensor:
    """Compute ``relu(x)^2`` (Primer, So et al. 2021), keeping ``relu(x)`` for the backward."""
    return F.relu(x).square()


_gelu = partial(F.gelu, approximate="tanh")
_gelu_backward = partial(torch.ops.aten.gelu_backward.grad_input, approximate="tanh")


class _Gated(Function):
    """``activation(gate) * linear``; ``derivative`` is the backward of ``activation``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, activation: Callable[..., Tensor], derivative: Callable[..., Tensor]
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.activation, ctx.derivative = activation, derivative
        gate, linear = x.chunk(2, dim=-1)
        return activation(gate).mul_(linear)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (x,), (grad,) = ctx.saved_tensors, grads
        gate, linear = x.chunk(2, dim=-1)
        out = torch.empty_like(x)
        to_gate, to_linear = out.chunk(2, dim=-1)
        scratch = ctx.activation(gate)
        torch.mul(grad, scratch, out=to_linear)
        torch.mul(grad, linear, out=scratch)
        ctx.derivative(scratch, gate, grad_input=to_gate)
        return out, None, None


@dataclass(frozen=True)
class Shared:
    """A norm of rows that lie in parts on several ranks.

    Attributes:
        width: channels of a whole row.
        total: sums ``[..., 1]`` over the ranks.
    """

    width: int
    total: Callable[[Tensor], Tensor]


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
    shared: Shared | None = None,
) -> Tensor:
    """Compute ``x / sqrt(mean(x^2) + eps) * weight`` over the last dim (Zhang and Sennrich 2019).

    In fp32, returned in ``dtype`` (that of ``x`` by default). Keeps ``x`` and one number per row
    for the backward. On CUDA torch's fused kernel is used if ``weight`` has the dtype of ``x`` or
    ``x`` is fp32, unless ranks share the rows.
    """
    dtype = x.dtype if dtype is None else dtype
    if shared is None and x.is_cuda and x.dtype in (weight.dtype, torch.float32):
        return F.rms_norm(x, (x.size(-1),), weight.to(x.dtype), eps).to(dtype)
    return _RMSNorm.apply(x, weight, eps, dtype, shared or Shared(x.size(-1), _alone))


def _alone(partial: Tensor) -> Tensor:
    return partial


class _RMSNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype, shared: Shared
    ) -> Tensor:
        wide = x.float()
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        scale = shared.total(norm.square_()).div_(shared.width).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        ctx.shared = shared
        return (wide * scale).mul_(weight).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        x, weight, scale = ctx.saved_tensors
        grad, wide_weight = grads[0].float(), weight.float()
        normed = x.float() * scale
        product = grad * normed
        to_weight = product.flatten(0, -2).sum(0)
        mean = torch.matmul(product, wide_weight).unsqueeze(-1)
        mean = ctx.shared.total(mean).div_(ctx.shared.width)
        to_x = torch.mul(grad, wide_weight, out=product)
        to_x.addcmul_(normed, mean, value=-1).mul_(scale)
        return to_x.to(x.dtype), to_weight.to(weight.dtype), None, None, None
