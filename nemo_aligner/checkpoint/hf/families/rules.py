"""Rules: which Hugging Face tensors make up a Megatron tensor, and how it comes apart again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_aligner.checkpoint.hf.families.query_groups import pack_qkv, unpack_qkv
from nemo_aligner.checkpoint.hf.families.settings import Config
from nemo_aligner.errors import CheckpointError

Join = Callable[[Sequence[Tensor], Config], Tensor]
Split = Callable[[Tensor, Config], Sequence[Tensor]]


def _copy(tensors: Sequence[Tensor], config: Config) -> Tensor:
    (tensor,) = tensors
    return tensor


def _whole(tensor: Tensor, config: Config) -> Sequence[Tensor]:
    return (tensor,)


@dataclass(frozen=True)
class Rule:
    """One Megatron tensor, the Hugging Face tensors that ``join`` makes it of, and the way back.

    Both take the NeMo config as it is without added query groups.
    """

    megatron: str
    hf: tuple[str, ...]
    join: Join = _copy
    split: Split = _whole


def norm_rule(megatron: str, hf: str, *, hf_is_zero_centered: bool = False) -> Rule:
    """A norm's weight, which either side has as gamma or as gamma - 1."""

    def shift(config: Config) -> int:
        return hf_is_zero_centered - bool(config.get("layernorm_zero_centered_gamma"))

    def join(tensors: Sequence[Tensor], config: Config) -> Tensor:
        return _copy(tensors, config) + shift(config)

    def split(tensor: Tensor, config: Config) -> Sequence[Tensor]:
        return (tensor - shift(config),)

    return Rule(megatron, (hf,), join, split)


def stacked_rule(megatron: str, *hf: str) -> Rule:
    """Tensors of one size, one above the other: the gate of an MLP, and what it lets pass."""

    def join(tensors: Sequence[Tensor], config: Config) -> Tensor:
        return torch.cat(list(tensors))

    def split(tensor: Tensor, config: Config) -> Sequence[Tensor]:
        return tensor.chunk(len(hf))

    return Rule(megatron, hf, join, split)


def qkv_rule(megatron: str, query: str, key: str, value: str) -> Rule:
    """Queries, keys and values, in Megatron's order by query group."""

    def join(tensors: Sequence[Tensor], config: Config) -> Tensor:
        heads, groups = config["num_attention_heads"], config["num_query_groups"]
        wanted = [count * config["kv_channels"] for count in (heads, groups, groups)]
        got = [tensor.shape[0] for tensor in tensors]
        if got != wanted:
            names = [name.split(".")[-2:][0] for name in (query, key, value)]
            raise CheckpointError(
                f"{names[0]}, {names[1]} and {names[2]}: got {got} rows, wanted {wanted}, as the "
                "config says"
            )
        queries, keys, values = tensors
        return pack_qkv(queries, keys, values, heads, groups)

    def split(tensor: Tensor, config: Config) -> Sequence[Tensor]:
        return unpack_qkv(tensor, config["num_attention_heads"], config["num_query_groups"])

    return Rule(megatron, (query, key, value), join, split)
