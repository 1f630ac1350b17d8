"""Formulas for the memory of tensors that only a Gemma 4 has; ``memory.py`` has all others."""

from __future__ import annotations

from nemo_aligner.config.dtypes import ELEMENT_BYTES
from nemo_aligner.config.model import Recompute
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.gemma4 import Gemma4Shape
from nemo_aligner.planning.cost import FP32_BYTES, Plan, keeps_input, widths


def layer_input_bytes(shape: ModelShape, gemma4: Gemma4Shape, plan: Plan) -> float:
    """Count the bytes per token that the inputs of all layers keep outside the layers.

    These are the projection for all layers, which no rank splits and whose norm keeps it, and the
    inputs themselves, which all layers read. The embedding, which the projection reads, is also the
    first layer's input; with sequence parallelism, the projection keeps a gathered copy of it.
    """
    if gemma4.per_layer_width is None:
        return 0.0
    width = shape.num_layers * gemma4.per_layer_width
    is_trained = shape.lora is None and keeps_input(shape, plan, 0, "projection")
    gathered = plan.sequence_parallel * shape.hidden_size
    elements = is_trained * (gathered + width) + width
    statistics = FP32_BYTES * is_trained * shape.num_layers
    return elements * ELEMENT_BYTES[plan.precision] + statistics


def kept_outside_mixer(
    shape: ModelShape, gemma4: Gemma4Shape, plan: Plan, is_kept: bool
) -> tuple[float, float]:
    """Count what a Gemma 4's layer keeps per token, in addition to attention and an MLP.

    The layer's own input is gated, projected and normed. In layers with experts, the norms after
    the two branches of the MLP keep their inputs, the norms before the experts and the router keep
    statistics, and a trained router keeps its input in fp32.

    Args:
        shape: the result of ``ModelShape.of_layer`` for the layer.
        is_kept: linear layers of the MLP keep their inputs.

    Returns:
        The number of elements in the precision of training that tensor parallelism splits, and the
        number of bytes that sequence parallelism splits.
    """
    size, width = ELEMENT_BYTES[plan.precision], gemma4.per_layer_width or 0
    is_kept &= shape.lora is None
    states = bool(width) * ((1 + is_kept) * shape.hidden_size * size + FP32_BYTES)
    if shape.experts is not None:
        in_fp32 = 4 + plan.train_router * shape.hidden_size
        states += 2 * shape.hidden_size * size + FP32_BYTES * in_fp32
    return (2 + is_kept) * width, states


def kept_of_gemma4(
    shape: ModelShape, plan: Plan, is_output_kept: bool, key_width: float
) -> tuple[float, float]:
    """Count the elements per token that a Gemma 4's attention keeps for the backward pass.

    Norms of queries, keys and values keep the output of the projection, or contiguous copies with
    fused kernels. A layer that reads an earlier layer's keys keeps none of its own.

    Args:
        shape: the result of ``ModelShape.of_layer`` for the layer.
        is_output_kept: the output projection keeps its input.
        key_width: elements that attention keeps of keys and values that the layer computed.

    Returns:
        The number of elements in fp32, and the number of elements in the precision of training;
        tensor parallelism splits both.
    """
    _, _, q, kv = widths(shape)
    keys = 2 * kv * shape.has_keys
    normed = q + (keys if plan.fused_kernels else shape.key_value_width)
    statistics = shape.num_attention_heads + 2 * shape.num_query_groups * shape.has_keys
    if plan.recompute is Recompute.selective:
        return statistics, q + keys + normed + is_output_kept * q
    return statistics + shape.num_attention_heads, 2 * q + normed + key_width - (2 * kv - keys)
