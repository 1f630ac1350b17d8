"""A model larger than memory, run for a check: each layer's weights are there while it runs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from nemo_aligner.checkpoint.decoder_tensors import LAYERS
from nemo_aligner.models.reward_model import GPTRewardModel


def read_as_it_runs(model: GPTRewardModel, read: Callable[[str, int | None], Tensor]) -> None:
    """Fill ``model``, of one process, with what ``read`` gives; a layer whenever it is called.

    ``read`` gives a whole tensor, in any dtype, by its name in ``decoder_tensors``, of a layer by
    its number. Afterwards a layer is empty again, so that the model holds what is outside the
    layers, and one of them. It can be run and not trained.
    """
    parameters = dict(model.named_parameters())
    of_layer: dict[int | None, list[tuple[torch.nn.Parameter, str]]] = defaultdict(list)
    entries = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})
    for name, entry in entries.items():
        if name not in parameters:
            continue  # opaque state of TransformerEngine
        number, _, rest = entry.key.removeprefix(LAYERS).partition(".")
        is_inside = entry.key.startswith(LAYERS)
        layer, key = (int(number), rest) if is_inside else (None, entry.key)
        of_layer[layer].append((parameters[name], key))

    def fill(layer: int | None) -> None:
        for parameter, key in of_layer[layer]:
            parameter.data = read(key, layer).to(parameter.device, parameter.dtype)

    def empty(layer: int) -> None:
        for parameter, _ in of_layer[layer]:
            parameter.data = parameter.new_empty(0)

    fill(None)
    for layer, module in enumerate(model.decoder.layers):
        empty(layer)
        module.register_forward_pre_hook(lambda *unused, layer=layer: fill(layer))
        module.register_forward_hook(lambda *unused, layer=layer: empty(layer))


def compute_in_fp32(model: torch.nn.Module) -> None:
    """Have every module of ``model`` compute with its own weights in fp32, made as it runs.

    It gives what ``model.float()`` would, and needs its memory for one module at a time.
    """
    for module in model.modules():
        stored = {
            parameter: parameter.data
            for parameter in module.parameters(recurse=False)
            if parameter.dtype != torch.float32
        }
        if type(module) is torch.nn.Embedding:
            module.register_forward_hook(lambda module, inputs, rows: rows.float())
        elif stored:
            module.register_forward_pre_hook(lambda *unused, stored=stored: _widen(stored))
            module.register_forward_hook(lambda *unused, stored=stored: _restore(stored))


def _widen(stored: Mapping[torch.nn.Parameter, Tensor]) -> None:
    for parameter, data in stored.items():
        parameter.data = data.float()


def _restore(stored: Mapping[torch.nn.Parameter, Tensor]) -> None:
    for parameter, data in stored.items():
        parameter.data = data
