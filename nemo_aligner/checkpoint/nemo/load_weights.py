"""Loading of an opened checkpoint's weights into a model on this rank, after checking sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor

from nemo_aligner.checkpoint.decoder_tensors import (
    EMBEDDING,
    HEAD_PREFIX,
    LAYERS,
    OUTPUT_LAYER,
    PREFIX,
    layer_tensors,
    model_tensors,
)
from nemo_aligner.checkpoint.nemo.folder import NemoFolder
from nemo_aligner.checkpoint.weights.save import LazyTensor, load_into
from nemo_aligner.checkpoint.weights.store import StoredTensors
from nemo_aligner.models.lora import fold_into_weight
from nemo_aligner.models.reward_model import GPTRewardModel
from nemo_aligner.models.shape import (
    LORA_A,
    LORA_B,
    HeadShape,
    ModelShape,
    is_of_adapter,
    read_lora,
)
from nemo_aligner.utils.errors import AlignerError, CheckpointError

_MOST_PADDING = 2**16


def model_shape(folder: NemoFolder, config: Mapping[str, Any] | None = None) -> ModelShape:
    """Read the model's shape, and check the stored weights against it.

    Nothing of the model's size is allocated before. ``config`` replaces the folder's own.
    """
    config = folder.config if config is None else config
    try:
        shape = ModelShape.from_config(config)
    except AlignerError as error:
        raise CheckpointError(f"{folder.source}: {error}") from error
    # The embeddings are padded to a multiple of it, before any weight is read.
    if shape.make_vocab_size_divisible_by > _MOST_PADDING:
        raise CheckpointError(
            f"{folder.source}: make_vocab_size_divisible_by: got "
            f"{shape.make_vocab_size_divisible_by}, wanted at most {_MOST_PADDING}"
        )
    _check_sizes(folder, shape)
    return shape


def _check_sizes(folder: NemoFolder, shape: ModelShape) -> None:
    """Check that exactly the weights of such a model are stored, with its sizes.

    A surplus weight, such as a bias, would make it another model.
    """
    folder.store.check_data(read=False)  # before that the index may claim anything
    stored, of_model, of_layer = folder.tensors, model_tensors(shape), layer_tensors(shape)
    where = f"{folder.source}: {folder.prefix}"
    if OUTPUT_LAYER in stored:
        of_model[OUTPUT_LAYER] = of_model[EMBEDDING]
    for name, size in of_model.items():
        got, may_be_padded = stored.get(name, ((),))[0], name in (EMBEDDING, OUTPUT_LAYER)
        if got != size and not (may_be_padded and got[1:] == size[1:] and got > size):
            least = "at least " if may_be_padded else ""
            raise CheckpointError(
                f"{where}{name}: got {f'shape {list(got)}' if name in stored else 'none'}, its "
                f"settings want {least}{list(size)}; it holds {len(stored)} tensors named "
                f"{folder.prefix}*"
            )
    # A stack's first axis is the number of layers; () is for layers that differ in shape.
    for name, size in of_layer.items():
        layers, got = _of_layers(stored, name)
        if (layers, got) != (shape.num_layers, size):
            raise CheckpointError(
                f"{where}{LAYERS}{name}: got {layers} layers of shape {list(got)}, "
                f"its settings want {shape.num_layers} of {list(size)}"
            )
    numbers = [f"{layer}." for layer in range(shape.num_layers)] if is_per_layer(stored) else [""]
    known = {LAYERS + number + name for number in numbers for name in of_layer}
    # Every head's names; which one it is, is checked against the contract.
    of_head = {HEAD_PREFIX + name for name in HeadShape(True, 1).tensors(1, 1)}
    unknown = sorted(stored.keys() - known - of_model.keys() - of_head)
    if unknown:
        raise CheckpointError(
            f"{folder.source}: {len(unknown)} tensors have no place in the model that its settings "
            f"describe, the first is {folder.prefix}{unknown[0]}"
        )


def _of_layers(stored: StoredTensors, name: str) -> tuple[int, tuple[int, ...]]:
    """Count the layers with the tensor ``name``; returns its shape in each, () if they differ."""
    if not is_per_layer(stored):
        shape = stored.get(LAYERS + name, ((0,),))[0]
        return sum(shape[:1]), shape[1:]
    shapes = [
        entry[0]
        for key, entry in stored.items()
        if key.startswith(LAYERS) and key.endswith(f".{name}")
    ]
    return len(shapes), shapes[0] if len(set(shapes)) == 1 else ()


def is_per_layer(stored: StoredTensors) -> bool:
    """Tell if every layer has its own names; otherwise one tensor stacks all layers."""
    return any(name.startswith(f"{LAYERS}0.") for name in stored)


def load_backbone(model: GPTRewardModel, folder: NemoFolder) -> None:
    """Load all of ``model`` but its head; it has the ``model_shape`` of ``folder``.

    Adapters that the checkpoint lacks stay as they are. Every rank calls it.
    """
    request = model.sharded_state_dict(
        prefix=folder.prefix, metadata={"non_homogeneous_layers": is_per_layer(folder.tensors)}
    )
    has_lora = read_lora(folder.config) is not None
    of_head = folder.prefix + HEAD_PREFIX
    unread = {
        key for key in request if key.startswith(of_head) or (is_of_adapter(key) and not has_lora)
    }
    # The head is set apart: it is fp32, and has no place in a base model.
    state = folder.store.load({key: request[key] for key in request if key not in unread})
    plain = {key.removeprefix(folder.prefix): value for key, value in state.items()}
    load_into(model, plain, folder.source, lambda key: folder.prefix + key in unread)


def head_names(folder: NemoFolder) -> list[str]:
    """Names of the reward head's tensors after ``HEAD_PREFIX``."""
    names = (name for name in folder.tensors if name.startswith(HEAD_PREFIX))
    return [name.removeprefix(HEAD_PREFIX) for name in names]


