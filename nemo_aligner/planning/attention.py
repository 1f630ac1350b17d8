"""Formulas for the memory that the kernels of attention need, by the kernel that a layer gets.

``memory.py`` has the formulas for the rest of a layer; ``cost.py`` explains the letters q, kv, t.
"""

from __future__ import annotations

from collections.abc import Sequence

from nemo_aligner.config.common import Precision
from nemo_aligner.config.dtypes import ELEMENT_BYTES
from nemo_aligner.models.shapes.decoder import ModelShape
from nemo_aligner.models.shapes.layer import LARGEST_FLASH_HEAD
from nemo_aligner.planning.cost import FP32_BYTES, Plan, widths

# Rows of masks are as far apart as a multiple of this number of elements.
_MASK_ALIGNMENT = 16


def _has_no_kernel(shape: ModelShape, plan: Plan) -> bool:
    """Predict whether attention on a GPU runs without FlashAttention, as heads are too wide.

    Args:
        shape: the result of ``ModelShape.of_layer`` for the layer.
    """
    is_grouped = shape.num_query_groups < shape.num_attention_heads
    return plan.fused_kernels and is_grouped and shape.kv_channels > LARGEST_FLASH_HEAD


def key_width(shape: ModelShape, plan: Plan) -> float:
    """Count the elements per token that attention keeps of keys and values.

    If keys and values are copied for each query head (``equal_heads``, or heads that are too wide
    for FlashAttention), attention computes one sequence or shared prefix at a time, and its output
    is kept a second time, which counts here.
    With context parallelism, a rank keeps only its own keys and values, and gathers those of other
    ranks again in the backward pass.
    """
    _, _, q, kv = widths(shape)
    copies = plan.equal_heads or _has_no_kernel(shape, plan)
    if plan.cp > 1 and not copies:
        return 2 * kv
    return 2 * q * plan.packs.kept_keys + q if copies else 2 * kv * plan.packs.kept_keys


def joined_width(shape: ModelShape, plan: Plan, layer: int) -> int:
    """Count the elements per token that attention keeps of its output a second time on a CPU.

    No CPU kernel trains with a window, so each segment is computed by SDPA
    (``models/attention/one_by_one``), if the window is shorter than the longest segment. Autograd
    then keeps the outputs of the segments, and the operation that reads the joined output keeps
    that as well. The kernels of soft caps keep no outputs.

    Args:
        shape: the result of ``ModelShape.of_layer`` for the layer.
        layer: number of the layer, from 0.
    """
    _, _, q, _ = widths(shape)
    return q * _has_masks(shape, plan, layer)


def mask_bytes(shape: ModelShape, plan: Plan, layers: Sequence[int]) -> float:
    """Count the bytes of a pack's masks, which all ``layers`` with a window share on a CPU.

    Segments of the same length share a mask, so that of the longest segment is counted.
    """
    if plan.packs.longest is None or not any(_has_masks(shape, plan, layer) for layer in layers):
        return 0.0
    stride = -(-plan.packs.longest // _MASK_ALIGNMENT) * _MASK_ALIGNMENT
    return plan.packs.longest * stride * ELEMENT_BYTES[plan.precision] / plan.cp


def _has_masks(shape: ModelShape, plan: Plan, layer: int) -> bool:
    """Predict whether a CPU computes a layer's attention one segment at a time, under a mask."""
    window, longest = shape.window_of(layer + 1), plan.packs.longest
    if window is None or longest is None or plan.ring:
        return False
    return window < longest and shape.attn_logit_softcapping is None


def in_attention(shape: ModelShape, plan: Plan) -> float:
    """Count the bytes that a call of attention's backward pass allocates besides its results.

    On a GPU, one kernel computes a whole pack in 16 bits. It sums the gradients of queries in fp32,
    and computes the gradients of keys and values for every query head (Dao 2023,
    "FlashAttention-2", as implemented). On a CPU, a call computes one segment, and adds its
    gradients to those of the pack. In a ring, a call computes one rank's part of the keys, and the
    gradients of queries are summed over the calls in fp32.
    """
    _, _, q, kv = widths(shape)
    size, packs = ELEMENT_BYTES[plan.precision], plan.packs
    if packs.longest is not None:
        key_tensors = 2 / plan.cp if plan.ring else 2
        return packs.longest * (key_tensors + 1 / plan.cp) * q * size / plan.tp
    if plan.precision is Precision.fp32:
        return 0.0
    keys = plan.tokens if plan.ring else packs.kept_keys * packs.tokens
    in_fp32 = plan.tokens * FP32_BYTES * q * (2 if plan.ring else 1)
    return (in_fp32 + 2 * q * size * keys * (kv < q)) / plan.tp


def keys_in_attention(shape: ModelShape, plan: Plan) -> float:
    """Count the elements per token of keys, values and their gradients in the backward pass.

    With context parallelism, the keys and values of the whole pack are gathered again. In a ring, a
    rank holds the keys and values of two ranks, because it computes with one part while the next
    part arrives. It holds three parts of the gradients: the part to which it adds, the part that it
    has sent, and the part that arrives. With two ranks no further part arrives after the first.
    """
    _, _, _, kv = widths(shape)
    if plan.cp == 1:
        return key_width(shape, plan)
    if plan.ring:
        return 2 * kv * (4 if plan.cp == 2 else 5)
    return 4 * kv * plan.cp * plan.packs.kept_keys
