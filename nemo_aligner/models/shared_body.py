"""Share the body of a loaded model with further models: all weights but LoRA adapters and the head.

The models stay separate objects, each with its own adapters, head, contract and caches, so each
computes exactly what it would compute alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_aligner.config.common import Precision
from nemo_aligner.models.quantized_layers import QuantizedLayer, share_weight
from nemo_aligner.models.reward_model import GPTRewardModel

_HEAD, _ADAPTER = "rm_head", "adapter"

# Loaded models by the fingerprint of their body and their precision.
BodyKey = tuple[str, Precision]
Bodies = dict[BodyKey, GPTRewardModel]


@dataclass(frozen=True)
class SharedBody:
    """How many weights of a model are shared.

    Attributes:
        source: the model that the body is from; None if the model has loaded one of its own.
        num_parameters: parameters of the whole model, on all ranks.
        num_shared: those that are also parameters of ``source``.
    """

    source: GPTRewardModel | None
    num_parameters: int
    num_shared: int


def share_body(model: GPTRewardModel, source: GPTRewardModel) -> None:
    """Replace the body of ``model`` by that of ``source``: the same tensors, in the same memory.

    Both must have the same body (``build_body_fingerprint``), layout and precision. ``source`` may
    be prepared for scoring, with weights that ``freeze_for_scoring`` has reordered.
    """
    for name, module in model.named_modules():
        if not {_HEAD, _ADAPTER}.isdisjoint(name.split(".")):
            continue
        source_module = source.get_submodule(name)
        if isinstance(module, QuantizedLayer):
            share_weight(module, source_module)
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for key, _ in tensors:
            setattr(module, key, getattr(source_module, key))
