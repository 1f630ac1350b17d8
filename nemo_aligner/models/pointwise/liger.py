"""The pointwise operations of liger-kernel 0.8.5 or newer (Hsu et al. 2024, arXiv:2410.10989).

liger-kernel brings its own autograd functions. Its norms compute in fp32 in the mode ``gemma``.
"""

from __future__ import annotations

import torch
from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
from liger_kernel.ops.rms_norm import LigerRMSNormFunction
from liger_kernel.ops.rope import LigerRopeFunction
from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction
from torch import Tensor

from nemo_aligner.config.kernels import PointwiseChoice
from nemo_aligner.models.pointwise import eager
from nemo_aligner.models.pointwise.fused import FLOATS
from nemo_aligner.models.pointwise.operations import PointwiseKernels

_IN_FP32 = "gemma"
# liger must not overwrite the output's gradient: after a sum, autograd passes the same tensor to
# both summands.
_IN_PLACE = False
# Run one program for each row, however many rows there are, so that a row's result does not depend
# on the number of rows.
_BY_ROWS = True


def _rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, dtype: torch.dtype) -> Tensor:
    if x.dtype not in FLOATS:
        return eager.offset_rms_norm(x, weight, eps, offset, dtype)
    normed = LigerRMSNormFunction.apply(x, weight, eps, offset, _IN_FP32, _IN_PLACE, _BY_ROWS)
    return normed.to(dtype)


def _add_rms_norm(
    x: Tensor,
    added: Tensor,
    weight: Tensor,
    eps: float,
    offset: float,
    dtype: torch.dtype,
    alpha: float,
) -> tuple[Tensor, Tensor]:
    # liger's kernel returns the sum in the dtype of ``added``, and supports no factor alpha.
    if x.dtype is added.dtype and alpha == 1 and x.dtype in FLOATS:
        normed, total = LigerFusedAddRMSNormFunction.apply(
            added, x, weight, eps, offset, _IN_FP32, _IN_PLACE
        )
        return total, normed.to(dtype)
    total = torch.add(x, added, alpha=alpha)
    return total, _rms_norm(total, weight, eps, offset, dtype)


def _gated_silu(x: Tensor) -> Tensor:
    if x.dtype not in FLOATS:
        return eager.gated_silu(x)
    # Flatten to two dimensions, because liger returns a gradient with two.
    return LigerFusedGateUpSiLUMulFunction.apply(x.flatten(0, -2)).view(*x.shape[:-1], -1)


def _split_and_rotate(
    mixed: Tensor, cos: Tensor, sin: Tensor, groups: int, channels: int
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, half = mixed.size(0), cos.size(-1)
    grouped = mixed.view(tokens, groups, -1, channels)
    query, key, value = grouped.split([grouped.size(2) - 2, 1, 1], dim=2)
    # Copy the heads, because liger rotates in place. It wants [batch, heads, tokens, channels].
    query, key = (
        tensor.clone(memory_format=torch.contiguous_format)
        .view(1, tokens, -1, channels)
        .transpose(1, 2)
        for tensor in (query, key)
    )
    tables = (tensor.view(1, tokens, half) for tensor in (cos, sin))
    query, key = LigerRopeFunction.apply(query, key, *tables, None, 1, 2 * half)
    query, key = (tensor.transpose(1, 2).squeeze(0) for tensor in (query, key))
    return query, key, value.reshape(tokens, groups, channels)


LIGER = PointwiseKernels(
    PointwiseChoice.liger.value, _rms_norm, _add_rms_norm, _gated_silu, _split_and_rotate
)