def read_head(folder: NemoFolder) -> dict[str, Tensor]:
    """Read the reward head in fp32, unsharded, by ``head_names``; every rank calls it."""
    return {name: _read_whole(folder, HEAD_PREFIX + name) for name in head_names(folder)}


def _read_whole(folder: NemoFolder, name: str) -> Tensor:
    shape, _ = folder.tensors[name]
    key = folder.prefix + name
    request = {key: ShardedTensor.from_rank_offsets(key, torch.zeros(shape, dtype=torch.float32))}
    return folder.store.load(request)[key]


# Lazy reading, for conversions.


def unread_decoder(
    folder: NemoFolder, shape: ModelShape
) -> tuple[dict[str, LazyTensor], dict[str, list[LazyTensor]]]:
    """Lazy tensors of the decoder by key, outside and inside the layers, without padding rows.

    LoRA is folded into the weights.
    """
    stored, store = folder.tensors, folder.store
    lora = shape.lora
    is_numbered = is_per_layer(stored)

    def outside(name: str) -> LazyTensor:
        size, dtype = stored[name]
        rows = shape.vocab_size if name in (EMBEDDING, OUTPUT_LAYER) else size[0]
        return LazyTensor((rows, *size[1:]), dtype, lambda: store.read(folder.prefix + name)[:rows])

    def inside(name: str, layer: int) -> LazyTensor:
        if is_numbered:
            return unread(folder, f"{LAYERS}{layer}.{name}")
        return unread(folder, LAYERS + name, layer)

    def whole(name: str, layer: int) -> LazyTensor:
        weight, linear = inside(name, layer), name.removesuffix(".weight")
        if lora is None or linear not in lora.linears:
            return weight
        low, high = (inside(f"{linear}.{matrix}", layer) for matrix in (LORA_A, LORA_B))
        scale = lora.scale
        return replace(
            weight, read=lambda: fold_into_weight(weight.read(), low.read(), high.read(), scale)
        )

    names = [*model_tensors(shape), *([OUTPUT_LAYER] if OUTPUT_LAYER in stored else [])]
    return {PREFIX + name: outside(name) for name in names}, {
        PREFIX + LAYERS + name: [whole(name, layer) for layer in range(shape.num_layers)]
        for name in layer_tensors(replace(shape, lora=None))
    }


def unread(folder: NemoFolder, name: str, layer: int | None = None) -> LazyTensor:
    """Lazy tensor of an opened checkpoint; with ``layer``, one layer of a stacked tensor."""
    size, dtype = folder.tensors[name]
    size = size if layer is None else size[1:]
    return LazyTensor(size, dtype, lambda: folder.store.read(folder.prefix + name, layer))


def in_memory(tensor: Tensor) -> LazyTensor:
    """Wrap a tensor that is in memory already."""
    return LazyTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor)
