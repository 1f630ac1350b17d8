"""LoRA's matrices beside the linear layers of a model: drawn, trained, folded into the weights.

Tensor parallelism splits them as it does the layer's own weight: of a layer that is split by its
outputs B, of one that is split by its inputs A. What is between them, ``[T, rank]``, is all that
the ranks send each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor
from torch.nn.utils import skip_init

from nemo_aligner.models.dropout import LoraDropout
from nemo_aligner.models.last_layer import LastLayer
from nemo_aligner.models.linear import ColumnLinear, RowLinear, invariant_linear, sum_partial
from nemo_aligner.models.lora import LINEARS, LoraShape

_ParallelLinear = ColumnLinear | RowLinear


class LoraAdapter(torch.nn.Module):
    """``x [T, 1, in]`` -> ``scale * B A x``, split and summed as the linear layer beside it has it.

    It has the layer's own group, and its way with sequence parallelism.
    """

    def __init__(self, layer: _ParallelLinear, lora: LoraShape) -> None:
        super().__init__()
        outputs, inputs = layer.weight.shape
        kind = {"bias": False, "device": layer.weight.device, "dtype": layer.weight.dtype}
        self.linear_in = skip_init(torch.nn.Linear, inputs, lora.rank, **kind)
        self.linear_out = skip_init(torch.nn.Linear, lora.rank, outputs, **kind)
        torch.nn.init.zeros_(self.linear_in.weight)
        torch.nn.init.zeros_(self.linear_out.weight)
        self.scale = lora.scale
        self._group, self._is_split = layer.tp_group, layer.sequence_parallel
        self._is_by_outputs = isinstance(layer, ColumnLinear)
        self._dropout: LoraDropout | None = None
        split, whole = self.linear_in.weight, self.linear_out.weight
        if self._is_by_outputs:
            split, whole = whole, split
        set_tensor_model_parallel_attributes(split, True, 0 if self._is_by_outputs else 1, 1)
        # It sees a rank's tokens alone, so its gradient has to be summed over the ranks.
        whole.sequence_parallel = layer.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor, rows: int | None) -> Tensor:
        """``rows`` as the layer has them now (``rows_now``)."""
        scale = self.scale
        if self._dropout is not None and self.training:
            scale /= 1 - self._dropout.rate
            x = self._dropped(x, self._dropout)
        low = _product(x, self.linear_in, rows) * scale
        if not self._is_by_outputs:
            low = sum_partial(low, self._group, self._is_split, rows)
        elif self._is_split:
            low = gather_from_sequence_parallel_region(low, group=self._group)
        else:
            low = copy_to_tensor_model_parallel_region(low, group=self._group)
        return _product(low, self.linear_out, rows)

    def drop_out(self, dropout: LoraDropout, number: int, reads_rows: bool) -> None:
        """Have ``dropout`` in training, as the linear layer ``number``; see ``LoraDropout``."""
        self._dropout, self._number, self._reads_rows = dropout, number, reads_rows

    def _dropped(self, x: Tensor, dropout: LoraDropout) -> Tensor:
        tokens = channels = 0
        if not self._is_by_outputs:
            channels = self._group.rank() * x.size(-1)
        elif self._is_split:
            tokens = self._group.rank() * x.size(0)
        return dropout.apply(x, self._number, self._reads_rows, tokens, channels)


def _product(x: Tensor, linear: torch.nn.Linear, rows: int | None) -> Tensor:
    # Called as a module, as Megatron waits there for weights that are still on their way.
    return linear(x) if rows is None else invariant_linear(x, linear.weight, None, rows)


def attach_adapters(model: Any, lora: LoraShape) -> None:
    """Give the linear layers of ``model``'s decoder their adapters, all zero."""
    for layer in model.decoder.layers:
        for name in lora.linears:
            linear = layer.get_submodule(name)
            linear.adapter = LoraAdapter(linear, lora)


def has_adapters(model: torch.nn.Module) -> bool:
    return any(isinstance(each, LoraAdapter) for each in model.modules())


def _adapted(model: Any) -> Iterator[tuple[int, _ParallelLinear]]:
    """Every linear layer that has an adapter, and a number of its own in the whole model."""
    for layer in model.decoder.layers:
        for index, name in enumerate(LINEARS.values()):
            linear = layer.get_submodule(name)
            if linear.adapter is not None:
                yield len(LINEARS) * layer.layer_number + index, linear


@torch.no_grad()
def draw_adapters(model: torch.nn.Module, seed: int) -> None:
    """A from a normal distribution of variance ``1 / in``, B zero: nothing is added yet.

    The same at any layout: each A is drawn whole, on the CPU, by a generator of its own. Inputs
    that a row-parallel weight has only zeros for get zeros: query groups that were added for tensor
    parallelism stay without effect. A column-parallel layer's A is the same on every rank, also
    where a rank's own outputs are such groups alone.
    """
    for number, linear in _adapted(model):
        weight = linear.adapter.linear_in.weight
        generator = torch.Generator().manual_seed((seed * 2**20 + number) % 2**63)
        whole = torch.empty(weight.size(0), linear.input_size)
        whole.normal_(std=linear.input_size**-0.5, generator=generator)
        if isinstance(linear, RowLinear):
            begin = linear.tp_group.rank() * weight.size(1)
            whole = whole[:, begin : begin + weight.size(1)]
            whole[:, (linear.weight == 0).all(0).cpu()] = 0.0
        weight.copy_(whole)
        linear.adapter.linear_out.weight.zero_()


def train_adapters_alone(model: Any, dropout: LoraDropout | None = None) -> None:
    """Freeze all of ``model`` but the adapters and the reward head; these have ``dropout``."""
    model.requires_grad_(False)
    for _, linear in _adapted(model):
        linear.adapter.requires_grad_(True)
    if model.post_process:
        model.rm_head.requires_grad_(True)
    if dropout is not None:
        _drop_out(model, dropout)


def _drop_out(model: Any, dropout: LoraDropout) -> None:
    model.lora_dropout = dropout
    # Past attention the last layer has the rows that the head reads, and no others.
    past = [
        layer.get_submodule(name)
        for layer in model.decoder.layers
        if isinstance(layer, LastLayer)
        for name in list(LINEARS.values())[1:]
    ]
    for number, linear in _adapted(model):
        linear.adapter.drop_out(dropout, number, reads_rows=linear in past)
    for layer in model.decoder.layers:
        # Again where a layer is computed again: then another pack's may have been the last.
        layer.register_forward_pre_hook(partial(_enter, dropout), with_kwargs=True)


def _enter(dropout: LoraDropout, layer: Any, inputs: Any, options: dict[str, Any]) -> None:
    if layer.training:
        dropout.enter(options["packed_seq_params"])


@torch.no_grad()
def fold_adapters(model: torch.nn.Module) -> None:
    """Add what the adapters add to the weights, rounded once, and leave them out from now on."""
    for _, linear in _adapted(model):
        adapter = linear.adapter
        low, high = adapter.linear_in.weight, adapter.linear_out.weight
        linear.weight.copy_(folded(linear.weight, low, high, adapter.scale))
        linear.adapter = None


def folded(weight: Tensor, low: Tensor, high: Tensor, scale: float) -> Tensor:
    """``W + scale * B A`` in the dtype of ``weight [out, in]``, added in fp32.

    ``low [rank, in]`` is A, ``high [out, rank]`` is B.
    """
    added = scale * (high.float() @ low.float())
    return (weight.float() + added).to(weight.dtype)
