"""An opened checkpoint's tensors, known by their shapes, to be read one after the other."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from nemo_aligner.checkpoint.decoder_tensors import (
    EMBEDDING,
    LAYERS,
    OUTPUT_LAYER,
    PREFIX,
    layer_tensors,
    model_tensors,
)
from nemo_aligner.checkpoint.nemo.folders import NemoFolder
from nemo_aligner.checkpoint.nemo.into_model import is_per_layer
from nemo_aligner.checkpoint.weights.stream import UnreadTensor
from nemo_aligner.models.adapters import folded
from nemo_aligner.models.lora import LORA_A, LORA_B
from nemo_aligner.models.shape import ModelShape


def unread_decoder(
    folder: NemoFolder, shape: ModelShape
) -> tuple[dict[str, UnreadTensor], dict[str, list[UnreadTensor]]]:
    """The decoder's tensors by key, outside the layers and inside, without vocabulary padding.

    LoRA is folded into the weights that it is beside.
    """
    stored, store = folder.tensors, folder.store
    lora = shape.lora
    is_numbered = is_per_layer(stored)

    def outside(name: str) -> UnreadTensor:
        size, dtype = stored[name]
        rows = shape.vocab_size if name in (EMBEDDING, OUTPUT_LAYER) else size[0]
        return UnreadTensor(
            (rows, *size[1:]), dtype, lambda: store.read(folder.prefix + name)[:rows]
        )

    def inside(name: str, layer: int) -> UnreadTensor:
        key = f"{LAYERS}{layer}.{name}" if is_numbered else LAYERS + name
        size, dtype = stored[key]
        index = None if is_numbered else layer
        size = size if is_numbered else size[1:]
        return UnreadTensor(size, dtype, lambda: store.read(folder.prefix + key, index))

    def whole(name: str, layer: int) -> UnreadTensor:
        weight, linear = inside(name, layer), name.removesuffix(".weight")
        if lora is None or linear not in lora.linears:
            return weight
        low, high = (inside(f"{linear}.{matrix}", layer) for matrix in (LORA_A, LORA_B))
        scale = lora.scale
        return replace(weight, read=lambda: folded(weight.read(), low.read(), high.read(), scale))

    names = [*model_tensors(shape), *([OUTPUT_LAYER] if OUTPUT_LAYER in stored else [])]
    return {PREFIX + name: outside(name) for name in names}, {
        PREFIX + LAYERS + name: [whole(name, layer) for layer in range(shape.num_layers)]
        for name in layer_tensors(replace(shape, lora=None))
    }


def in_memory(tensor: Tensor) -> UnreadTensor:
    """A tensor that needs no reading."""
    return UnreadTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor)
