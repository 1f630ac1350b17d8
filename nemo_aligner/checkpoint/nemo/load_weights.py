"""Check the weights of an opened checkpoint against the model's shape, and load them.

The weights are loaded into the model of this rank or, for conversions, returned as lazy tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from nemo_aligner.checkpoint.decoder_tensors import (
    EMBEDDING,
    HEAD_PREFIX,
    LAYERS,
    OUTPUT_LAYER,
    PREFIX,
    VOCABULARY_TENSORS,
    Shapes,
    layer_tensors,
    model_tensors,
    numbered_tensors,
)
from nemo_aligner.checkpoint.nemo.folder import NemoFolder
from nemo_aligner.checkpoint.weights.save import LazyTensor, load_into
from nemo_aligner.checkpoint.weights.store import StoredTensors
from nemo_aligner.distributed.collectives import agree_on, current_device
from nemo_aligner.models.lora import fold_into_weight
from nemo_aligner.models.quantized_layers import quantized_layers
from nemo_aligner.models.reward_model import GPTRewardModel
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.head import HeadShape
from nemo_aligner.models.shapes.lora import LORA_A, LORA_B, is_of_adapter, read_lora
from nemo_aligner.utils.errors import AlignerError, CheckpointError

_MAX_VOCAB_DIVISOR = 2**16
# Stored tensors that ``load_backbone`` does not load.
_LOADED_ELSEWHERE = (OUTPUT_LAYER, HEAD_PREFIX)


def model_shape(folder: NemoFolder, config: Mapping[str, Any] | None = None) -> ModelShape:
    """Read the model's shape from the settings, and check the stored weights against it.

    Allocates no memory that depends on the model's size. ``config`` replaces the folder's settings.

    Raises:
        CheckpointError: the settings are not supported, or the stored weights do not fit them.
    """
    config = folder.config if config is None else config
    try:
        shape = ModelShape.from_config(config)
    except AlignerError as error:
        raise CheckpointError(f"{folder.source}: {error}") from error
    # The vocabulary is padded to a multiple of this value, so a huge value would exhaust the
    # memory.
    if shape.make_vocab_size_divisible_by > _MAX_VOCAB_DIVISOR:
        raise CheckpointError(
            f"{folder.source}: make_vocab_size_divisible_by: got "
            f"{shape.make_vocab_size_divisible_by}, wanted at most {_MAX_VOCAB_DIVISOR}"
        )
    _check_sizes(folder, shape)
    return shape


def _check_sizes(folder: NemoFolder, shape: ModelShape) -> None:
    """Check that the stored weights are exactly those of a model of this shape, with its sizes.

    A surplus weight, such as a bias, means that the checkpoint holds another kind of model.
    """
    folder.store.check_data(read=False)  # raises if a file or a shard is missing
    stored, outside, inside = folder.tensors, model_tensors(shape), Shapes()
    if shape.is_uniform:
        inside = layer_tensors(shape)
    else:
        outside |= numbered_tensors(shape)
    location = f"{folder.source}: {folder.prefix}"
    if OUTPUT_LAYER in stored:
        outside[OUTPUT_LAYER] = outside[EMBEDDING]
    for name, size in outside.items():
        stored_size = stored.get(name, ((),))[0]
        may_be_padded = name in VOCABULARY_TENSORS
        is_padded = may_be_padded and stored_size[1:] == size[1:] and stored_size > size
        if stored_size != size and not is_padded:
            actual = f"shape {list(stored_size)}" if name in stored else "none"
            raise CheckpointError(
                f"{location}{name}: got {actual}, but the settings imply "
                f"{'at least ' if may_be_padded else ''}{list(size)}; the checkpoint has "
                f"{len(stored)} tensors named {folder.prefix}*"
            )
    for name, size in inside.items():
        layers, layer_size = _find_in_layers(stored, name)
        if (layers, layer_size) != (shape.num_layers, size):
            raise CheckpointError(
                f"{location}{LAYERS}{name}: got {layers} layers of shape {list(layer_size)}, "
                f"but the settings imply {shape.num_layers} layers of shape {list(size)}"
            )
    numbers = [f"{layer}." for layer in range(shape.num_layers)] if is_per_layer(stored) else [""]
    expected = {LAYERS + number + name for number in numbers for name in inside}
    # All names that the tensors of a head may have. ``reward_model`` checks which of them this head
    # needs.
    head = {HEAD_PREFIX + name for name in HeadShape(True, 1).tensors(1, 1)}
    unknown = sorted(stored.keys() - expected - outside.keys() - head)
    if unknown:
        raise CheckpointError(
            f"{folder.source}: {len(unknown)} tensors do not belong to the model that the settings "
            f"describe; the first is {folder.prefix}{unknown[0]}"
        )


def _find_in_layers(stored: StoredTensors, name: str) -> tuple[int, tuple[int, ...]]:
    """Count the layers that have the tensor ``name``.

    Returns:
        The count, and the tensor's shape in a layer; the shape is () if the layers differ.
    """
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
    """Tell if each layer's tensors have separate names; otherwise a tensor stacks all layers.

    The first axis of such a stack is the number of layers.
    """
    return any(name.startswith(f"{LAYERS}0.") for name in stored)


def load_backbone(model: GPTRewardModel, folder: NemoFolder) -> None:
    """Load the weights of ``model`` except its head; collective.

    ``model`` must have the shape ``model_shape(folder)``. If the checkpoint has no LoRA adapters,
    the model's adapters are not changed. Rows of the padded vocabulary become zero, whatever is
    stored, so that the weights do not depend on the layout.

    Raises:
        CheckpointError: on every rank, if a stored tensor has no place in the model, or if
            ``TensorStore.load`` raises it.
    """
    request = _request_weights(model, folder)
    _check_all_requested(request, folder)
    has_lora = read_lora(folder.config) is not None
    head_prefix = folder.prefix + HEAD_PREFIX
    # The head is loaded separately: it is fp32, and a base model has none.
    skipped = {
        key
        for key in request
        if key.startswith(head_prefix) or (is_of_adapter(key) and not has_lora)
    }
    for name, layer in quantized_layers(model).items():
        # One dense weight at a time: a GPU may lack the memory for all of them.
        key = f"{folder.prefix}{name}.weight"
        entry, layer.is_dequantized = request[key], has_lora
        size, dtype = entry.data.shape, entry.data.dtype
        entry.data = torch.empty(size, dtype=dtype, device=current_device())
        layer.store_weight(folder.store.load({key: entry})[key])
        skipped.add(key)
    _load_all_but(skipped, request, model, folder)
    rows = ModelShape.from_config(folder.config).vocab_size
    for name in VOCABULARY_TENSORS:
        if folder.prefix + name in request:
            entry = request[folder.prefix + name]
            entry.data.detach()[max(0, rows - entry.global_offset[0]) :] = 0


def load_adapters(model: GPTRewardModel, folder: NemoFolder) -> None:
    """Load the LoRA adapters of ``model``, if the checkpoint has any, and no other weight.

    Collective.
    """
    if read_lora(folder.config) is not None:
        request = _request_weights(model, folder)
        _load_all_but({key for key in request if not is_of_adapter(key)}, request, model, folder)


def _request_weights(model: GPTRewardModel, folder: NemoFolder) -> dict[str, Any]:
    return model.sharded_state_dict(
        prefix=folder.prefix, metadata={"non_homogeneous_layers": is_per_layer(folder.tensors)}
    )


def _check_all_requested(request: Mapping[str, Any], folder: NemoFolder) -> None:
    """Raise CheckpointError on every rank for a stored tensor that no rank requests; collective.

    ``model_shape`` has checked that the settings imply all stored tensors. A model that is built
    without one, such as a bias, would give other rewards. The output layer is not used, and the
    head is loaded separately.
    """
    requested = set[str]()
    for entry in request.values():
        # A factory stands for a tensor that is stored in several parts.
        parts = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
        requested |= {part.key for part in nested_values(parts)}
    names = sorted(name for name in folder.tensors if not name.startswith(_LOADED_ELSEWHERE))
    flags = [folder.prefix + name in requested for name in names]
    are_requested = agree_on(flags, current_device())
    unused = [
        name for name, is_requested in zip(names, are_requested, strict=True) if not is_requested
    ]
    if unused:
        raise CheckpointError(
            f"{folder.source}: {folder.prefix}{unused[0]}: the model has no place for it, nor for "
            f"{len(unused) - 1} other stored tensors, so its rewards would be wrong. This is a "
            "fault of nemo-aligner: please report it"
        )


def _load_all_but(
    skipped: Set[str], request: Mapping[str, Any], model: GPTRewardModel, folder: NemoFolder
) -> None:
    state = folder.store.load({key: request[key] for key in request if key not in skipped})
    plain = {key.removeprefix(folder.prefix): value for key, value in state.items()}
    load_into(model, plain, folder.source, lambda key: folder.prefix + key in skipped)


def head_names(folder: NemoFolder) -> list[str]:
    """List the names of the reward head's tensors, without ``HEAD_PREFIX``."""
    names = (name for name in folder.tensors if name.startswith(HEAD_PREFIX))
    return [name.removeprefix(HEAD_PREFIX) for name in names]


