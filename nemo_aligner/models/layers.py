"""Linear layers and norms of a decoder.

A GEMM chooses its kernel, and with it the order of its sums, by the number of rows. A batch
invariant model therefore computes in chunks of a fixed number of rows, the last one padded, and
sums tensor parallel partial results in rank order.

Each class has the constructor that megatron-core expects, because megatron-core builds the layers
from a spec.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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

from nemo_aligner.cpu import kernels
from nemo_aligner.cpu.matmuls import invariant_linear_on_cpu
from nemo_aligner.distributed.gpu_matmuls import invariant_linear_on_gpu
from nemo_aligner.models.pointwise.operations import EAGER, PointwiseKernels
from nemo_aligner.models.shapes.lora import LORA_A, LORA_B

if TYPE_CHECKING:
    from nemo_aligner.models.pack_context import PackContext


def learns(module: torch.nn.Module) -> bool:
    """Tell if ``module`` is in training mode or gradients are enabled; if not, it only scores."""
    return module.training or torch.is_grad_enabled()


# Linear layers, which also hold LoRA's adapters.


def invariant_linear(input: Tensor, weight: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    """Apply ``weight [o, i]`` to ``input [..., i]`` -> ``[..., o]`` in chunks of ``rows`` rows.

    Other chunk sizes are used where a trial found their results bit-identical.
    """
    multiply = invariant_linear_on_cpu if input.is_cpu else invariant_linear_on_gpu
    return multiply(input, weight, bias, rows)


def in_chunks(function: Callable[[Tensor], Tensor], input: Tensor, rows: int) -> Tensor:
    """Apply ``function`` to ``input [T, ..., i]`` in chunks of ``rows`` rows; pad the last one."""
    outputs = [function(_pad_rows(piece, rows)) for piece in input.split(rows)]
    return torch.cat(outputs)[: input.size(0)]


def _pad_rows(rows: Tensor, multiple: int) -> Tensor:
    """Pad ``[T, ...]`` with zero rows until ``multiple`` divides T."""
    missing = -rows.size(0) % multiple
    return F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing)) if missing else rows


class ColumnLinear(ColumnParallelLinear):
    """Linear layer whose outputs tensor parallelism splits.

    Attributes:
        invariant_rows: fixed number of rows of a matmul in evaluation mode; None leaves the matmul
            to megatron-core.
        adapter: LoRA's adapter, whose output is added; None without LoRA.
    """

    invariant_rows: int | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_module("adapter", None)
        _free_if_replaced(self)

    def forward(
        self, input_: Tensor, *args: Any, context: PackContext | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Compute ``[T, 1, i] -> [T, 1, o]``; an adapter with dropout needs the ``context``."""
        if rows_now(self) is not None:
            return self.infer(input_), None
        output, bias = super().forward(input_, *args, **options)
        if bias is not None:  # megatron-core leaves adding the bias to the caller
            output = output + bias
        if self.adapter is not None:
            output = output + self.adapter(input_, None, context)
        return output, None

    def infer(self, input_: Tensor) -> Tensor:
        """Compute ``[T, 1, i] -> [T, 1, o]`` without gradients.

        Matmuls run in chunks of ``invariant_rows`` rows, if that is set.

        Layers call it instead of the module, because a module call costs as much time as 10 rows of
        a matmul.
        """
        rows = self.invariant_rows
        if rows is None:
            return ColumnLinear.forward(self, input_)[0]
        gathered = input_
        if self.sequence_parallel:
            gathered = gather_from_sequence_parallel_region(gathered, group=self.tp_group)
        output = invariant_linear(gathered, self.weight, self.bias, rows)
        return output if self.adapter is None else output + self.adapter(input_, rows)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        entries = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.adapter is not None:
            entries |= _shard_adapter(self, LORA_B, 0, prefix, sharded_offsets, metadata)
        return entries


