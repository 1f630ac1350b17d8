"""A stand-in for Apex's kernel that adds a weight's gradient to a buffer, with its checks."""

import torch
from torch import Tensor


def wgrad_gemm_accum_fp32(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    for tensor in (total_input, grad_output):
        assert tensor.dim() == 2
        assert tensor.is_contiguous()
    assert total_input.dtype is grad_output.dtype
    assert main_grad.dtype is torch.float32
    assert main_grad.is_contiguous()
    main_grad.add_(grad_output.t() @ total_input)


wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32
