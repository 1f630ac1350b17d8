"""Norms as megatron-core builds them: of a residual stream of any dtype, for products in one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_aligner.models.pointwise import rms_norm


class SequenceParallelRMSNorm(torch.nn.RMSNorm):
    """RMSNorm that tells Megatron whether its weight sees only a shard of the tokens.

    Its output has the dtype of the model, as the products want it, whatever the input's.
    Unmarked under sequence parallelism, its gradient would miss the other ranks' tokens.
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
        weight = self.weight.float() + 1 if self._is_zero_centered else self.weight
        return rms_norm(x, weight, self._eps, self._dtype)


class SequenceParallelLayerNorm1P(torch.nn.LayerNorm):
    """The same for a LayerNorm with a bias, whose weight is gamma - 1."""

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


NORMS = {"RMSNorm": SequenceParallelRMSNorm, "LayerNorm": SequenceParallelLayerNorm1P}
