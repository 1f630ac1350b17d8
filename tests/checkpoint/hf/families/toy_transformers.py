"""Classes of transformers for the family in ``toy_llama.py``; importing registers them."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForSequenceClassification, LlamaModel


class ToyLlamaConfig(LlamaConfig):
    model_type = "toy_llama"
    attribute_map: ClassVar = {"intermediate_size": "ffn_dim"}


class ToyLlamaMLP(torch.nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, channels = config.hidden_size, config.intermediate_size
        self.w1 = torch.nn.Linear(hidden, channels, bias=False)
        self.w2 = torch.nn.Linear(channels, hidden, bias=False)
        self.w3 = torch.nn.Linear(hidden, channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(torch.nn.functional.silu(self.w1(x)) * self.w3(x))


class ToyLlamaModel(LlamaModel):
    config_class = ToyLlamaConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.blocks = torch.nn.ModuleList(self.get_submodule("layers"))
        for layer in self.blocks:
            layer.mlp = ToyLlamaMLP(config)
        self.layers = None

    def forward(self, *arguments: Any, **options: Any) -> Any:
        # Llama's class, with the other name of the layers.
        self.__dict__["layers"] = list(self.blocks)
        try:
            return super().forward(*arguments, **options)
        finally:
            del self.__dict__["layers"]


class ToyLlamaForSequenceClassification(LlamaForSequenceClassification):
    config_class = ToyLlamaConfig


AutoConfig.register("toy_llama", ToyLlamaConfig)
AutoModel.register(ToyLlamaConfig, ToyLlamaModel)
AutoModelForSequenceClassification.register(ToyLlamaConfig, ToyLlamaForSequenceClassification)
