"""Queries, keys and values by group, and groups of zeros."""

from __future__ import annotations

import torch

from nemo_aligner.checkpoint.hf.families.query_groups import (
    add_zero_groups,
    pack_qkv,
    remove_zero_groups,
    unpack_qkv,
)
from nemo_aligner.checkpoint.hf.families.qwen2 import QWEN2
from tests.checkpoint.hf.families.models import find, nemo_config


def test_added_groups_have_biases_of_zeros() -> None:
    config = nemo_config("qwen2")
    rule = find("self_attention.linear_qkv.bias", QWEN2.layer)
    bias = rule.join([torch.ones(rows) for rows in (64, 32, 32)], config)
    padded = add_zero_groups(rule.megatron, bias, 2, 3)
    assert padded.shape == (3 * (2 + 2) * 16,)
    assert padded[: bias.numel()].equal(bias)
    assert not padded[bias.numel() :].any()
    assert remove_zero_groups(rule.megatron, padded, 3, 2).equal(bias)


def test_packing_qkv_interleaves_by_group_and_comes_apart_again() -> None:
    heads, groups, size = 4, 2, 3
    query = torch.arange(heads * size * 5).reshape(heads * size, 5)
    key, value = (
        offset + torch.arange(groups * size * 5).reshape(-1, 5) for offset in (1000, 2000)
    )
    packed = pack_qkv(query, key, value, heads, groups)
    assert packed.shape == ((heads + 2 * groups) * size, 5)
    torch.testing.assert_close(packed[: 2 * size], query[: 2 * size])
    torch.testing.assert_close(packed[2 * size : 3 * size], key[:size])
    torch.testing.assert_close(packed[3 * size : 4 * size], value[:size])
    for got, wanted in zip(unpack_qkv(packed, heads, groups), (query, key, value), strict=True):
        torch.testing.assert_close(got, wanted)
