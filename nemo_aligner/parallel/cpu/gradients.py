"""Weight gradients on a CPU: what megatron-core takes from Apex's CUDA extension."""

from __future__ import annotations

from typing import Any

from nemo_aligner.parallel.cpu.products import add_weight_gradient


class _WeightGradients:
    """What megatron-core takes from Apex's CUDA extension: the product is summed as it is made."""

    @staticmethod
    def wgrad_gemm_accum_fp32(total_input: Any, grad_output: Any, main_grad: Any) -> None:
        add_weight_gradient(main_grad, total_input, grad_output)

    wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32


def accumulate_weight_gradients(layers: Any) -> None:
    layers.fused_weight_gradient_mlp_cuda = _WeightGradients
    layers._grad_accum_fusion_available = True