class RowLinear(RowParallelLinear):
    """Linear layer whose inputs tensor parallelism splits.

    Attributes:
        invariant_rows, adapter: as in ``ColumnLinear``: the fixed number of rows of a matmul in
            evaluation mode, and LoRA's adapter; None without either.
    """

    invariant_rows: int | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.register_module("adapter", None)
        _free_if_replaced(self)

    def forward(
        self, input_: Tensor, context: PackContext | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute ``[T, 1, i] -> [T, 1, o]``; an adapter with dropout needs the ``context``."""
        if rows_now(self) is not None:
            return self.infer(input_), None
        output, bias = super().forward(input_)
        if bias is not None:  # megatron-core leaves adding the bias to the caller
            output = output + bias
        if self.adapter is not None:
            output = output + self.adapter(input_, None, context)
        return output, None

    def infer(self, input_: Tensor) -> Tensor:
        """Compute ``[T, 1, i] -> [T, 1, o]`` without gradients.

        Matmuls run in chunks of ``invariant_rows`` rows, if that is set.
        """
        rows = self.invariant_rows
        if rows is None:
            return RowLinear.forward(self, input_)[0]
        output = invariant_linear(input_, self.weight, None, rows)
        output = sum_partial(output, self.tp_group, self.sequence_parallel, rows)
        if self.bias is not None:
            output = output + self.bias
        return output if self.adapter is None else output + self.adapter(input_, rows)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        entries = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.adapter is not None:
            entries |= _shard_adapter(self, LORA_A, 1, prefix, sharded_offsets, metadata)
        return entries


def _free_if_replaced(layer: Any) -> None:
    if getattr(layer.config, "frees_linear_weights", False):
        free_weight(layer)


def free_weight(layer: Any) -> None:
    """Free the memory of a new weight that ``quantized_layers`` or ``shared_body`` will replace.

    The weight keeps its shape, dtype and device.
    """
    layer.weight.data = layer.weight.data.new_zeros(1).expand(layer.weight.shape)


def _shard_adapter(
    layer: Any,
    name: str,
    axis: int,
    prefix: str,
    offsets: tuple,
    metadata: dict | None,
) -> dict[str, Any]:
    """Make the checkpoint entry of an adapter's tensor, sharded along ``axis``.

    megatron-core's layers know only the axes of their own tensors, and its MLP does not know that
    an adapter's B of a gated fc1 is two matrices in one.
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
    """Sum ``partial`` over the TP ranks; if ``is_scattered``, a rank keeps its part of the tokens.

    The sum is in rank order for a batch invariant matmul, where ``rows`` is not None.
    """
    if group.size() == 1:
        return partial
    # For two ranks the order does not matter. For more, NCCL's algorithm would choose the order.
    if rows is not None and group.size() > 2:
        return sum_in_rank_order(partial, group, is_scattered)
    if is_scattered:
        return reduce_scatter_to_sequence_parallel_region(partial, group=group)
    return reduce_from_tensor_model_parallel_region(partial, group=group)


def rows_now(layer: Any) -> int | None:
    """Return the fixed number of rows of ``layer``'s matmuls; None in training or if not fixed."""
    return None if learns(layer) else layer.invariant_rows


def sum_in_rank_order(partial: Tensor, group: Any, is_scattered: bool) -> Tensor:
    """Sum ``partial [T, ...]`` over the ranks in fp32, in rank order.

    Each rank sums a part of the rows, so that no ring or tree decides the order.

    Returns:
        ``[T, ...]``, or this rank's ``[T / ranks, ...]`` if ``is_scattered``.
    """
    ranks, rows = group.size(), partial.size(0)
    sent = _pad_rows(partial, ranks).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    first, *later = received.chunk(ranks)
    total = first.float()
    for rank_rows in later:
        total = total + rank_rows
    share = total.to(partial.dtype)
    if is_scattered:
        return share
    # Do not gather into ``sent``, which may be the caller's ``partial``.
    dist.all_gather_into_tensor(received, share, group=group)
    return received[:rows]


# Norms with the constructor that megatron-core expects. They take a residual stream of any dtype
# and return the model's dtype, in which the next linear layer computes.


class SequenceParallelRMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose output has the model's dtype, or ``output_dtype``, for any dtype of the input.

    Under sequence parallelism each rank norms only its own tokens. The weight is marked, so that
    Megatron sums its gradients over the TP ranks.

    Attributes:
        pointwise: the kernels that compute the norm, except in inference on a CPU.
    """

    pointwise: PointwiseKernels = EAGER

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        output_dtype: torch.dtype | None = None,
        **unused: Any,
    ) -> None:
        device = torch.cuda.current_device()
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._eps = eps
        self._offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self._dtype = output_dtype or config.params_dtype

    def forward(self, x: Tensor, added: Tensor | None = None, alpha: float = 1.0) -> Any:
        """Norm ``x [..., c]``, or the sum of ``x`` and ``added``.

        The sum is fused into this module's forward, not a separate function, because Megatron waits
        in a hook of the module for a weight that is still being gathered.

        Returns:
            The normed ``x``; with ``added`` the sum ``x + alpha * added``, and the normed sum.
        """
        eps, offset, dtype = self._eps, self._offset, self._dtype
        if added is not None:
            return self.pointwise.add_rms_norm(x, added, self.weight, eps, offset, dtype, alpha)
        if self.uses_kernels and kernels.supports(x):
            return kernels.rms_norm(x, self._factors(), eps, dtype)
        return self.pointwise.rms_norm(x, self.weight, eps, offset, dtype)

    def add(self, x: Tensor, added: Tensor) -> Tensor:
        """Add ``added`` to ``x`` in place with ``kernels.c``, and return the norm of the sum.

        Call it only where ``kernels.can_add`` says that the C file supports both tensors.
        """
        return kernels.add_and_norm(x, added, self._factors(), self._eps, self._dtype)

    @property
    def uses_kernels(self) -> bool:
        """True if ``kernels.c`` computes this norm now, for inputs that the C file supports."""
        is_supported = self._dtype in kernels.FLOATS and self.weight.dtype in kernels.FLOATS
        return not self.training and is_supported

    def _factors(self) -> Tensor:
        return self.weight.float() + self._offset if self._offset else self.weight


class SequenceParallelLayerNorm(torch.nn.LayerNorm):
    """LayerNorm; its stored weight is gamma, or ``gamma - 1`` (NeMo's LayerNorm1P).

    Its parameters are marked, so that Megatron sums their gradients over the TP ranks under
    sequence parallelism.

    Attributes:
        has_bias: a bias is added.
    """

    has_bias = True

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: Any
    ) -> None:
        device = torch.cuda.current_device()
        kind = {"dtype": config.params_dtype, "device": device}
        super().__init__(hidden_size, eps=eps, bias=self.has_bias, **kind)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._dtype = config.params_dtype
        self._is_zero_centered = config.layernorm_zero_centered_gamma

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        bias = self.bias.to(x.dtype) if self.has_bias else None
        if self._is_zero_centered:
            weight = weight + 1
        normed = F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)
        return normed.to(self._dtype)


class BiaslessLayerNorm(SequenceParallelLayerNorm):
    """LayerNorm without a bias, as in Cohere's models."""

    has_bias = False


class NoNorm(torch.nn.Module):
    """Stand-in for a norm that a model lacks: casts the residual stream to the model's dtype."""

    def __init__(self, config: TransformerConfig, hidden_size: int, **unused: Any) -> None:
        super().__init__()
        self._dtype = config.params_dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self._dtype)


NORMS = {"RMSNorm": SequenceParallelRMSNorm, "LayerNorm": SequenceParallelLayerNorm}
