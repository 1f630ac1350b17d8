"""Megatron's order of queries, keys and values; query groups of zeros for tensor parallelism."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_qkv(query: Tensor, key: Tensor, value: Tensor, heads: int, groups: int) -> Tensor:
    """Interleave q ``[heads * d, ...]``, k and v ``[groups * d, ...]`` in Megatron's order.

    Returns:
        ``[(heads + 2 * groups) * d, ...]``: for each group its queries, its key and its value.
    """
    row_shape = query.shape[1:]
    parts = [tensor.reshape(groups, -1, *row_shape) for tensor in (query, key, value)]
    return torch.cat(parts, dim=1).reshape(-1, *row_shape)


def unpack_qkv(packed: Tensor, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """Invert ``pack_qkv``: return q, k and v, of a weight or a bias."""
    row_shape = packed.shape[1:]
    channels = packed.shape[0] // (heads + 2 * groups)
    grouped = packed.reshape(groups, -1, *row_shape)
    query, key, value = grouped.split([heads // groups * channels, channels, channels], dim=1)
    return (
        query.reshape(-1, *row_shape),
        key.reshape(-1, *row_shape),
        value.reshape(-1, *row_shape),
    )


def add_zero_groups(axis: int | None, tensor: Tensor, groups: int, padded_groups: int) -> Tensor:
    """Pad a Megatron tensor of ``groups`` query groups with zeros up to ``padded_groups`` groups.

    The values of the added groups and their columns of the output projection are zero. So they
    change no output, their gradients are exactly zero, and they stay zero in training.

    Args:
        axis: ``Rule.group_axis``; None returns the tensor unchanged.
    """
    if axis is None:
        return tensor
    shape = list(tensor.shape)
    shape[axis] = shape[axis] // groups * (padded_groups - groups)
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=axis)


def remove_zero_groups(axis: int | None, tensor: Tensor, groups: int, model_groups: int) -> Tensor:
    """Invert ``add_zero_groups``: keep the first ``model_groups`` of ``groups`` query groups."""
    if axis is None:
        return tensor
    return tensor.narrow(axis, 0, tensor.size(axis) // groups * model_groups)
