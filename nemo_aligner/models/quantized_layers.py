"""Linear layers whose frozen weight is quantized, and dequantized for each matmul.

``use_quantized_layers`` turns the decoder's linear layers into such layers. They behave like the
original ones: ``layer.weight`` computes the dequantized weight, and a state dict has the layer's
weight in full. Nothing keeps a dequantized weight after its matmul.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.autograd import Function

from nemo_aligner.config.model import BasePrecision
from nemo_aligner.cpu.matmuls import linear_on_cpu
from nemo_aligner.models.layers import ColumnLinear, RowLinear, rows_now
from nemo_aligner.models.quantized import QuantizedWeight, pack, quantize
from nemo_aligner.utils.processes import is_main

logger = logging.getLogger(__name__)


@cache
def _warn_of_dense_weight(precision: BasePrecision, dtype: torch.dtype) -> None:
    """Log, once for a precision and dtype, that weights need the memory of dense ones."""
    if not is_main():
        return
    logger.warning(
        f"model.lora.base_precision={precision.value}: weights of the checkpoint stay dense and "
        f"need {8 * dtype.itemsize} bits a value, because packing would change them. Load the "
        "model in the precision in which it was trained, and nf4 with a tensor parallel size that "
        "splits no block of 64 inputs."
    )


class QuantizedLayer:
    """Mixin of linear layers with a quantized weight.

    Attributes:
        dense_class: class of the layer before its weight was quantized.
        why_not_graphed: why no CUDA graph runs these layers.
        is_dequantized: the checkpoint to load has dequantized values, so the weight is packed
            without changing a value; otherwise it is quantized.
        stored: the quantized weight, or a dense one if it cannot be packed without changing a
            value; None before it is loaded.
    """

    is_dequantized = False
    dense_class: type
    why_not_graphed = "the model's weights are quantized"
    _precision: BasePrecision
    _size: torch.Size
    _dtype: torch.dtype
    stored: QuantizedWeight | Tensor | None = None

    def set_up(self, outline: Tensor, precision: BasePrecision) -> None:
        """Prepare for a weight of the shape and dtype of ``outline``, to be quantized."""
        self._size, self._dtype, self._precision = outline.shape, outline.dtype, precision

    def release_weight(self) -> Tensor:
        """Return the dequantized weight, and free the quantized one."""
        weight, self.stored = self.weight, None
        return weight

    @property
    def weight(self) -> Tensor:
        """The dequantized weight of this rank ``[out, in]``, computed anew at each access."""
        if isinstance(self.stored, QuantizedWeight):
            return self.stored.dequantize()
        if self.stored is None:
            raise RuntimeError("a quantized layer has no weight yet; load a checkpoint first")
        return self.stored

    @property
    def weight_shape(self) -> torch.Size:
        """Shape of ``weight``, which does not compute it."""
        return self._size

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of the stored weight; 0 before it is loaded."""
        if isinstance(self.stored, QuantizedWeight):
            return self.stored.num_bytes
        return 0 if self.stored is None else self.stored.nbytes

    @torch.no_grad()
    def store_weight(self, weight: Tensor) -> None:
        """Quantize and keep ``weight [out, in]``; collective over the tensor parallel ranks."""
        layer: Any = self
        options = {"splits_inputs": isinstance(self, RowLinear), "group": layer.tp_group}
        if not self.is_dequantized:
            self.stored = quantize(weight, self._precision, **options)
            return
        packed = pack(weight, self._precision, **options)
        if packed is None:
            _warn_of_dense_weight(self._precision, weight.dtype)
        self.stored = weight.detach().clone() if packed is None else packed

    def forward(self, input_: Tensor, *args: Any, **options: Any) -> Any:
        layer: Any = self
        if isinstance(self, ColumnLinear) and rows_now(layer) is None:
            # megatron-core would read the attribute twice, and keep the weight for too long.
            options["weight"] = self._outline()
        return super().forward(input_, *args, **options)  # type: ignore[misc]

    def _forward_impl(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: Any,
        **unused: Any,
    ) -> Tensor:
        """Do what megatron-core's ``linear_with_frozen_weight`` does, and save no weight."""
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, group=tp_group)
        group = tp_group if allreduce_dgrad else None
        output = _QuantizedMatmul.apply(input, read_outline(weight), self, group)
        return output if bias is None else output + bias

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        destination[f"{prefix}weight"] = self._outline()

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        weight, missing = state.pop(f"{prefix}weight", None), args[2]
        super()._load_from_state_dict(state, prefix, *args)  # type: ignore[misc]
        if weight is None:
            missing.append(f"{prefix}weight")
        else:
            self.store_weight(weight)

    def _outline(self) -> Tensor:
        """Return a one-element stand-in for the weight, from which ``read_outline`` computes it."""
        outline: Any = torch.zeros(1, dtype=self._dtype).expand(self._size)
        outline.quantized_layer = self
        return outline


class _QuantizedMatmul(Function):
    """A matmul whose backward pass dequantizes the weight again, instead of saving it."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, layer: Any, group: Any) -> Tensor:
        ctx.layer, ctx.group = layer, group
        return linear_on_cpu(input, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        to_input = linear_on_cpu(grads[0], ctx.layer.weight.t())
        if ctx.group is not None and ctx.group.size() > 1:
            dist.all_reduce(to_input, group=ctx.group)
        return to_input, None, None, None


@cache
def _quantized_class(kind: type) -> type:
    name, bases = f"Quantized{kind.__name__}", (QuantizedLayer, kind)
    return type(name, bases, {"dense_class": kind})


def use_quantized_layers(model: Any, precision: BasePrecision) -> None:
    """Turn the linear layers of ``model``'s decoder into quantized ones, without weights yet."""
    for layer in list(model.decoder.modules()):
        if isinstance(layer, ColumnLinear | RowLinear):
            weight = layer.weight
            del layer.weight
            quantized: Any = layer
            quantized.__class__ = _quantized_class(quantized.__class__)
            quantized.set_up(weight, precision)


def use_dense_layer(layer: Any, convert: Callable[[Tensor], Tensor]) -> None:
    """Turn a quantized layer back into the original one, with ``convert(weight)`` as weight."""
    weight = convert(layer.release_weight())
    layer.__class__ = layer.dense_class
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)


def share_weight(layer: Any, source: Any) -> None:
    """Let a quantized layer use the weight of ``source``, which may be dense by now."""
    if isinstance(source, QuantizedLayer):
        layer.stored = source.stored
    else:
        layer.__class__ = type(source)
        layer.weight = source.weight


def quantized_layers(model: torch.nn.Module) -> dict[str, Any]:
    """Return the quantized layers of ``model`` by their names."""
    modules = model.named_modules()
    return {name: module for name, module in modules if isinstance(module, QuantizedLayer)}


def is_outline(tensor: Tensor) -> bool:
    """Tell if an entry of a state dict stands for a quantized weight, and has no data."""
    return hasattr(tensor, "quantized_layer")


def read_outline(tensor: Tensor) -> Tensor:
    """Return the data of an entry of a state dict; compute it if it is a quantized weight."""
    layer = getattr(tensor, "quantized_layer", None)
    return tensor if layer is None else layer.weight