def missing_contract(folder: NemoFolder) -> CheckpointError:
    """Return the error for a checkpoint that cannot score, as it has no scoring contract."""
    if not head_names(folder):
        return CheckpointError(
            f"{folder.source}: it is a base model without a reward head, so it gives no rewards. "
            "Train a reward model from it with `nemo-aligner train`, or use a reward model"
        )
    return CheckpointError(
        f"{folder.source}: it has no scoring contract, which defines how a sample becomes a score. "
        "Use a reward model that `nemo-aligner` has trained, imported or converted"
    )


def read_head(folder: NemoFolder) -> dict[str, Tensor]:
    """Read the reward head's tensors by name (``head_names``), fp32 and unsharded; collective."""
    return {name: _read_unsharded(folder, HEAD_PREFIX + name) for name in head_names(folder)}


def _read_unsharded(folder: NemoFolder, name: str) -> Tensor:
    shape, _ = folder.tensors[name]
    key = folder.prefix + name
    request = {key: ShardedTensor.from_rank_offsets(key, torch.zeros(shape, dtype=torch.float32))}
    return folder.store.load(request)[key]


# Lazy tensors, whose data is read when a conversion writes them.


def lazy_decoder(
    folder: NemoFolder, shape: ModelShape
) -> tuple[dict[str, LazyTensor], dict[str, list[LazyTensor]]]:
    """Return lazy tensors of the decoder, without vocabulary padding, and with LoRA folded in.

    Returns:
        The tensors outside the layers by their stored names; and for each stored name in the layers
        one tensor of each layer. If layers differ in shape, their tensors cannot be stacked; each
        then has a separate stored name, and all are in the first mapping.
    """
    stored, store = folder.tensors, folder.store
    lora = shape.lora
    is_numbered = is_per_layer(stored)

    def outside(name: str) -> LazyTensor:
        size, dtype = stored[name]
        rows = shape.vocab_size if name in VOCABULARY_TENSORS else size[0]
        return LazyTensor((rows, *size[1:]), dtype, lambda: store.read(folder.prefix + name)[:rows])

    def inside(name: str, layer: int) -> LazyTensor:
        if is_numbered:
            return lazy_tensor(folder, f"{LAYERS}{layer}.{name}")
        return lazy_tensor(folder, LAYERS + name, layer)

    def inside_folded(name: str, layer: int) -> LazyTensor:
        weight, linear = inside(name, layer), name.removesuffix(".weight")
        if lora is None or linear not in lora.linears:
            return weight
        low, high = (inside(f"{linear}.{matrix}", layer) for matrix in (LORA_A, LORA_B))
        scale = lora.scale
        return replace(
            weight, read=lambda: fold_into_weight(weight.read(), low.read(), high.read(), scale)
        )

    names = [*model_tensors(shape), *([OUTPUT_LAYER] if OUTPUT_LAYER in stored else [])]
    plain, tensors = replace(shape, lora=None), {PREFIX + name: outside(name) for name in names}
    if not shape.is_uniform:
        for layer in range(shape.num_layers):
            for name in layer_tensors(plain.of_layer(layer + 1)):
                tensors[f"{PREFIX}{LAYERS}{layer}.{name}"] = inside_folded(name, layer)
        return tensors, {}
    return tensors, {
        PREFIX + LAYERS + name: [inside_folded(name, layer) for layer in range(shape.num_layers)]
        for name in layer_tensors(plain)
    }


def lazy_tensor(folder: NemoFolder, name: str, layer: int | None = None) -> LazyTensor:
    """Return a tensor of an opened checkpoint whose data is read only when a conversion writes it.

    With ``layer``, return only this layer's slice of a tensor that stacks all layers.
    """
    size, dtype = folder.tensors[name]
    size = size if layer is None else size[1:]
    return LazyTensor(size, dtype, lambda: folder.store.read(folder.prefix + name, layer))


def as_lazy_tensor(tensor: Tensor) -> LazyTensor:
    """Wrap a tensor that is in memory as a ``LazyTensor``, the form that conversions write."""
    return LazyTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor)
