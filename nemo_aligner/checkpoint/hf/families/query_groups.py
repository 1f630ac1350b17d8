"""Queries, keys and values in Megatron's order, and query groups of zeros beside a model's own."""

from __future__ import annotations

import torch
from torch import Tensor

# The axis of query groups in the tensors that have one.
_GROUP_AXES = {
    "self_attention.linear_qkv.weight": 0,
    "self_attention.linear_qkv.bias": 0,
    "self_attention.linear_proj.weight": 1,
}


def group_axis(name: str) -> int | None:
    """The axis of query groups in a Megatron tensor, None where it has none."""
    return _GROUP_AXES.get(name)


def pack_qkv(query: Tensor, key: Tensor, value: Tensor, heads: int, groups: int) -> Tensor:
    """q ``[heads * d, ...]``, k and v ``[groups * d, ...]`` in Megatron's order.

    Per group of query heads: its queries, its key, its value; ``[(heads + 2 * groups) * d, ...]``.
    """
    rest = query.shape[1:]
    parts = [tensor.reshape(groups, -1, *rest) for tensor in (query, key, value)]
    return torch.cat(parts, dim=1).reshape(-1, *rest)


def unpack_qkv(packed: Tensor, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of ``pack_qkv``."""
    rest = packed.shape[1:]
    size = packed.shape[0] // (heads + 2 * groups)
    grouped = packed.reshape(groups, -1, *rest)
    query, key, value = grouped.split([heads // groups * size, size, size], dim=1)
    return (query.reshape(-1, *rest), key.reshape(-1, *rest), value.reshape(-1, *rest))


def add_zero_groups(name: str, tensor: Tensor, groups: int, wanted: int) -> Tensor:
    """A Megatron tensor of ``groups`` query groups, with groups of zeros up to ``wanted``.

    Their values are zeros and so are their columns of the projection: they add nothing to the
    output, their gradients are exactly zero, and so they stay.
    """
    axis = group_axis(name)
    if axis is None:
        return tensor
    shape = list(tensor.shape)
    shape[axis] = shape[axis] // groups * (wanted - groups)
    return torch.cat([tensor, tensor.new_zeros(shape)], dim=axis)


def remove_zero_groups(name: str, tensor: Tensor, groups: int, kept: int) -> Tensor:
    """The inverse of ``add_zero_groups``: of ``groups`` query groups the first ``kept``."""
    axis = group_axis(name)
    if axis is None:
        return tensor
    return tensor.narrow(axis, 0, tensor.size(axis) // groups * kept)
