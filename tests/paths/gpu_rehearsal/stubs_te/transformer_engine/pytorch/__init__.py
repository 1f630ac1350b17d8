"""Linear layers with and without a norm, split by tensor parallelism, and norms."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer_engine.pytorch import optimizers
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule, get_dummy_wgrad

__all__ = ["DotProductAttention", "GroupedLinear", "LayerNorm", "LayerNormLinear", "Linear"]
__all__ += ["RMSNorm", "optimizers"]


class _Product(torch.autograd.Function):
    """A matmul that adds the weight's gradient to ``main_grad`` if TE is told to fuse that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, fuse: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.fuse, ctx.has_bias = fuse and weight.requires_grad, bias is not None
        ctx.main_grad = weight.main_grad if ctx.fuse else None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        to_weight = None
        if ctx.fuse:
            assert ctx.main_grad.dtype is torch.float32
            ctx.main_grad.add_(rows.t() @ x.flatten(0, -2))
            if hasattr(weight, "grad_added_to_main_grad"):
                weight.grad_added_to_main_grad = True
                to_weight = get_dummy_wgrad(list(weight.main_grad.shape), x.dtype)
        elif weight.requires_grad:
            to_weight = rows.t() @ x.flatten(0, -2)
        return grad @ weight, to_weight, rows.sum(0) if ctx.has_bias else None, None


# Options that both kinds of layers accept and that have no effect here.
_TAKEN = {
    "get_rng_state_tracker", "init_method", "return_bias", "parameters_split", "ub_overlap_ag",
    "ub_overlap_rs", "ub_overlap_rs_dgrad", "ub_bulk_dgrad", "ub_bulk_wgrad", "ub_name",
    "delay_wgrad_compute", "symmetric_ar_type", "name",
}  # fmt: skip


class _Linear(TransformerEngineBaseModule):
    """The common base of both linear layers; megatron-core's functions do the communication."""

    taken = _TAKEN

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        **more: Any,
    ) -> None:
        super().__init__()
        if more.keys() - self.taken:
            raise TypeError(f"{type(self).__name__} does not take {more.keys() - self.taken}")
        self.tp_group, self.tp_size = tp_group, tp_size
        self.parallel_mode, self.use_bias, self.fuse = parallel_mode, bias, fuse_wgrad_accumulation
        self.sequence_parallel = tp_size > 1 and sequence_parallel
        is_column, is_row = (parallel_mode == mode for mode in ("column", "row"))
        self.out_features = out_features // (tp_size if is_column else 1)
        self.in_features = in_features // (tp_size if is_row else 1)
        self.kind = {"device": device, "dtype": params_dtype}
        sizes = (self.out_features, self.in_features)
        self.weight = torch.nn.Parameter(torch.empty(sizes, **self.kind))
        self.bias = torch.empty(0, **self.kind)
        if bias:
            self.bias = torch.nn.Parameter(torch.empty(self.out_features, **self.kind))
        split = [(self.weight, 0 if is_column else 1)] if is_column or is_row else []
        split += [(self.bias, 0)] if is_column and bias else []
        for tensor, dim in split:
            tensor.tensor_model_parallel, tensor.partition_dim = True, dim
            tensor.partition_stride = 1

    def _product(self, x: Tensor) -> Tensor:
        from megatron.core import tensor_parallel as tp

        group = {"group": self.tp_group}
        if self.parallel_mode == "column" and self.tp_size > 1:
            into = tp.copy_to_tensor_model_parallel_region
            gather = tp.gather_from_sequence_parallel_region
            x = (gather if self.sequence_parallel else into)(x, **group)
        out = _Product.apply(x, self.weight, self.bias if self.use_bias else None, self.fuse)
        if self.parallel_mode == "row" and self.tp_size > 1:
            scatter = tp.reduce_scatter_to_sequence_parallel_region
            reduce = tp.reduce_from_tensor_model_parallel_region
            out = (scatter if self.sequence_parallel else reduce)(out, **group)
        return out


class Linear(_Linear):
    taken = _TAKEN | {"rng_tracker_name", "save_original_input"}

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Tensor:
        return self._product(inp)


class LayerNormLinear(_Linear):
    taken = _TAKEN | {"return_layernorm_output", "return_layernorm_output_gathered"}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, **options)
        self.eps, self.zero = eps, zero_centered_gamma
        weight = torch.nn.Parameter(torch.empty(in_features, **self.kind))
        self.layer_norm_weight, self.layer_norm_bias = weight, None
        if normalization != "RMSNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.empty_like(weight))
        for parameter in (weight, self.layer_norm_bias):
            if parameter is not None:
                parameter.sequence_parallel = self.sequence_parallel

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Tensor:
        weight = self.layer_norm_weight
        normed = _norm(inp, weight, self.layer_norm_bias, self.eps, self.zero)
        return self._product(normed)


def _norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, zero: bool) -> Tensor:
    shape, weight = (x.size(-1),), weight + 1 if zero else weight
    if bias is None:
        return F.rms_norm(x, shape, weight, eps)
    return F.layer_norm(x, shape, weight, bias, eps)


class RMSNorm(torch.nn.Module):
    def __init__(
        self,
        normalized_shape: Any = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        device: Any = "cuda",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.zero = eps, zero_centered_gamma
        kind = {"device": device, "dtype": params_dtype or dtype}
        self.weight = torch.nn.Parameter(torch.empty(hidden_size or normalized_shape, **kind))
        self.weight.sequence_parallel = bool(sequence_parallel)
        self.register_parameter("bias", None)

    def forward(self, x: Tensor) -> Tensor:
        return _norm(x, self.weight, self.bias, self.eps, self.zero)


class LayerNorm(RMSNorm):
    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.bias = torch.nn.Parameter(torch.empty_like(self.weight))
        self.bias.sequence_parallel = self.weight.sequence_parallel


class DotProductAttention(torch.nn.Module): ...


class GroupedLinear(TransformerEngineBaseModule): ...


class ops:
    Sequential = FusibleOperation = None
